"""Datasets of Kaggle by name, as sources and as models, fetched by the real client."""

import json
from pathlib import Path

import pytest

from lmwright.config.run import Data, Source, Tokenizer
from lmwright.data.prepare import prepare
from lmwright.data.sources.files import cut_parts, find_files
from lmwright.data.sources.read import read_rows
from lmwright.data.tokens.tokenizer import save_tokenizer
from lmwright.errors import UserError
from lmwright.formats.open import open_place
from lmwright.storage import kaggle, kaggle_client
from tests.cloud.kaggle.service import TOKEN
from tests.data.chat_problem import chat_tokenizer
from tests.data.user_run import RUN, command, texts
from tests.storage.test_silent_servers import Silent


@pytest.fixture(autouse=True)
def fresh():
    kaggle._find.cache_clear()
    kaggle._api.cache_clear()


@pytest.fixture
def named(fake):
    """The stand-in with a dataset of texts."""
    lines = [json.dumps({"text": text}) + "\n" for text in texts(60)]
    fake.datasets["words"] = {
        "README.md": b"no data",
        **{f"text/s{i}.jsonl": "".join(lines[i::4]).encode() for i in range(4)},
        "other.csv": b"text\nx\n",
    }
    return fake


def names_of(path, **options):
    return [file.name for file in find_files(Source(path=path, **options))]


def test_files_of_a_name(named):
    shards = [f"text/s{i}.jsonl" for i in range(4)]
    assert names_of("kaggle://acme/words", format="jsonl") == shards
    assert names_of("kaggle://acme/words/text") == shards
    assert names_of("kaggle://acme/words@3/text/s[12].jsonl") == shards[1:3]
    assert names_of("kaggle://acme/words/other.csv") == ["other.csv"]
    (file,) = find_files(Source(path="kaggle://acme/words/text/s0.jsonl"))
    assert file.path == "kaggle://acme/words@3/text/s0.jsonl" and file.stamp == "3"
    assert file.size == len(named.datasets["words"]["text/s0.jsonl"])
    assert named.downloads == []


def test_folders_and_globs_take_what_they_take_on_a_disk(named, tmp_path):
    """Nothing hidden but by a part that begins with a dot, and no slash for a star."""
    files = [".hid.txt", "a.txt", "sub/b.txt", "sub/.ipynb_checkpoints/old.txt", "sub/deep/c.txt",
             "sub/.d.txt", "x[1].txt"]  # fmt: skip
    named.datasets["notes"] = dict.fromkeys(files, b"one\n")
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("one\n")
    asked = ["", "/sub", "/*.txt", "/**/*.txt", "/sub/*", "/sub/**", "/sub/.*.txt", "/s*/?.txt",
             "/sub/.ipynb*/*.txt", "/[ab].txt", "/x[1].txt"]  # fmt: skip
    for inner in asked:
        here = {Path(file.path) for file in find_files(Source(path=f"{tmp_path}{inner}"))}
        there = find_files(Source(path=f"kaggle://acme/notes{inner}"))
        assert {tmp_path / file.path.partition("@3/")[2] for file in there} == here, inner


def test_rows_and_a_copy_that_stays(named, tmp_path):
    source = Source(path="kaggle://acme/words/text")
    for _ in range(2):
        parts = cut_parts(find_files(source), source)
        rows = [row for part in parts for piece in part for row in read_rows(piece, source)]
        assert sorted(row.text for row in rows) == sorted(texts(60))
    assert len(named.downloads) == 4
    copy = tmp_path / "cache/lmwright/kaggle/acme/words/3/text/s0.jsonl"
    assert copy.read_bytes() == named.datasets["words"]["text/s0.jsonl"]
    copy.write_bytes(b"cut")
    assert kaggle.fetch_file("kaggle://acme/words@3/text/s0.jsonl") == copy
    assert len(named.downloads) == 5 and copy.stat().st_size > 3


def test_a_sample_fetches_what_is_drawn(named, tmp_path, monkeypatch):
    from lmwright.data.text import normalize as module

    save_tokenizer(chat_tokenizer(), tmp_path / "tokenizer")
    source = Source(path="kaggle://acme/words/text", sample_tokens=300)
    tokenizer = Tokenizer(path=str(tmp_path / "tokenizer"))
    data = Data(dir=str(tmp_path / "data"), sources=(source,), tokenizer=tokenizer)
    prepare(data, 16, stages=("tokenizer",), workers=1)
    made = module.normalize(data, workers=1, part_bytes=1000)
    assert made.facts["sampled"]["text"]["parts"] == len(named.downloads) == 1


def test_a_run_reads_them(named, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN.replace("PATH", "kaggle://acme/words/text"))
    code, said = command(capsys, "prepare", "run.toml")
    assert code == 0 and TOKEN not in said
    code, said = command(capsys, "prepare", "run.toml")
    assert code == 0 and "up to date" in said
    assert "kaggle://acme/words@3/" in Path("data/normalize/manifest.json").read_text()


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("kaggle://acme/nothing", "kaggle://acme/nothing: there is no such dataset, or this acc"),
        ("kaggle://acme/words/none", "kaggle://acme/words/none matches no file; check the path"),
        ("kaggle://acme", "kaggle://acme: is not the name of a dataset; write kaggle://owner/d"),
    ],
)
def test_names_that_are_refused(named, path, told):
    with pytest.raises(UserError, match=r"data\.sources") as error:
        find_files(Source(path=path))
    assert told in str(error.value)


def test_tokens_that_are_refused_and_never_told(named, monkeypatch):
    monkeypatch.setenv("KAGGLE_API_TOKEN", "KGAT_another")
    with pytest.raises(UserError, match="does not accept the token; make a new one") as error:
        find_files(Source(path="kaggle://acme/words"))
    assert "KGAT_another" not in str(error.value)
    monkeypatch.delenv("KAGGLE_API_TOKEN")
    kaggle._api.cache_clear()
    with pytest.raises(UserError, match="no token here; make one at"):
        find_files(Source(path="kaggle://acme/words"))
    monkeypatch.setenv("KAGGLE_API_TOKEN", TOKEN)
    named.refusals["ListDatasetFiles"] = 500, f"broken {TOKEN}"
    with pytest.raises(UserError, match="Kaggle cannot be asked") as error:
        find_files(Source(path="kaggle://acme/words"))
    assert TOKEN not in str(error.value)


SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


def test_files_of_a_model(named):
    files = {"config.json": json.dumps(SMALL).encode(), "model.safetensors": b"weights"}
    named.datasets["llama"] = {f"base/{name}": raw for name, raw in files.items()}
    named.datasets["llama"] |= {"base/pytorch_model.bin": b"pickle", "base/onnx/a.json": b"{}"}
    place = open_place("kaggle://acme/llama/base", header=True)
    assert place.model.embed_dim == 16 and named.downloads == ["base/config.json"]
    place = open_place("kaggle://acme/llama/base")
    assert {path.name for path in place.path.iterdir()} == set(files)
    assert sorted(named.downloads) == ["base/config.json", "base/model.safetensors"]

    named.datasets["pickled"] = {"config.json": files["config.json"], "pytorch_model.bin": b""}
    with pytest.raises(UserError, match="holds only pickled weights"):
        open_place("kaggle://acme/pickled")
    with pytest.raises(UserError, match=r"holds none of .*name the folder within it"):
        open_place("kaggle://acme/llama")


@pytest.mark.slow  # transformers
def test_a_model_is_imported_and_trained_from(named, tmp_path, capsys, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    config = {"bos_token_id": 1, "eos_token_id": 2} | SMALL | {"vocab_size": 512}
    config = transformers.LlamaConfig(**config)
    transformers.LlamaForCausalLM(config).save_pretrained("hf")
    files = {path.name: path.read_bytes() for path in Path("hf").iterdir()}
    named.datasets["llama"] = {f"base/{name}": raw for name, raw in files.items()}
    code, said = command(capsys, "import", "kaggle://acme/llama/base", "mine")
    assert code == 0, said
    code, said = command(capsys, "import", "hf", "theirs")
    assert code == 0 and _weights("mine") == _weights("theirs")
    run = RUN.replace("PATH", "kaggle://acme/words/text").replace("[train]\n", TRAIN)
    a, b = run.index("[model]"), run.index("[data]")
    save_tokenizer(chat_tokenizer(), tmp_path / "tokenizer")
    run = run.replace("{ vocab_size = 300 }", '{ path = "tokenizer" }')
    Path("run.toml").write_text(run[:a] + run[b:])
    assert command(capsys, "prepare", "run.toml")[0] == 0
    code, said = command(capsys, "train", "run.toml")
    assert code == 0, said


TRAIN = '[train]\ninit_from = "kaggle://acme/llama/base"\n'


def _weights(folder):
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.safetensors")}


@pytest.mark.parametrize("name", ["/etc/passwd", "../../up.jsonl", "text/../../up.jsonl"])
def test_a_listing_names_no_file_outside_its_folder(monkeypatch, name):
    listed = kaggle.Dataset("acme", "words", 3, {name: 2})
    monkeypatch.setattr(kaggle, "find_dataset", lambda path: (listed, name))
    with pytest.raises(UserError, match="there is no such file in the dataset"):
        kaggle.fetch_file(f"kaggle://acme/words@3/{name}")


@pytest.mark.parametrize("logged_in", [False, True])
def test_a_service_that_never_answers_is_not_waited_for(named, monkeypatch, logged_in):
    from kagglesdk import kaggle_env

    monkeypatch.setattr(kaggle_client, "ANSWER_S", 0.2)
    if logged_in:
        kaggle._api()
    with Silent() as server:
        address = f"http://{server.address}"
        monkeypatch.setitem(kaggle_env._env_to_endpoint, kaggle_env.KaggleEnv.LOCAL, address)
        with pytest.raises(UserError, match=r"acme/words: Kaggle cannot be asked \(.*out"):
            kaggle.find_dataset("kaggle://acme/words")
