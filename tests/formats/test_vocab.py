"""Vocabulary surgery, against transformers' own resizing and the tokenizers library."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lmwright.config.run import Tokenizer
from lmwright.core.param import map_params
from lmwright.data.tokens.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from lmwright.errors import UserError
from lmwright.formats import reference
from lmwright.formats.load import load_model
from lmwright.formats.tokenizer_files import open_tokenizer
from lmwright.formats.vocab import vocab_command, with_tokens
from lmwright.models.llama import Llama
from tests.in_memory import export_hf

TEXT = ["Once upon a time there was a function that returned the number of bytes."] * 20
OTHER = ["\u1eb8 k\u00e1\u00e0\u00e1r\u1ecd\u0300, \u1e63\u00e9 d\u00e1ad\u00e1a ni? returned"] * 20


def model_of(head):
    return Llama(
        vocab_size=307, embed_dim=24, mlp_dim=40, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=6, seq_len=48, head=head,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request, tmp_path_factory):
    """300 tokens in 307 rows."""
    root = tmp_path_factory.mktemp(request.param)
    model = model_of(request.param)
    rng = np.random.default_rng(0)
    w = map_params(lambda p: rng.standard_normal(p.shape).astype("f4") * 0.2, model.spec())
    save_tokenizer(train_tokenizer(TEXT, Tokenizer(vocab_size=300)), root / "tokenizer")
    save_tokenizer(train_tokenizer(OTHER, Tokenizer(vocab_size=290)), root / "other")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference.importlib.util, "find_spec", lambda name: None)
        export_hf(model, w, root / "tokenizer", root / "model")
    return root / "model"


def tables(path):
    loaded = load_model(path)
    names = sorted((n for n in loaded.tensors if "embed" in n or "lm_head" in n), reverse=True)
    return [np.asarray(loaded.tensors[n]) for n in names]


def test_added_tokens(folder, tmp_path):
    """Ids, rows and logits are those of transformers; a new row is the mean by hand. The proof in
    the command itself compares with transformers, where the head stays tied or does not."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    (tmp_path / "more.txt").write_text("number of\r\n\r\nfunction\r\n", "utf-8-sig")  # of Windows
    proof = vocab_command(
        str(folder), tmp_path / "out", tokens=("<|user|>", "upon a"),
        add_file=str(tmp_path / "more.txt"), multiple=64,
    )  # fmt: skip
    assert proof.folder_to_transformers.greedy_agreement == 1.0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    old = load_tokenizer(folder)
    words = ["<|user|>", "upon a", "number of", "function"]
    assert tokenizer.add_tokens(words) == 4
    theirs.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64, mean_resizing=False)
    found = load_model(tmp_path / "out")
    assert found.model.vocab_size == theirs.config.vocab_size == 320
    assert found.model.head == model_of(found.model.head).head
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "Once<|user|> upon a time, the number of function s"
    assert ours(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert found.tokenizer.encode(text, parse_special=True) == tokenizer(text)["input_ids"]
    assert ours.convert_tokens_to_ids(words) == [300, 301, 302, 303]
    theirs_tables = [theirs.get_input_embeddings(), theirs.get_output_embeddings()]
    for before, after, reference_table in zip(
        tables(folder), tables(tmp_path / "out"), theirs_tables, strict=False
    ):
        resized = reference_table.weight.detach().numpy()
        np.testing.assert_array_equal(after[:300], resized[:300])
        for i, word in enumerate(words, 300):
            np.testing.assert_allclose(after[i], before[old.encode(word)].mean(0), rtol=1e-6)
        np.testing.assert_array_equal(after[304:307], before[304:307])
        mean = np.broadcast_to(before[:300].mean(0), after[307:].shape)
        np.testing.assert_allclose(after[307:], mean, rtol=1e-5, atol=1e-7)
    assert ("lm_head.weight" in load_model(tmp_path / "out").tensors) == (
        found.model.head == "untied"
    )


@pytest.mark.parametrize("place", ["tokenizers/bert_uncased", "models/stories260k"])
@pytest.mark.parametrize("special", [False, True], ids=["plain", "special"])
def test_ids_of_added_tokens_behind_a_normalizer(place, special, shared_data, tmp_path):
    """Those of transformers on the same file."""
    transformers = pytest.importorskip("transformers")
    words = ["NASA", "hello", "New York", "caf\u00e9"]
    old = open_tokenizer(shared_data / place)
    ours = with_tokens(old, words, special)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(old.spec))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    theirs.add_tokens(words, special_tokens=special)
    for text in (
        "hello", "say hello now", "  hello hello", "helloworld xhello", "NASA nasa Nasa",
        "in New York, new york", "caf\u00e9 cafe\u0301 CAF\u00c9",
    ):  # fmt: skip
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, parse_special=True) == ids, text
    assert theirs.convert_tokens_to_ids("NASA") in ours.encode("NASA", parse_special=True)


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(reference.importlib.util, "find_spec", lambda name: None)


def test_resized(folder, tmp_path, alone, capsys):
    vocab_command(str(folder), tmp_path / "small", size=300)
    vocab_command(str(folder), tmp_path / "large", multiple=128, dtype="bf16")
    assert "307 rows became 384; 0 new tokens, 84 spare rows" in capsys.readouterr().out
    for before, small in zip(tables(folder), tables(tmp_path / "small"), strict=True):
        np.testing.assert_array_equal(small, before[:300])
    assert load_model(tmp_path / "large").tokenizer.spec == load_tokenizer(folder).spec
    assert tables(tmp_path / "large")[0].dtype.name == "bfloat16"


def test_another_language(folder, tmp_path, alone):
    """Merges of a second tokenizer come after the model's own: old ids stay, its words get
    shorter, text comes back, and rows are means of what they were before."""
    other = folder.parent / "other"
    vocab_command(str(folder), tmp_path / "out", add_from=str(other), max_new=20)
    old, new = load_tokenizer(folder), load_tokenizer(tmp_path / "out")
    ours = new.backend.get_vocab()
    assert old.backend.get_vocab().items() <= ours.items() and new.vocab_size == 320
    text = OTHER[0]
    ids = new.encode(text)
    assert len(ids) < len(old.encode(text)) and max(ids) >= 300
    assert new.decode(ids) == text and new.decode(new.encode(TEXT[0])) == TEXT[0]
    assert new.special_tokens == old.special_tokens
    before, after = tables(folder)[0], tables(tmp_path / "out")[0]
    broken = 0  # parts of characters
    for i in range(300, 320):
        parts = split_by(old, new.backend.id_to_token(i))
        np.testing.assert_allclose(after[i], before[parts].mean(0), rtol=1e-5, atol=1e-7)
        whole = "\ufffd" not in new.decode([i])
        assert not whole or parts == old.encode(new.decode([i]))
        broken += not whole
    assert 2 < broken < 15


def split_by(tokenizer, piece):
    """Ids of a piece by the merges of a BPE tokenizer, one after the other."""
    parts = list(piece)
    for left, right in tokenizer.spec["model"]["merges"]:
        at = 0
        while at < len(parts) - 1:
            if parts[at : at + 2] == [left, right]:
                parts[at : at + 2] = [left + right]
            at += 1
    return [tokenizer.backend.token_to_id(part) for part in parts]


def test_letters_that_stand_for_bytes(folder, tmp_path, alone):
    """Decoders of bytes would take them for what they stand for."""
    words = ("\u00fcber", "na\u00efve")
    vocab_command(str(folder), tmp_path / "out", tokens=words)
    old, before, after = load_tokenizer(folder), *(tables(p)[0] for p in (folder, tmp_path / "out"))
    for i, word in enumerate(words, 300):
        np.testing.assert_allclose(after[i], before[old.encode(word)].mean(0), rtol=1e-5)


def test_a_special_token_is_one(folder, tmp_path, alone):
    vocab_command(str(folder), tmp_path / "out", tokens=("<|bot|>",), special=True)
    tokenizer = load_model(tmp_path / "out").tokenizer
    assert tokenizer.special_tokens["<|bot|>"] == 300
    assert 300 not in tokenizer.encode("<|bot|>") and load_model(tmp_path / "out").model == (
        load_model(folder).model
    )
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize(
    "lines, says",
    [("a b\nx y\nx y\n", "'x y' is given twice"), ("a b\n<|endoftext|>\n", "there already")],
)
def test_a_token_of_a_file_is_told_so(folder, tmp_path, alone, lines, says):
    (tmp_path / "new.txt").write_text(lines)
    options = {"tokens": ("z z",), "add_file": str(tmp_path / "new.txt")}
    with pytest.raises(UserError, match=rf"--add-file: .*new\.txt: .*{says}"):
        vocab_command(str(folder), tmp_path / "out", **options)


def test_weights_that_are_not_finite_are_one_sentence(tmp_path, alone):
    model = model_of("tied")
    w = map_params(lambda p: np.full(p.shape, 0.1, "f4"), model.spec())
    export_hf(model, w, None, tmp_path / "model")
    (tmp_path / "model" / "convert.json").unlink()
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = np.nan
    save_file(tensors, path)
    with pytest.raises(UserError, match="logits that are not finite: the training diverged"):
        vocab_command(str(tmp_path / "model"), tmp_path / "out", multiple=64)


def test_merges_of_another_kind_are_not_appended(folder, tmp_path, alone):
    other = train_tokenizer(["once upon a time"] * 9, Tokenizer(vocab_size=300, train="unigram"))
    save_tokenizer(other, tmp_path / "other")
    with pytest.raises(UserError, match=r"is Unigram and the model's .* byte-level BPE, so"):
        vocab_command(str(folder), tmp_path / "out", add_from=str(tmp_path / "other"))


@pytest.mark.parametrize(
    "options, says",
    [
        ({}, "nothing to do"),
        ({"size": 299}, "less than the tokenizer's 300"),
        ({"tokens": ("<|endoftext|>",)}, "is there already"),
        ({"tokens": ("x y", "x y")}, "given twice"),
        ({"max_new": 3, "multiple": 2}, "--max-new"),
        ({"special": True, "size": 400}, "--special"),
        ({"add_file": "nowhere.txt"}, "nowhere.txt: cannot be read"),
        ({"add_from": "./nowhere"}, "does not exist"),
        ({"tokens": ("",)}, "--add: a token cannot be empty"),
        ({"add_file": os.devnull}, "holds no tokens; write one per line"),
    ],
    ids=str,
)
def test_what_makes_no_sense(folder, tmp_path, alone, options, says):
    with pytest.raises(UserError, match=says) as caught:
        vocab_command(str(folder), tmp_path / "out", **options)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
