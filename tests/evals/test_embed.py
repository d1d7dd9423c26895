"""Vectors of texts: equal to transformers' hidden states, averaged, and to sentence-transformers,
from runs and folders; every format of their files, in order and resumed."""

import csv
import json
from dataclasses import replace

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

from lmwright.cli.main import main
from lmwright.config.run import Data, Pack, Run, Source, Tokenizer, Train
from lmwright.core import copies
from lmwright.data.prepare import prepare
from lmwright.errors import UserError
from lmwright.evals import documents, embed
from lmwright.evals.embed import embed_command
from lmwright.formats.convert import export_command
from lmwright.formats.load import load_model
from lmwright.formats.sentence import write_modules
from lmwright.models.eurobert import EuroBert
from lmwright.models.modernbert import ModernBert
from lmwright.objectives.mlm import Mlm
from lmwright.optim import KINDS
from tests import saved_run
from tests.saved_run import weights_at

TEXTS = [
    f"the {('cat', 'dog', 'cow')[i % 3]} {i}" + f" on {i * i} mats" * (i % 9) for i in range(60)
]
SMALL = {
    "vocab_size": 320, "embed_dim": 24, "mlp_dim": 32, "num_layers": 2, "num_heads": 4,
    "seq_len": 44,
}  # fmt: skip
MODELS = {
    "eurobert": EuroBert(**SMALL, num_kv_heads=2, head_dim=6),
    "modernbert": ModernBert(**SMALL, num_kv_heads=4, head_dim=6, window=5),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a masked run of each family, its export, and the texts as csv."""
    root = tmp_path_factory.mktemp("vectors")
    with (root / "texts.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["name", "words"], *([f"n{i}", t] for i, t in enumerate(TEXTS))]
        )
    run = Run(
        name="masked",
        dir="",
        model=MODELS["eurobert"],
        objective=Mlm(mask_token_id=1),
        optim=KINDS["adamw"](learning_rate=0.01),
        data=Data(
            dir=str(root / "data"),
            workers=1,
            sources=(Source(path=str(root / "texts.csv"), text_column="words"),),
            tokenizer=Tokenizer(vocab_size=290, special_tokens=("<|endoftext|>", "<|mask|>")),
            pack=Pack(method="best-fit"),
        ),
        train=Train(steps=4, global_batch_size=2, precision="fp32"),
    )
    prepare(run.data, 44)
    with pytest.MonkeyPatch.context() as patch:  # else attention is saturated
        patch.setattr(
            saved_run, "weights_at", lambda *a: jax.tree.map(lambda x: x / 3, weights_at(*a))
        )
        for name, model in MODELS.items():
            saved_run.save_run(replace(run, dir=str(root / name), model=model), steps=(1,))
            export_command(root / name, root / f"{name}-hf")
    return root


def embedded(made, model, out, **options):
    """The file of vectors that the command writes."""
    options = {"text_column": "words", "id_column": "name", "precision": "fp32", **options}
    assert embed_command(str(model), str(made / "texts.csv"), out=str(out), **options) == 0
    return out


def reference(folder, texts, pooling="mean"):
    """transformers' last hidden states, pooled over the tokens of each text."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "right"
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=44, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    if pooling == "first":
        return states[:, 0].numpy()
    mask = inputs["attention_mask"][..., None].float()
    return ((states * mask).sum(1) / mask.sum(1)).numpy()


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_vectors_are_those_of_transformers(made, family, pooling, tmp_path):
    folder = made / f"{family}-hf"
    wanted = reference(folder, TEXTS, pooling)
    found = embedded(made, folder, tmp_path / "v.npz", pooling=pooling)
    with np.load(found) as arrays:
        assert arrays["ids"].tolist() == [f"n{i}" for i in range(60)]
        ours = arrays["embeddings"]
    distance = np.linalg.norm(ours - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert ours.dtype == np.float32 and distance.max() <= 1e-5


@pytest.mark.parametrize("has_room", [True, False])
def test_several_devices_give_the_same(has_room, made, tmp_path, monkeypatch):
    """Each with texts of its own, or sharing weights that one has no memory for; the last batches
    are fewer than the devices."""
    monkeypatch.setattr(documents, "BATCH_TOKENS", 256)
    monkeypatch.setattr(copies, "one_has_room", lambda *_: has_room)
    kept = []
    program = embed.Vectors.program
    monkeypatch.setattr(
        embed.Vectors, "program", lambda self, fn: kept.append(self.weights) or program(self, fn)
    )
    found = embedded(made, made / "eurobert-hf", tmp_path / "v.npy", devices=4)
    wanted = reference(made / "eurobert-hf", TEXTS)
    np.testing.assert_allclose(np.load(found), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    shardings = [a.sharding for a in jax.tree.leaves(kept)]
    assert {len(each.device_set) for each in shardings} == {4}
    assert all(each.is_fully_replicated for each in shardings) == has_room


def test_a_run_and_its_export_give_the_same(made, tmp_path):
    one = embedded(made, made / "eurobert", tmp_path / "a.npy")
    two = embedded(made, made / "eurobert-hf", tmp_path / "b.npy")
    np.testing.assert_allclose(np.load(one), np.load(two), atol=1e-6)


def test_the_first_numbers_at_length_one(made, tmp_path):
    whole = np.load(embedded(made, made / "eurobert-hf", tmp_path / "a.npy"))
    cut = np.load(embedded(made, made / "eurobert-hf", tmp_path / "b.npy", dim=7, length="one"))
    wanted = whole[:, :7] / np.linalg.norm(whole[:, :7], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, wanted, atol=1e-6)


def lines_of(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_every_format_holds_the_same(made, tmp_path, capsys):
    wanted = np.load(embedded(made, made / "modernbert-hf", tmp_path / "v.npy"))
    lines = lines_of(embedded(made, made / "modernbert-hf", tmp_path / "v.jsonl"))
    assert [line["id"] for line in lines] == [f"n{i}" for i in range(60)]
    np.testing.assert_array_equal(np.float32([line["embedding"] for line in lines]), wanted)
    assert 0 < sum("cut" in line for line in lines) < 60
    table = pq.read_table(embedded(made, made / "modernbert-hf", tmp_path / "v.parquet"))
    np.testing.assert_array_equal(np.stack(table["embedding"].to_numpy()), wanted)
    assert table["row"].to_pylist() == list(range(2, 62))
    said = capsys.readouterr().out
    assert "60 vectors of 24 numbers; " in said and " texts cut to 44 tokens" in said
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".jsonl", ".npy", ".parquet"]


@pytest.mark.parametrize("form", ["jsonl", "npz", "parquet"])
def test_an_interrupted_command_goes_on(made, form, tmp_path, monkeypatch, capsys):
    """Without a row lost or twice, after a line that was cut off; rows without a text stay."""
    file, out = tmp_path / "texts.jsonl", tmp_path / f"out.{form}"
    rows = [json.dumps({"text": t}) for t in TEXTS]
    rows[7] = json.dumps({"text": 3})
    file.write_text("\n".join(rows) + "\n")
    monkeypatch.setattr(documents, "CHUNK", 16)
    whole = embed.embed_lines
    ask = {"out": str(out), "precision": "fp32"}

    def broken(*args):
        for number, lines in enumerate(whole(*args)):
            if number == 2:
                yield ['{"row": 33, "id']
                raise KeyboardInterrupt
            yield lines

    monkeypatch.setattr(embed, "embed_lines", broken)
    with pytest.raises(KeyboardInterrupt):
        embed_command(str(made / "eurobert-hf"), str(file), **ask)
    assert not out.exists()
    monkeypatch.setattr(embed, "embed_lines", whole)
    embed_command(str(made / "eurobert-hf"), str(file), **ask)
    said = capsys.readouterr().out
    assert "32 rows were there; 59 vectors" in said and "1 rows without a text" in said
    assert not list(tmp_path.glob("*.part*")) and not list(tmp_path.glob("*.tmp"))
    wanted = np.load(embedded(made, made / "eurobert-hf", tmp_path / "v.npy"))
    good = np.arange(60) != 7
    if form == "jsonl":
        lines = lines_of(out)
        assert lines[7]["error"] == "'text' is a number, not text" and "embedding" not in lines[7]
        assert lines[7]["id"].endswith(":8")
        found = np.float32([line.get("embedding", [0] * 24) for line in lines])
    elif form == "npz":
        found = np.load(out)["embeddings"]
        assert np.isnan(found[7]).all()
    else:
        table = pq.read_table(out)
        assert table["error"][7].as_py() and table["embedding"][7].as_py() is None
        found = np.float32([v or [0] * 24 for v in table["embedding"].to_pylist()])
    np.testing.assert_allclose(found[good], wanted[good], atol=1e-6)


@pytest.mark.parametrize("pooling, length", [("mean", "any"), ("first", "one")])
def test_a_folder_of_sentence_transformers(made, pooling, length, tmp_path):
    """One that transformers wrote, without a head, says how its vectors are made."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = transformers.AutoModel.from_pretrained(made / "modernbert-hf", dtype=torch.float32)
    model.save_pretrained(tmp_path / "body")
    transformers.AutoTokenizer.from_pretrained(made / "modernbert-hf").save_pretrained(
        tmp_path / "body"
    )
    plain = load_model(tmp_path / "body").model
    assert (plain.pooling, plain.length) == ("mean", "any")
    assert plain.encoder.work(44).spec.keys() == MODELS["modernbert"].spec().keys()
    write_modules(tmp_path / "body", replace(plain, pooling=pooling, length=length))
    wanted = reference(tmp_path / "body", TEXTS, pooling)
    if length == "one":
        wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    ours = np.load(embedded(made, tmp_path / "body", tmp_path / "v.npy"))
    np.testing.assert_allclose(ours, wanted, atol=1e-5)
    theirs = pytest.importorskip("sentence_transformers").SentenceTransformer(
        str(tmp_path / "body"), device="cpu"
    )
    np.testing.assert_allclose(ours, theirs.encode(TEXTS), atol=1e-5)


def test_a_blank_line_of_text_has_its_place(made, tmp_path, capsys):
    (tmp_path / "t.txt").write_text("\nthe man\n\n\na dog\n")
    words = ["embed", str(made / "eurobert-hf"), str(tmp_path / "t.txt")]
    assert main([*words, "--out", str(tmp_path / "v.npy")]) == 0
    assert "2 vectors" in (told := capsys.readouterr().out) and "3 rows without a text" in told
    vectors = np.load(tmp_path / "v.npy")
    assert np.isfinite(vectors).all(axis=1).tolist() == [False, True, False, False, True]


def test_what_is_refused(made, tmp_path, capsys):
    model, file = str(made / "eurobert-hf"), str(made / "texts.csv")
    ask = ["embed", model, file, "--text-column", "words"]
    said = lambda: capsys.readouterr().err  # noqa: E731
    assert main([*ask, "--out", str(tmp_path / "v.txt")]) == 2
    assert "v.txt must end in one of .jsonl, .parquet, .npz, .npy" in said()
    assert main([*ask, "--dim", "25", "--out", str(tmp_path / "v.npy")]) == 2
    assert "--dim: 25 is not between 1 and 24" in said()
    assert main(["embed", model, file, "--out", str(tmp_path / "v.npy")]) == 2
    assert "has no column 'text', only 'name', 'words'; change --text-column" in said()
    (tmp_path / "t.txt").write_text("a\n")
    assert main(["embed", model, str(tmp_path / "t.txt"), "--id-column", "x"]) == 2
    assert "--id-column: no effect on" in said()
    (tmp_path / "v.npy").write_text("")
    assert main([*ask, "--out", str(tmp_path / "v.npy")]) == 2
    assert "exists; replace it with --overwrite" in said()
    assert main(["embed", str(tmp_path), file]) == 2
    modules = made / "eurobert-hf" / "modules.json"
    assert not modules.exists()


@pytest.mark.parametrize("of", [documents.of_documents, documents.of_tokens])
def test_results_that_are_not_finite_are_no_answers(of):
    """Those of padding do not matter."""

    def run(where):
        def give(batches):
            found = np.zeros((*batches.tokens.shape, 3))  # [N, B, T, 3]
            found[:, :, where] = np.nan
            return found

        return documents.RowProgram(give, 1)

    size = [3] if of is documents.of_documents else []
    assert np.isfinite(of(run(100), [[5] * 8], 128, *size)[0]).all()
    with pytest.raises(UserError, match="results that are not finite: the training diverged"):
        of(run(0), [[5] * 8], 128, *size)
