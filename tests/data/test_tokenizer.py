"""Tokenizers trained, imported and saved, against transformers, tiktoken and sentencepiece."""

import argparse
import base64
import csv
import json.decoder
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import tiktoken.load
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from lmwright.config.run import Tokenizer
from lmwright.data.tokens.probe import PROBE
from lmwright.data.tokens.tokenizer import (
    TextTokenizer,
    find_roles,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from lmwright.data.tokens.tokenizer_formats import import_command, import_tokenizer
from lmwright.errors import UserError
from lmwright.formats.tokenizer_files import open_tokenizer

CORPUS = [Path(m.__file__).read_text("utf-8") for m in (argparse, csv, textwrap, json.decoder)]
CORPUS.append("\u00e9\u00e8 \u4f60\u597d\uff0c\u4e16\u754c " * 50)
SPECIAL = ("<|end|>", "<|user|>")


def train(kind, vocab_size=600, **options):
    spec = Tokenizer(train=kind, vocab_size=vocab_size, special_tokens=SPECIAL, **options)
    return train_tokenizer(CORPUS, spec)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def trained(request):
    return train(request.param)


def test_training_gives_what_was_asked(trained):
    assert trained.vocab_size == 600
    assert trained.special_tokens == {"<|end|>": 598, "<|user|>": 599}
    assert trained.eos_id == trained.bos_id == trained.pad_id == 598
    ids = trained.encode("".join(CORPUS))
    assert len(set(ids)) > 350 and len(ids) < len("".join(CORPUS)) / 2


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=200))
def test_every_text_comes_back(trained, text):
    assert trained.decode(trained.encode(text)) == text


def test_probe_texts_come_back(trained):
    for text in PROBE:
        assert trained.decode(trained.encode(text)) == text


def test_special_tokens_in_text_are_text_unless_parsed(trained):
    text = "a<|end|>b<|user|>"
    ids = trained.encode(text)
    assert not {598, 599} & set(ids) and trained.decode(ids) == text
    parsed = trained.encode(text, parse_special=True)
    assert [i for i in parsed if i >= 598] == [598, 599]
    assert trained.decode(parsed, skip_special=True) == "ab"
    assert trained.encode_batch([text, ""]) == [ids, []]


def test_training_is_the_same_in_another_process(trained):
    kind = trained.spec["model"]["type"].lower()
    script = (
        "import sys; from tests.data.test_tokenizer import train; "
        "print(train(sys.argv[1]).fingerprint)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, kind],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "RAYON_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == trained.fingerprint, done.stderr


def test_saved_folder_loads_here_and_in_transformers(trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    template = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
    trained = replace(trained, chat_template=template)
    save_tokenizer(trained, tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint == trained.fingerprint
    roles = ("eos_id", "bos_id", "pad_id", "vocab_size", "chat_template")
    assert [getattr(loaded, r) for r in roles] == [getattr(trained, r) for r in roles]
    # an exported model's folder has a config.json too, which must not change the tokenizer
    for config in (None, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}):
        if config:
            (tmp_path / "config.json").write_text(json.dumps(config))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        for text in PROBE:
            assert theirs(text).input_ids == loaded.encode(text, parse_special=True)
            assert theirs.decode(loaded.encode(text)) == text
        assert (theirs.eos_token_id, theirs.pad_token_id) == (598, 598)
        messages = [{"role": "user", "content": "hi"}]
        assert theirs.apply_chat_template(messages, tokenize=False) == "<|user|>hi"


def test_an_import_replaces_nothing_else(trained, tmp_path):
    """The tokenizer of a model, or another one, would be gone without a word."""
    save_tokenizer(trained, tmp_path / "a")
    for _ in range(2):  # the same once more is no loss
        import_command(tmp_path / "a", tmp_path / "out")
    other = replace(trained, chat_template="{{ messages }}")
    save_tokenizer(other, tmp_path / "b")
    with pytest.raises(UserError, match="out: holds another tokenizer; remove it, or choose"):
        import_command(tmp_path / "b", tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"out: holds config\.json, too; choose a new folder"):
        import_command(tmp_path / "a", tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file: cannot be written"):
        import_command(tmp_path / "a", tmp_path / "file")
    assert load_tokenizer(tmp_path / "out").chat_template == trained.chat_template


def test_fingerprint_tells_tokenizers_apart(trained):
    other = train(trained.spec["model"]["type"].lower(), 601)
    assert other.fingerprint != trained.fingerprint
    again = TextTokenizer(trained.backend.from_str(trained.backend.to_str(pretty=True)))
    assert again.fingerprint == trained.fingerprint


@pytest.mark.parametrize(
    "spec, texts, message",
    [
        ({"vocab_size": 257}, CORPUS, r"tokenizer\.vocab_size: 257 is too small.*need 258"),
        ({"special_tokens": ()}, CORPUS, r"data\.tokenizer\.special_tokens is empty"),
        ({"special_tokens": ("self",)}, CORPUS, "'self' is also an ordinary token"),
        ({}, ["", ""], "no training text"),
    ],
)
def test_training_that_cannot_be(spec, texts, message):
    spec = Tokenizer(**{"vocab_size": 900, "special_tokens": SPECIAL} | spec)
    with pytest.raises(UserError, match=message):
        train_tokenizer(texts, spec)


@pytest.fixture(scope="module")
def texts(shared_data):
    folder = shared_data / "text"
    docs = [json.loads(line)["text"] for line in (folder / "python_docs.jsonl").open()][:6]
    udhr = (folder / "udhr_multilingual.tsv").read_text("utf-8").splitlines()[1:]
    return [*PROBE, *docs, *(line.split("\t")[1][:3000] for line in udhr)]


def same(tokenizer, encode, texts):
    for text in texts:
        assert tokenizer.encode(text) == list(encode(text)), text[:80]


def test_gpt2_files(shared_data, texts):
    folder = shared_data / "tokenizers/gpt2"
    reference = tiktoken_of(
        tiktoken.load.data_gym_to_mergeable_bpe_ranks(
            str(folder / "merges.txt"), str(folder / "vocab.json")
        ),
        r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
    )
    tokenizer = import_tokenizer(folder)
    same(tokenizer, reference.encode_ordinary, texts)
    assert tokenizer.vocab_size == 50257 and tokenizer.eos_id == tokenizer.pad_id == 50256
    assert import_tokenizer(folder / "vocab.json").fingerprint == tokenizer.fingerprint


def tiktoken_of(ranks, pattern):
    return tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def test_llama3_ranks(shared_data, texts):
    path = shared_data / "tokenizers/llama3/tokenizer.model.tiktoken"
    # Meta's own pattern, as printed in llama3's tokenizer.py
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    reference = tiktoken_of(tiktoken.load.load_tiktoken_bpe(str(path)), pattern)
    tokenizer = import_tokenizer(path)
    same(tokenizer, reference.encode_ordinary, texts)
    assert tokenizer.vocab_size == 128256
    named = {t: tokenizer.special_tokens[t] for t in ("<|eot_id|>", "<|start_header_id|>")}
    assert named == {"<|eot_id|>": 128009, "<|start_header_id|>": 128006}
    assert (tokenizer.bos_id, tokenizer.eos_id) == (128000, 128001)
    ids = tokenizer.backend.encode("x<|eot_id|>").ids
    assert ids[0] == 128000 and ids[-1] == 128009


def test_qwen_ranks(shared_data, texts):
    import unicodedata

    path = shared_data / "tokenizers/qwen/qwen.tiktoken"
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    reference = tiktoken_of(tiktoken.load.load_tiktoken_bpe(str(path)), pattern)
    tokenizer = import_tokenizer(path)
    encode = lambda t: reference.encode_ordinary(unicodedata.normalize("NFC", t))  # noqa: E731
    same(tokenizer, encode, texts)
    assert tokenizer.special_tokens["<|im_end|>"] == 151645


@pytest.mark.parametrize(
    "name, size", [("llama2/tokenizer.model", 32000), ("t5/spiece.model", 32000)]
)
def test_sentencepiece_models(shared_data, texts, name, size):
    path = shared_data / "tokenizers" / name
    reference = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = import_tokenizer(path)
    assert tokenizer.vocab_size == size
    assert tokenizer.eos_id == reference.eos_id() and tokenizer.eos == "</s>"
    differ = total = 0
    for text in texts:
        ours, theirs = tokenizer.encode(text), reference.encode(text)
        if "llama2" in name or text in PROBE:
            assert ours == theirs, text[:80]
        # of cuts with equal scores Unigram takes the one that rounding favors
        assert len(ours) == len(theirs)
        differ += sum(a != b for a, b in zip(ours, theirs, strict=True))
        total += len(ours)
    assert differ / total < 0.002
    if "llama2" in name:
        # a leading space and unknown bytes come back; t5 normalizes
        for text in (*texts, " x", "\x00"):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_json_folder_as_transformers(shared_data, texts):
    transformers = pytest.importorskip("transformers")
    folder = shared_data / "tokenizers/smollm2"
    tokenizer = import_tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in texts:
        parsed = tokenizer.encode(text, parse_special=True)
        assert parsed == theirs(text, add_special_tokens=False).input_ids
    assert tokenizer.eos_id == theirs.eos_token_id and tokenizer.bos_id == theirs.bos_token_id
    assert tokenizer.chat_template == theirs.chat_template
    alone = import_tokenizer(folder / "tokenizer.json")
    assert alone.fingerprint == tokenizer.fingerprint


ADDED = {"<|im_start|>": 301, "<|im_end|>": 302, "<tool>": 303}
DECODER = {
    str(i): dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    | {"content": token, "special": token.startswith("<|")}
    for token, i in ADDED.items()
}


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens.json": ADDED},
        {"tokenizer_config.json": {"added_tokens_decoder": DECODER}},
        {"vocab.json": ADDED, "tokenizer_config.json": {"extra_special_tokens": list(ADDED)}},
        {"vocab.json": ADDED, "special_tokens_map.json": {"extra_special_tokens": list(ADDED)}},
    ],
    ids=lambda files: next(iter(files)),
)
def test_tokens_that_are_added_beside_a_vocabulary(tmp_path, files):
    """As transformers adds them, where there is no tokenizer.json; then with one that lacks them,
    and they may end a text."""
    transformers = pytest.importorskip("transformers")
    train("bpe", 300 + len(SPECIAL)).backend.model.save(str(tmp_path))
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"<|endoftext|>": 300}))
    own = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"}
    files = {"tokenizer_config.json": own} | files
    files["tokenizer_config.json"] = own | files["tokenizer_config.json"]
    for name, said in files.items():
        said = said if name != "vocab.json" else vocab | {"<|endoftext|>": 300} | said
        (tmp_path / name).write_text(json.dumps(said))
    text = "it <|im_start|>was\nnight<|im_end|> <tool>"
    for _ in range(2):
        ours = open_tokenizer(tmp_path)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert ours.encode(text, parse_special=True) == theirs(text).input_ids
        assert ours.eos_id == theirs.eos_token_id and ours.vocab_size == len(theirs) == 304
        vocab, merges = (str(tmp_path / name) for name in ("vocab.json", "merges.txt"))
        bare = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(vocab, merges))
        bare.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bare.save(str(tmp_path / "tokenizer.json"))


def test_a_space_before_the_first_word(tmp_path):
    """Where tokenizer_config.json asks for one beside GPT-2's files."""
    transformers = pytest.importorskip("transformers")
    train("bpe", 300 + len(SPECIAL)).backend.model.save(str(tmp_path))
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"<|endoftext|>": 300}))
    said = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)("return it").input_ids
    assert import_tokenizer(tmp_path).encode("return it") == theirs
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said | {"add_prefix_space": False}))
    assert import_tokenizer(tmp_path).encode("return it") != theirs


def write_ranks(path, extra=()):
    tokens = [bytes([b]) for b in range(256)] + [b"th", b"the", b" the", *extra]
    lines = [base64.b64encode(t) + b" " + str(i).encode() for i, t in enumerate(tokens)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return len(tokens)


def test_tiktoken_of_no_known_family_needs_a_sidecar(tmp_path):
    path = tmp_path / "own.tiktoken"
    size = write_ranks(path)
    with pytest.raises(UserError, match=r"own\.tiktoken has 259 ranks.*own\.tiktoken\.json"):
        import_tokenizer(path)
    sidecar = tmp_path / "own.tiktoken.json"
    body = {"pattern": r" ?\w+|\s+|.", "special_tokens": {"<e>": size + 3}, "eos_token": "<e>"}
    sidecar.write_text(json.dumps(body))
    tokenizer = import_tokenizer(path)
    assert tokenizer.encode("the the<e>") == [257, 258, 60, 101, 62]
    assert tokenizer.encode("the<e>", parse_special=True) == [257, size + 3]
    assert tokenizer.eos_id == size + 3 and tokenizer.vocab_size == size + 4
    for wrong, message in (
        ({"pattern": None}, 'needs "pattern"'),
        ({"special_tokens": {"<e>": 4}}, "needs an id of its own"),
        ({"eos_token": "<x>"}, "is not in special_tokens"),
    ):
        sidecar.write_text(json.dumps(body | wrong))
        with pytest.raises(UserError, match=message):
            import_tokenizer(path)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("missing.json", None, "does not exist"),
        ("a.pdf", b"x", "not a known kind"),
        ("tokenizer.json", b"{}", "not a readable tokenizer.json"),
        ("tokenizer.json", b"\xff", "not UTF-8"),
        ("a.model", b"\n\x03abc", "not a sentencepiece model"),
        ("a.tiktoken", b"IQ== 0\nIg==", r"a\.tiktoken:2 is not"),
        ("a.tiktoken", b"IQ== 0\n", "lacks 255 of the 256 single bytes"),
        ("vocab.json", b"{}", "holds no merges.txt"),
        ("", None, "holds no tokenizer"),
    ],
)
def test_files_that_are_no_tokenizer(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        import_tokenizer(tmp_path / name)


@pytest.mark.parametrize("path", ["gs://bucket/tok", "https://host/tokenizer.json"])
def test_urls_are_not_tokenizers(path):
    with pytest.raises(UserError, match=f"{path}: tokenizers are not read from a URL; copy its fi"):
        import_tokenizer(path)


def test_a_tokenizer_is_not_written_to_a_url(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tokenizer(trained, tmp_path / "made")
    with pytest.raises(UserError, match="gs://b/tok: cannot be written to; give a path of this ma"):
        import_command(tmp_path / "made", "gs://b/tok")
    assert not (tmp_path / "gs:").exists()


def test_encoders_name_the_ends_of_a_text_otherwise():
    """As ModernBERT's tokenizer_config.json does, which names no eos and no bos."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.add_special_tokens(["[CLS]", "[SEP]", "[MASK]"])
    said = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": None}
    assert find_roles(backend, said) == {"eos": "[SEP]", "bos": "[CLS]", "mask": "[MASK]"}
    assert find_roles(backend, said | {"eos_token": "[MASK]"})["eos"] == "[MASK]"


def test_a_mask_token_that_was_added_later_is_one():
    """The configuration of a decoder's tokenizer names other roles and no mask."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.add_special_tokens(["<eos>", "<pad>", "[MASK]"])
    assert find_roles(backend, {"eos_token": "<eos>"}) == {"eos": "<eos>", "mask": "[MASK]"}
    assert find_roles(backend, {"eos_token": "<eos>", "mask_token": None}) == {"eos": "<eos>"}
