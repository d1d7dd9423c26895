"""Tokenizers to GGUF's metadata and back: the same ids, and those of llama.cpp where installed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

import gguf
import tokenizers
from tokenizers import AddedToken

from lmwright.cli.main import main
from lmwright.config.run import Tokenizer
from lmwright.core.param import map_params
from lmwright.data.prepare import prepare_command
from lmwright.data.rows.store import TokenStore
from lmwright.data.stale import refuse_stale
from lmwright.data.tokens import gguf_tokenizer
from lmwright.data.tokens.gguf_tokenizer import (
    USER_DEFINED,
    metadata_of_tokenizer,
    name_of_model,
    tokenizer_of,
)
from lmwright.data.tokens.probe import PROBE
from lmwright.data.tokens.tokenizer import save_tokenizer, train_tokenizer
from lmwright.errors import UserError
from lmwright.formats import proof
from lmwright.formats.gguf_names import metadata_of
from lmwright.formats.gguf_write import write_gguf
from lmwright.formats.hf_layout import HfTensors
from lmwright.formats.open import load_run, open_place
from lmwright.formats.reference import Reference
from lmwright.formats.tokenizer_files import open_tokenizer, prompt_prefix
from lmwright.models.llama import Llama
from lmwright.train.start import refuse_tokenizer
from tests.formats import llama_cpp
from tests.in_memory import export_hf

SHARED = {
    "smollm2": ("tokenizers/smollm2", "gpt2", "smollm"),
    "gpt2": ("tokenizers/gpt2", "gpt2", "gpt-2"),
    "llama3": ("tokenizers/llama3", "gpt2", "llama-bpe"),
    "llama2": ("tokenizers/llama2", "llama", None),
    "stories260k": ("models/stories260k", "llama", None),
}


@pytest.fixture(params=SHARED)
def case(request, shared_data):
    folder, kind, pre = SHARED[request.param]
    return open_tokenizer(shared_data / folder), kind, pre


def ids(tokenizer):
    texts = [*PROBE, "def f(x):\n    return  x  # 12345", "d\u00e9j\u00e0 vu \U0001f999"]
    return tokenizer.encode_batch(texts)


def test_there_and_back(case):
    tokenizer, kind, pre = case
    bos = prompt_prefix(tokenizer) == (tokenizer.bos_id,) and tokenizer.bos_id is not None
    size = tokenizer.vocab_size + 3
    meta = metadata_of_tokenizer(tokenizer, size, bos, "here")
    assert meta["tokenizer.ggml.model"] == kind and meta.get("tokenizer.ggml.pre") == pre
    assert len(meta["tokenizer.ggml.tokens"]) == len(meta["tokenizer.ggml.token_type"]) == size
    back = tokenizer_of(json.loads(json.dumps(meta)), "here")
    assert ids(back) == ids(tokenizer) and back.vocab_size == tokenizer.vocab_size
    for role in ("eos", "bos", "pad", "unk"):
        assert getattr(back, role) == getattr(tokenizer, role)
    assert back.chat_template == tokenizer.chat_template
    assert prompt_prefix(back) == ((tokenizer.bos_id,) if bos else ())
    special = tokenizer.special_tokens
    text = "a" + "b".join(special) + "c"
    assert set(special.values()) <= set(back.encode(text, parse_special=True))
    joined = [back.decode(i) for i in ids(back)]
    assert joined == [tokenizer.decode(i) for i in ids(tokenizer)]


@pytest.fixture
def phi3(shared_data):
    """A small tokenizer with special tokens of Phi-3; most strip the spaces behind them."""
    tokenizer = open_tokenizer(shared_data / "models" / "stories260k")
    backend = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.spec))
    backend.add_tokens([AddedToken("</s>", rstrip=True, normalized=False)])
    backend.add_special_tokens([AddedToken("<|endoftext|>", normalized=False)])
    for token in ("<|assistant|>", "<|user|>", "<|end|>"):
        backend.add_special_tokens([AddedToken(token, rstrip=True, normalized=False)])
    return replace(tokenizer, backend=backend)


def test_tokens_matched_in_any_text(phi3):
    """Phi-3 has </s> as one; behind it, tokenizers put a space and the library does not."""
    meta = metadata_of_tokenizer(phi3, phi3.vocab_size, True, "here")
    assert meta["tokenizer.ggml.token_type"][phi3.eos_id] == USER_DEFINED
    assert ids(tokenizer_of(meta, "here")) == ids(phi3)


def test_the_name_of_a_model_says_what_its_tokens_strip(phi3, shared_data):
    """By llama.cpp's rule, which loads nothing called phi-3 without some of Phi-3's tokens."""
    plain = open_tokenizer(shared_data / "tokenizers" / "smollm2")
    assert name_of_model("my-Phi3-run", plain) == "my-phi 3-run"
    assert name_of_model("Phi-3-mini", phi3) == "Phi-3-mini"
    meta = metadata_of_tokenizer(phi3, phi3.vocab_size, True, "here")
    text = "<|user|>\nLily<|end|>\n<|assistant|>\n"
    for name, strips in ((name_of_model("chat", phi3), True), ("chat", False)):
        back = tokenizer_of(meta | {"general.name": name}, "here")
        same = back.encode(text, parse_special=True) == phi3.encode(text, parse_special=True)
        assert same == strips


def test_tokens_that_strip_otherwise_are_refused_where_a_chat_shows_it(phi3):
    template = (
        "{% for m in messages %}<|{{ m.role }}|>%s{{ m.content }}<|end|>{% endfor %}<|endoftext|>"
    )
    chats = [replace(phi3, chat_template=template.replace("%s", between)) for between in ("\n", "")]
    backend = tokenizers.Tokenizer.from_str(json.dumps(phi3.spec))
    backend.add_special_tokens([AddedToken("<|system|>", normalized=False)])  # does not strip
    for chat in chats:
        metadata_of_tokenizer(chat, phi3.vocab_size, True, "here")
    some, none = (replace(chat, backend=backend) for chat in chats)
    metadata_of_tokenizer(none, phi3.vocab_size + 1, True, "here")
    with pytest.raises(UserError, match="here: special tokens in the chat template strip"):
        metadata_of_tokenizer(some, phi3.vocab_size + 1, True, "here")


def test_a_trained_tokenizer_has_a_name_in_llama_cpp():
    text = ["Once upon a time there were 12 functions; they returned 345 bytes."] * 30
    trained = train_tokenizer(text, Tokenizer(vocab_size=300))
    meta = metadata_of_tokenizer(trained, 304, False, "here")
    assert meta["tokenizer.ggml.pre"] == "smaug-bpe"
    assert ids(tokenizer_of(meta, "here")) == ids(trained)
    unigram = train_tokenizer(text, Tokenizer(vocab_size=300, train="unigram"))
    with pytest.raises(UserError, match="BPE tokenizers, this one is Unigram"):
        metadata_of_tokenizer(unigram, 304, False, "here")


def test_the_split_of_qwen35_has_its_own_name():
    """That of the released tokenizer.json, which leaves marks with their letters."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    trained = train_tokenizer(
        ["\u0928\u092e\u0938\u094d\u0924\u0947 12"], Tokenizer(vocab_size=300)
    )
    trained.backend.normalizer = normalizers.NFC()
    cut, as_bytes = (
        pre_tokenizers.Split(Regex(split), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    )
    trained.backend.pre_tokenizer = pre_tokenizers.Sequence([cut, as_bytes])
    meta = metadata_of_tokenizer(replace(trained), 304, False, "here")
    assert meta["tokenizer.ggml.pre"] == "qwen35"
    assert ids(tokenizer_of(meta, "here")) == ids(trained)


def test_the_tokenizer_of_gpt_neox_goes_by_the_name_of_olmo(shared_data):
    """GPT-2's split behind composed characters, and runs of spaces matched in any text."""
    from tokenizers import normalizers

    tokenizer = open_tokenizer(shared_data / SHARED["gpt2"][0])
    backend = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.spec))
    backend.normalizer = normalizers.NFC()
    backend.add_tokens([AddedToken(" " * n, normalized=True) for n in range(24, 1, -1)])
    pythia = replace(tokenizer, backend=backend)
    meta = metadata_of_tokenizer(pythia, pythia.vocab_size, False, "here")
    assert meta["tokenizer.ggml.pre"] == "olmo"
    back = tokenizer_of(meta, "here")
    assert ids(back) == ids(pythia)
    decomposed = "cafe\u0301  x"
    assert back.encode(decomposed) == pythia.encode(decomposed)


def test_another_split_is_refused(shared_data):
    from tokenizers import pre_tokenizers

    tokenizer = open_tokenizer(shared_data / SHARED["gpt2"][0])
    tokenizer.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    other = replace(tokenizer, backend=tokenizer.backend)
    with pytest.raises(UserError, match="no name"):
        metadata_of_tokenizer(other, tokenizer.vocab_size, False, "here")


@pytest.mark.parametrize(
    "change, says",
    [
        ({"tokenizer.ggml.pre": "falcon"}, "'falcon'"),
        ({"tokenizer.ggml.model": "t5"}, "kind 't5'"),
        ({"tokenizer.ggml.merges": ["q zz"]}, "merges do not fit"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "two tokens of one name"),
    ],
    ids=["split", "kind", "merges", "twice"],
)
def test_what_cannot_be_rebuilt_is_one_clear_error(change, says):
    meta = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.token_type": [1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
    }  # fmt: skip
    assert tokenizer_of(meta, "file").encode("ab") == [2]
    with pytest.raises(UserError, match=says) as caught:
        tokenizer_of(meta | change, "file.gguf")
    assert "file.gguf" in str(caught.value) and "\n" not in str(caught.value)


def test_scores_from_merges_alone(shared_data):
    """Llama 2 as a tokenizer.json without its tokenizer.model."""
    tokenizer = open_tokenizer(shared_data / SHARED["llama2"][0])
    alone = replace(tokenizer, sentencepiece=None)
    meta = metadata_of_tokenizer(alone, 32000, True, "here")
    assert ids(tokenizer_of(meta, "here")) == ids(tokenizer)
    merges = alone.spec["model"]["merges"]
    alone.spec["model"]["merges"] = merges[:900] + merges[901:]
    with pytest.raises(UserError, match="not those of a sentencepiece model"):
        metadata_of_tokenizer(alone, 32000, True, "here")


def test_none_is_none():
    assert tokenizer_of({"tokenizer.ggml.model": "none"}, "file") is None


def test_a_run_that_begins_with_a_gguf_has_its_tokenizer(tmp_path, shared_data):
    stories, out = shared_data / "models" / "stories260k", tmp_path / "stories.gguf"
    theirs, model = open_tokenizer(stories), open_place(stories).model
    name, _, meta = metadata_of(model.hf.config(model), "here")
    meta = {f"{name}.{key}": value for key, value in meta.items()}
    meta |= metadata_of_tokenizer(theirs, model.vocab_size, True, "here")
    writer = gguf.GGUFWriter(out, name)  # a header alone, which is all that preparing reads
    kinds = {bool: "bool", str: "string", float: "float32", int: "uint32", list: "array"}
    for key, value in meta.items():
        getattr(writer, f"add_{kinds[type(value)]}")(key, value)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_ti_data_to_file()
    writer.close()
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "A day {i}."}}\n' for i in range(40)))
    sources = [{"path": str(tmp_path / "a.jsonl")}]
    values = {
        "recipe": "pretrain",
        "name": "x",
        "dir": str(tmp_path / "run"),
        "train": {"init_from": str(out), "steps": 2, "global_batch_size": 2},
        "data": {"dir": str(tmp_path / "data"), "sources": sources},
    }
    run = load_run(values)
    assert run.data.tokenizer.path == str(out)
    prepare_command(run)
    store = TokenStore.open(tmp_path / "data")
    ours = open_tokenizer(Path(store.tokenizer_dir))
    assert ids(ours) == ids(theirs) and ours.eos == theirs.eos
    refuse_stale(run)
    refuse_tokenizer(open_place(out), store)


@pytest.mark.slow  # of 128,000 words
def test_files_of_lfm2_split_as_those_of_llama3(shared_data):
    """llama.cpp's converter has a name of its own for them."""
    tokenizer = open_tokenizer(shared_data / SHARED["llama3"][0])
    meta = metadata_of_tokenizer(tokenizer, tokenizer.vocab_size, True, "here")
    assert ids(tokenizer_of(meta | {"tokenizer.ggml.pre": "lfm2"}, "here")) == ids(tokenizer)


@pytest.mark.parametrize("name", ["lfm2", "falcon-h1"])
def test_files_of_others_split_as_llama_cpp_does(name, tmp_path, monkeypatch):
    llama_cpp.needed()
    monkeypatch.setattr(proof, "transformers_says", lambda *_: Reference(None, "not asked"))
    monkeypatch.setattr(gguf_tokenizer, "_name_of_split", lambda *_: name)
    small = train_tokenizer([*PROBE[:6]] * 4, Tokenizer(vocab_size=400))
    model = Llama(vocab_size=small.vocab_size, embed_dim=32, mlp_dim=32, num_layers=1, num_heads=1,
                  num_kv_heads=1, head_dim=32, seq_len=64)  # fmt: skip
    w = map_params(lambda p: np.ones(p.shape, "f4"), model.spec())
    save_tokenizer(small, tmp_path / "tokenizer")
    out = tmp_path / "m.gguf"
    write_gguf(model, HfTensors(model, w), lambda: w, tmp_path / "tokenizer", out, dtype="fp32")
    back = open_tokenizer(open_place(out).tokenizer_path)
    for text in PROBE[:8]:
        assert llama_cpp.tokens(out, text) == back.encode(text), text


@pytest.fixture
def unproven(monkeypatch):
    """Files are compared with transformers elsewhere."""
    monkeypatch.setattr(proof, "transformers_says", lambda *_, **__: Reference(None, "not asked"))


def exported(folder, out, *words, code=0):
    """Adds tokens to a model's tokenizer, and exports it as a GGUF file."""
    assert main(["vocab", str(folder), str(out), *words]) == 0
    assert main(["export", str(out), f"{out}.gguf"]) == code
    return Path(f"{out}.gguf")


def test_added_tokens_that_llama_cpp_would_find_elsewhere(
    tmp_path, shared_data, unproven, capsys, monkeypatch
):
    stories, text = shared_data / "models" / "stories260k", "Lily met NASA, oldNASA"
    add = ("--add", "NASA")
    special = exported(stories, tmp_path / "special", *add, "--special")
    exported(stories, tmp_path / "plain", *add, code=2)
    said = capsys.readouterr().err.strip()
    assert "its added token 'NASA' is matched in normalized text" in said and "\n" not in said
    llama_cpp.needed()
    monkeypatch.setattr(gguf_tokenizer, "_refuse_normalized", lambda *_: None)
    plain = exported(stories, tmp_path / "unasked", *add)
    assert llama_cpp.tokens(plain, text) == open_tokenizer(plain).encode(text)
    assert llama_cpp.tokens(plain, text) != open_tokenizer(tmp_path / "plain").encode(text)
    ours = open_tokenizer(tmp_path / "special")
    assert llama_cpp.tokens(special, text) == ours.encode(text)


@pytest.mark.parametrize("normalizer", ["NFC", None])
def test_added_tokens_of_byte_level_tokenizers(tmp_path, unproven, normalizer):
    """llama.cpp finds them where the tokenizer does."""
    small = train_tokenizer([*PROBE[:6]] * 4, Tokenizer(vocab_size=400))
    if normalizer:
        small.backend.normalizer = tokenizers.normalizers.NFC()  # which olmo's has
        small.backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model = Llama(vocab_size=small.vocab_size, embed_dim=32, mlp_dim=32, num_layers=1, num_heads=1,
                  num_kv_heads=1, head_dim=32, seq_len=64)  # fmt: skip
    w = map_params(lambda p: np.ones(p.shape, "f4"), model.spec())
    save_tokenizer(small, tmp_path / "tokenizer")
    export_hf(model, w, tmp_path / "tokenizer", tmp_path / "model")
    file = exported(tmp_path / "model", tmp_path / "more", "--add", "NASA", "--add", "New York")
    ours = open_tokenizer(tmp_path / "more")
    llama_cpp.needed()
    for text in ("NASA in New York", "xNASAx  NASA NASA", "nasa, new york"):
        assert llama_cpp.tokens(file, text) == ours.encode(text), text


def test_the_splits_of_deepseek_have_their_own_name(tmp_path):
    """Those of the released tokenizer.json, one after the other; llama.cpp cuts as they do."""
    from tokenizers import Regex, pre_tokenizers

    released = (
        r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )  # fmt: skip
    trained = train_tokenizer([*PROBE[:6]] * 4, Tokenizer(vocab_size=400))
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*(pre_tokenizers.Split(Regex(each), "isolated") for each in released), as_bytes]
    )
    size = trained.vocab_size
    meta = metadata_of_tokenizer(trained, size, False, "here")
    assert meta["tokenizer.ggml.pre"] == "deepseek-v3"
    assert ids(tokenizer_of(meta, "here")) == ids(trained)
    llama_cpp.needed()
    save_tokenizer(trained, tmp_path / "tokenizer")
    model = Llama(vocab_size=size, embed_dim=32, mlp_dim=32, num_layers=1, num_heads=1,
                  num_kv_heads=1, head_dim=32, seq_len=64)  # fmt: skip
    w = map_params(lambda p: np.ones(p.shape, "f4"), model.spec())
    out = tmp_path / "m.gguf"
    write_gguf(model, HfTensors(model, w), lambda: w, tmp_path / "tokenizer", out, dtype="fp32")
    for text in PROBE[:8]:
        assert llama_cpp.tokens(out, text) == trained.encode(text), text
