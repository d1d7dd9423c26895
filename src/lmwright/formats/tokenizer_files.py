"""The tokenizer that belongs to a model: opened, copied, and how its prompts begin."""

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lmwright.data.json_text import write_json
from lmwright.data.tokens.added import with_added
from lmwright.data.tokens.around import ids_around
from lmwright.data.tokens.bert_vocab import is_bert
from lmwright.data.tokens.tokenizer import TextTokenizer, begin_with, load_tokenizer, save_tokenizer

MARKS = ("tokenizer.json", "tokenizer.model", "vocab.json")
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip


def has_tokenizer(folder: Path) -> bool:
    """True if a folder holds the files of a tokenizer."""
    return any((folder / name).exists() for name in MARKS) or is_bert(folder)


def open_tokenizer(folder: Path) -> TextTokenizer:
    """The tokenizer of a model folder, older layouts included, or of a GGUF file."""
    if (folder / "tokenizer.json").exists():
        return with_added(load_tokenizer(folder), folder)
    from lmwright.data.tokens.tokenizer_formats import import_tokenizer

    return import_tokenizer(folder)


def prompt_prefix(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Ids that the tokenizer's own file puts before a text (bos of llama, mostly none)."""
    return ids_around(tokenizer)[0]


def write_tokenizer(
    source: Path, folder: Path, prefix: tuple[int, ...] | None, suffix: tuple[int, ...] = ()
) -> None:
    """Copies the files and the terms beside them, or writes tokenizer.json where there was
    none. A `prefix` makes the file begin texts as the model's training did, and end them with
    the `suffix`, whatever it said before."""
    tokenizer = open_tokenizer(source)
    copy_terms(source, folder)
    if (source / "tokenizer.json").exists():
        for name in FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, folder / name)
    else:
        save_tokenizer(tokenizer, folder)
    there = ids_around(tokenizer)
    if prefix is not None and (there if suffix else (there[0], ())) != (prefix, suffix):
        _set_around(folder / "tokenizer.json", prefix, suffix)


def copy_terms(source: Path, folder: Path) -> None:
    """Copies the files of a license that `folder` has not."""
    for terms in (*source.glob("LICENSE*"), *source.glob("NOTICE*"), *source.glob("USE_POLICY*")):
        if terms.is_file() and not (folder / terms.name).exists():
            shutil.copyfile(terms, folder / terms.name)


def limit_tokens(folder: Path, most: int) -> None:
    """Sets the length to which the folder's tokenizer cuts texts, where a caller asks it to."""
    _set_config(folder, model_max_length=most)


def name_inputs(folder: Path, names: list[str]) -> None:
    """Sets what the folder's tokenizer gives to the model in transformers."""
    _set_config(folder, model_input_names=names)


def _set_config(folder: Path, **said: Any) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8")) if path.exists() else {}
    write_json(path, config | said, ascii_only=False)


def begin_once(folder: Path) -> None:
    """Edits the folder's tokenizer.json so that a pair (question, context) gets the prefix tokens
    once, before the first text."""
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text("utf-8"))
    template = spec["post_processor"]
    if template is None or template["type"] != "TemplateProcessing":
        return
    before, after = ids_around(load_tokenizer(folder))
    first, last = template["single"][: len(before)], template["single"][-len(after) :]
    last = last if after else []
    second = [{"Sequence": {"id": "B"}}, *last]
    pieces = [*first, {"Sequence": {"id": "A"}}, *last, *second]
    kinds = [0] * (len(pieces) - len(second)) + [1] * len(second)
    pieces = [
        {name: said | {"type_id": kind} for name, said in piece.items()}
        for piece, kind in zip(pieces, kinds, strict=True)
    ]
    write_json(path, spec | {"post_processor": template | {"pair": pieces}}, ascii_only=False)


def _set_around(path: Path, prefix: tuple[int, ...], suffix: tuple[int, ...]) -> None:
    backend = Tokenizer.from_file(str(path))
    spec = json.loads(path.read_text("utf-8")) | {"post_processor": None}
    if prefix or suffix:
        before, after = ([backend.id_to_token(i) for i in ids] for ids in (prefix, suffix))
        begin_with(backend, before, after)
        spec["post_processor"] = json.loads(backend.to_str())["post_processor"]
    write_json(path, spec, ascii_only=False)
