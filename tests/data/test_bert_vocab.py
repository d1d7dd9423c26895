"""Tokenizers of a vocab.txt alone, against BertTokenizer of transformers."""

import json

import pytest
import tokenizers

from lmwright.cli.main import main
from lmwright.data.tokens.around import ids_around, ids_between
from lmwright.data.tokens.bert_vocab import SPECIAL
from lmwright.data.tokens.probe import BLANKS, PROBE
from lmwright.data.tokens.tokenizer import load_tokenizer, save_tokenizer
from lmwright.data.tokens.tokenizer_formats import import_command, import_tokenizer
from lmwright.data.tokens.tokenizer_stage import hashes
from lmwright.errors import UserError
from lmwright.formats.tokenizer_files import has_tokenizer

transformers = pytest.importorskip("transformers")

LETTERS = [chr(c) for c in (*range(ord("!"), ord("~") + 1), 0xE9, 0xFC, 0xC9, 0x4F60, 0x597D)]
WORDS = [*SPECIAL.values(), "the", "th", "The", "\u4f60\u597d", "##\u597d", "the", "##ing"]
VOCAB = [*WORDS, *LETTERS, *(f"##{c}" for c in LETTERS)]
TEXTS = [
    *PROBE, *BLANKS, "The thing, \u4f60\u597d!", "\u00c9t\u00e9 \u00e9t\u00e9 th\u00fcng",
    "a [MASK] b[SEP] [CLS]c", "", "x" * 120, "tab\tand\u00a0blank\u200bzero\x00 nul\ufffd",
]  # fmt: skip
END = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "rstrip": False}
OWN = {"cls_token": "<s>", "sep_token": END | {"single_word": False, "normalized": False}}


def written(folder, config=None, words=VOCAB, more=()):
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join([*words, *more]) + "\n", encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "config, more",
    [
        (None, ()),
        ({"do_lower_case": False, "tokenizer_class": "BertTokenizer"}, ()),
        ({"tokenize_chinese_chars": False, "strip_accents": False}, ()),
        ({"do_lower_case": False, "strip_accents": True, "model_max_length": 512}, ()),
        (OWN, ("<s>", "</s>")),
    ],
)
def test_ids_are_those_of_transformers(config, more, tmp_path):
    folder = written(tmp_path / "a", config, more=more)
    theirs = transformers.BertTokenizer.from_pretrained(folder)
    for path in (folder, folder / "vocab.txt"):
        ours = import_tokenizer(path)
        for text in TEXTS:
            assert ours.backend.encode(text).ids == theirs(text)["input_ids"], text
    pair = ours.backend.encode("the thing", "The a")
    wanted = theirs("the thing", "The a")
    assert pair.ids == wanted["input_ids"] and pair.type_ids == wanted["token_type_ids"]
    roles = (ours.bos, ours.eos, ours.pad, ours.unk, ours.mask)
    assert roles == (
        theirs.cls_token, theirs.sep_token, theirs.pad_token, theirs.unk_token, theirs.mask_token
    )  # fmt: skip
    assert ours.decode(theirs("the thing")["input_ids"][1:-1]) == "the thing"


def test_what_is_written_is_the_same_tokenizer_in_transformers(tmp_path):
    folder = written(tmp_path / "a", {"do_lower_case": False})
    assert main(["tokenizer", "import", str(folder), str(tmp_path / "b")]) == 0
    theirs = transformers.BertTokenizer.from_pretrained(folder)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    assert [again(t)["input_ids"] for t in TEXTS] == [theirs(t)["input_ids"] for t in TEXTS]


def test_the_vocabulary_is_prepared_from_where_no_other_file_is(tmp_path):
    """What was prepared with a tokenizer.json stays as it is, whatever lies beside."""
    folder = written(tmp_path / "a")
    before = hashes(folder)
    written(folder, more=("more",))
    assert before != hashes(folder) and set(before) == {"vocab.txt"}
    save_tokenizer(import_tokenizer(folder), folder)
    assert "vocab.txt" not in hashes(folder)


def test_the_vocabulary_of_bert(shared_data):
    folder = shared_data / "tokenizers" / "bert_uncased"
    theirs, ours = transformers.BertTokenizer.from_pretrained(folder), import_tokenizer(folder)
    text = (shared_data / "text" / "udhr_multilingual.tsv").read_text("utf-8")[:200_000]
    for line in (*text.splitlines(), *TEXTS):
        assert ours.backend.encode(line).ids == theirs(line)["input_ids"], line
    assert ours.vocab_size == len(theirs) == 30_522


@pytest.mark.parametrize(
    "config, words, told",
    [
        (None, VOCAB[:4], "vocab.txt: has no [MASK], which is the mask_token of BERT"),
        ({"cls_token": "<s>"}, VOCAB, "vocab.txt: has no <s>, which is the cls_token of BERT"),
        ({"tokenizer_class": "BertJapaneseTokenizer"}, VOCAB, "is 'BertJapaneseTokenizer'"),
        ({"do_lower_case": "yes"}, VOCAB, "do_lower_case must be true or false, not 'yes'"),
    ],
)
def test_another_tokenizer_is_refused(config, words, told, tmp_path):
    with pytest.raises(UserError) as caught:
        import_tokenizer(written(tmp_path / "a", config, words))
    assert told in str(caught.value)


def test_a_vocabulary_of_pairs_in_another_file_is_none_of_berts(tmp_path):
    """A model with it is imported without a tokenizer, as one without files of any."""
    folder = written(tmp_path / "a")
    assert has_tokenizer(folder)
    (folder / "bpe.codes").touch()
    assert not has_tokenizer(folder)
    with pytest.raises(UserError, match="holds no tokenizer"):
        import_tokenizer(folder)


def test_a_vocabulary_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match=r"vocab\.txt: is not UTF-8 text"):
        import_tokenizer(tmp_path)


@pytest.mark.parametrize("direction", ["left", "right"])
def test_what_surrounds_a_text_is_no_padding(direction, tmp_path):
    """Many folders of sentence-transformers have a tokenizer.json that pads to 128 tokens."""
    import_command(str(written(tmp_path / "a")), tmp_path / "b")
    plain = load_tokenizer(tmp_path / "b")
    around = ids_around(plain)
    assert around == ((plain.bos_id,), (plain.eos_id,))
    kept = json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())
    assert [kept["cls_token"], kept["sep_token"]] == [plain.bos, plain.eos]  # for pipelines
    backend = tokenizers.Tokenizer.from_str(plain.backend.to_str())
    backend.enable_padding(length=128, direction=direction)
    backend.enable_truncation(2)
    backend.save(str(tmp_path / "b" / "tokenizer.json"))
    padded = load_tokenizer(tmp_path / "b")
    assert padded.backend.padding["length"] == 128
    assert ids_around(padded) == around
    assert ids_between(padded, *around) == ids_between(plain, *around) == (plain.eos_id,)
