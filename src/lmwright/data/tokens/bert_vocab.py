"""Tokenizers of BERT's first releases, which are a vocab.txt alone: a token a line, its id the
line's number from 0. Texts are split as `BertTokenizer` of transformers splits them."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from lmwright.data.tokens.added import text_of
from lmwright.data.tokens.tokenizer import (
    TextTokenizer,
    add_special,
    chat_template_of,
    find_roles,
    read_json,
)
from lmwright.errors import UserError

FILE = "vocab.txt"
CONFIG = "tokenizer_config.json"
OTHERS = ("tokenizer.json", "vocab.json", "encoder.json", "*.model", "*.tiktoken", "bpe.codes")
"""Files of other tokenizers, beside which a vocab.txt is none of BERT's."""
SAME = ("Bert", "DistilBert", "Electra")
"""Models whose tokenizers are BERT's; each has a class that is called Fast, too."""
SPECIAL = {
    "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}  # fmt: skip


def is_bert(folder: Path) -> bool:
    """True if a vocab.txt is all that a folder has of a tokenizer."""
    return (folder / FILE).is_file() and not any(
        found for pattern in OTHERS for found in folder.glob(pattern)
    )


def import_bert(folder: Path) -> TextTokenizer:
    """The tokenizer of a folder with vocab.txt, of the letters' case that tokenizer_config.json
    says there; without it letters are lowered, as in transformers. Raises UserError for another
    model's tokenizer and for a vocabulary without the tokens that BERT needs."""
    config = read_json(folder / CONFIG)
    _refuse_others(folder, config)
    vocab = read_vocab(folder / FILE)
    special = {role: text_of(config.get(role)) or name for role, name in SPECIAL.items()}
    for role, token in special.items():
        if not isinstance(token, str) or token not in vocab:
            raise UserError(
                f"{folder / FILE}: has no {token}, which is the {role} of BERT; if another token "
                f"has that role, name it in {CONFIG} as {role}, else give a tokenizer.json"
            )
    lower, chinese, strip = (
        _choice(folder, config, field, default)
        for field, default in (
            ("do_lower_case", True), ("tokenize_chinese_chars", True), ("strip_accents", None),
        )
    )  # fmt: skip
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=special["unk_token"]))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=bool(chinese), strip_accents=strip,
        lowercase=bool(lower),
    )  # fmt: skip
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    first, last = special["cls_token"], special["sep_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", last, "$B:1", f"{last}:1"],
        special_tokens=[(token, vocab[token]) for token in (first, last)],
    )
    add_special(backend, special.values())
    roles = find_roles(backend, config | special)
    return TextTokenizer(backend, **roles, chat_template=chat_template_of(folder, config))


def read_vocab(path: Path) -> dict[str, int]:
    """Tokens with their ids; of a token that stands there twice, the later one counts. Raises
    UserError for a file that is no text."""
    try:
        with path.open(encoding="utf-8") as f:
            return {line.rstrip("\n"): number for number, line in enumerate(f)}
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; give a tokenizer.json") from None


def _refuse_others(folder: Path, config: dict[str, Any]) -> None:
    name = config.get("tokenizer_class")
    known = {f"{model}Tokenizer{end}" for model in SAME for end in ("", "Fast")}
    if name is not None and name not in known:
        raise UserError(
            f"{folder / CONFIG}: tokenizer_class is {name!r:.60}; a {FILE} is enough only for "
            f"{', '.join(SAME)}; give a tokenizer.json"
        )


def _choice(folder: Path, config: dict[str, Any], field: str, default: bool | None) -> bool | None:
    value = config.get(field, default)
    if not isinstance(value, bool | None):
        raise UserError(f"{folder / CONFIG}: {field} must be true or false, not {value!r:.60}")
    return default if value is None else value
