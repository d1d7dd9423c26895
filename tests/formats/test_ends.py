"""Where texts end, and begin, beside what the tokenizer's own file says: by
generation_config.json, and by a chat template."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import pytest

from lmwright.cli.main import main
from lmwright.config.run import Chat, Data, Eval, Pack, Source, Tokenize, Tokenizer
from lmwright.data.prepare import prepare
from lmwright.data.rows.store import TokenStore
from lmwright.data.tokens.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from lmwright.evals.generate import Sampling, generate
from lmwright.evals.held_out import HeldOut
from lmwright.formats import proof, reference
from lmwright.formats.adapter_verbs import export_adapter_command, merge_command
from lmwright.formats.convert import export_command, import_command
from lmwright.formats.hf_write import GENERATION
from lmwright.formats.load import load_model, run_prefix
from lmwright.formats.open import load_run
from lmwright.formats.vocab import vocab_command
from lmwright.models.llama import Llama
from lmwright.objectives.sft import Sft
from lmwright.program.lora_section import LowRank
from lmwright.program.plan import resolve
from tests.in_memory import export_hf
from tests.saved_run import save_run, tiny_run, weights_at

MODEL = Llama(
    vocab_size=320, embed_dim=32, mlp_dim=32, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=16, seq_len=48,
)  # fmt: skip
MARKS = ("<|endoftext|>", "<start_of_turn>", "<end_of_turn>")


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch):
    """As on a machine that has no transformers, whose comparison is tested elsewhere."""
    found = reference.Reference(None, reference.NOT_INSTALLED)
    monkeypatch.setattr(proof, "transformers_says", lambda *_: found)


def settings_of(folder):
    return json.loads((folder / GENERATION).read_text())


def test_settings_of_generation_survive(tmp_path):
    """Gemma's and Llama 3's name several ids that end a text; without them text goes on and on."""
    made = train_tokenizer(["a cat sat on the mat"] * 9, Tokenizer(special_tokens=MARKS))
    save_tokenizer(made, tmp_path / "tokenizer")
    first = tmp_path / "first"
    export_hf(MODEL, weights_at(0, MODEL.spec()), tmp_path / "tokenizer", first)
    assert settings_of(first)["eos_token_id"] == made.eos_id  # one is a number, as it was
    ends = [made.eos_id, made.special_tokens["<end_of_turn>"]]
    said = {"eos_token_id": ends, "top_k": 64, "do_sample": True}
    (first / GENERATION).write_text(json.dumps(said | {"transformers_version": "4.0"}))
    import_command(first, tmp_path / "second")
    vocab_command(tmp_path / "second", tmp_path / "third", multiple=64)
    for name in ("second", "third"):
        assert said.items() <= settings_of(tmp_path / name).items()
        assert "transformers_version" not in settings_of(tmp_path / name)
    theirs = pytest.importorskip("transformers").GenerationConfig.from_pretrained(
        tmp_path / "third"
    )
    assert (theirs.eos_token_id, theirs.top_k) == (ends, 64)
    pytest.importorskip("gguf")
    export_command(tmp_path / "third", tmp_path / "model.gguf")
    assert set(load_model(tmp_path / "model.gguf").end_ids) == set(ends)


@pytest.mark.parametrize("end", [[2, "x"], [True], 2.5, "2", {"a": 2}], ids=str)
@pytest.mark.parametrize("file", [GENERATION, "config.json"])
def test_what_is_no_id_is_refused(tmp_path, file, end, capsys):
    export_hf(MODEL, weights_at(0, MODEL.spec()), None, tmp_path / "first")
    (tmp_path / "first" / GENERATION).unlink(missing_ok=True)
    path = tmp_path / "first" / file
    said = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(said | {"eos_token_id": end}))
    assert main(["import", str(tmp_path / "first"), str(tmp_path / "second")]) == 2
    told = capsys.readouterr().err
    assert f"{path}: eos_token_id = {json.dumps(end)} is neither an id nor" in told, told
    path.write_text(json.dumps(said | {"eos_token_id": [2, 3]}))
    assert load_model(tmp_path / "first").end_ids == (2, 3)


def test_a_model_of_which_no_end_is_known(tmp_path):
    export_hf(MODEL, weights_at(0, MODEL.spec()), None, tmp_path / "first")
    import_command(tmp_path / "first", tmp_path / "second")
    assert settings_of(tmp_path / "second") == {}


@pytest.fixture(scope="module")
def chat_run(tmp_path_factory) -> Path:
    """A run on conversations in Gemma's template, which writes bos and its own end of a turn."""
    root = tmp_path_factory.mktemp("chats")
    said = [{"role": "user", "content": "a cat?"}, {"role": "assistant", "content": "sat here"}]
    rows = "".join(json.dumps({"messages": said, "id": i}) + "\n" for i in range(9))
    (root / "chats.jsonl").write_text(rows)
    run = tiny_run(root)
    data = Data(
        dir=str(root / "chats"),
        workers=1,
        sources=(Source(path=str(root / "chats.jsonl"), rows="messages"),),
        tokenizer=Tokenizer(vocab_size=320, special_tokens=MARKS),
        chat=Chat(template="gemma"),
        pack=Pack(seq_len=32, method="best-fit"),
    )
    prepare(data, 32)
    return save_run(replace(run, data=data, objective=Sft()))


def test_a_chat_model_ends_its_answers_where_it_learned_to(chat_run, tmp_path):
    loaded = load_model(chat_run)
    end = loaded.tokenizer.special_tokens["<end_of_turn>"]
    assert loaded.end_ids == (end,) and loaded.tokenizer.eos_id != end
    export_command(chat_run, tmp_path / "out")
    assert settings_of(tmp_path / "out")["eos_token_id"] == [loaded.tokenizer.eos_id, end]
    assert load_model(tmp_path / "out").end_ids == (loaded.tokenizer.eos_id, end)


def test_a_chat_model_begins_texts_as_its_template_does(chat_run, tmp_path):
    loaded = load_model(chat_run)
    assert loaded.prompt_prefix == (loaded.tokenizer.bos_id,)
    export_command(chat_run, tmp_path / "out")
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path / "out")
    said = [{"role": "user", "content": "a cat?"}]
    asked = theirs.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    assert theirs("a cat")["input_ids"][0] == asked[0] == loaded.tokenizer.bos_id


def test_samples_of_a_training_begin_as_generate_does(chat_run):
    loaded, settings = load_model(chat_run), Sampling(max_new_tokens=8, temperature=0.0)
    told = Eval(prompts=("a cat",), sample_tokens=8)
    plan = resolve(replace(load_run(chat_run / "run.toml"), eval=told), jax.devices()[:1])
    (sample,) = HeldOut(plan, TokenStore.open(plan.run.data.dir)).samples(loaded.weights)
    make = partial(generate, loaded.model, loaded.weights, loaded.tokenizer, ["a cat"], settings)
    begun, bare = (make(plan.compute, prefix=p)[0].text for p in (loaded.prompt_prefix, ()))
    assert sample["text"] == begun != bare


def test_what_begins_texts_begins_no_conversations(chat_run):
    """`data.tokenize.prepend` is about texts: conversations are stored as their template is."""
    run = load_run(chat_run / "run.toml")
    run = replace(run, data=replace(run.data, tokenize=Tokenize(prepend="bos")))
    tokenizer = load_tokenizer(Path(run.data.dir) / "tokenizer")
    bare = replace(tokenizer, chat_template="{{ messages[-1].content }}")
    assert run_prefix(run, tokenizer) == (tokenizer.bos_id,) and run_prefix(run, bare) == ()
    plain = replace(run.data, sources=(replace(run.data.sources[0], rows="text"),))
    assert run_prefix(replace(run, data=plain), bare) == (tokenizer.bos_id,)


@pytest.fixture(scope="module")
def chat_adapter(chat_run, tmp_path_factory) -> Path:
    """A folder with a base that knows no conversations, a run of an adapter that learned them, and
    that adapter in PEFT's form."""
    root = tmp_path_factory.mktemp("adapter")
    chats = load_run(chat_run / "run.toml")
    made = load_tokenizer(Path(chats.data.dir) / "tokenizer")
    save_tokenizer(replace(made, chat_template=None), root / "plain")
    export_hf(chats.model, weights_at(0, chats.model.spec()), root / "plain", root / "base")
    data = replace(chats.data, tokenizer=Tokenizer(path=str(root / "plain")))
    train = replace(chats.train, init_from=str(root / "base"))
    lora = LowRank(rank=2)
    save_run(replace(chats, dir=str(root / "run"), data=data, train=train, lora=lora))
    export_adapter_command(root / "run", root / "peft")
    return root


def test_an_adapter_brings_the_template_that_it_learned(chat_adapter, tmp_path):
    base = load_model(chat_adapter / "base")
    assert base.tokenizer.chat_template is None
    (chat_adapter / "base/LICENSE.txt").write_text("terms")
    merge_command(chat_adapter / "base", chat_adapter / "peft", tmp_path / "merged")
    export_command(chat_adapter / "run", tmp_path / "whole")
    end = base.tokenizer.special_tokens["<end_of_turn>"]
    for name in ("merged", "whole"):
        assert settings_of(tmp_path / name)["eos_token_id"] == [base.tokenizer.eos_id, end]
    auto = pytest.importorskip("transformers").AutoTokenizer
    said = [{"role": "user", "content": "a cat?"}]
    folders = (chat_adapter / "peft", tmp_path / "merged", tmp_path / "whole")
    one, *others = (
        auto.from_pretrained(folder).apply_chat_template(
            said, add_generation_prompt=True, return_dict=False
        )
        for folder in folders
    )
    assert others == [one, one] and one[0] == base.tokenizer.bos_id
    assert (tmp_path / "merged/LICENSE.txt").read_text() == "terms"


def test_tokens_that_a_model_lacks_stay_beside_the_adapter(chat_adapter, tmp_path):
    """As `[PAD]`, which some tools add without a place for it in the model."""
    shutil.copytree(chat_adapter / "peft", tmp_path / "peft")
    backend = load_tokenizer(tmp_path / "peft").backend
    backend.add_special_tokens([f"<extra {i}>" for i in range(MODEL.vocab_size)])
    backend.save(str(tmp_path / "peft/tokenizer.json"))
    merge_command(chat_adapter / "base", tmp_path / "peft", tmp_path / "merged")
    merged, base = (load_model(f) for f in (tmp_path / "merged", chat_adapter / "base"))
    assert merged.tokenizer.vocab_size == base.tokenizer.vocab_size
