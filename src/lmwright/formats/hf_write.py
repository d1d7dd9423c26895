"""A Hugging Face model folder written: weights, config, tokenizer, card, and the proof.

weights --layout, dtype--> shards --read again--> proof --> convert.json, README.md
                             |
all in a hidden folder beside `out`, which is renamed when everything holds
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lmwright.core.contract import HfModel
from lmwright.core.param import Tree
from lmwright.data.json_text import write_json
from lmwright.errors import UserError
from lmwright.formats.card import Facts, model_card
from lmwright.formats.document_tokenizer import fit_tokenizer
from lmwright.formats.encoding import Encoding, encoding_of, stored_dtype
from lmwright.formats.hf_read import import_hf
from lmwright.formats.peft_folder import CONFIG
from lmwright.formats.places import being_written, new_place, unfinished
from lmwright.formats.proof import Proof, Source, compare_tensors, prove
from lmwright.formats.safetensors import TensorFiles, plan_shards, write_shards
from lmwright.formats.sentence import write_modules
from lmwright.formats.tensor_hash import CONVERT
from lmwright.formats.tokenizer_files import open_tokenizer, write_tokenizer
from lmwright.guard.files import sync
from lmwright.guard.folders import exchange
from lmwright.models.embedder import Embedder

GENERATION = "generation_config.json"
ENDINGS = (".safetensors", ".json", ".jinja", ".model")
NAMES = r"README|LICEN[SC]E|NOTICE|USE_POLICY|vocab\.txt|merges\.txt|\.DS_Store|\.gitattributes"
"""Beginnings of the names of other files in an export."""
MAX_SHARD_BYTES = 5_000_000_000
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def write_hf(
    model: HfModel,
    tensors: Mapping[str, np.ndarray],
    load: Callable[[], Tree],
    tokenizer_dir: Path | None,
    out: str | Path,
    *,
    dtype: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    facts: Facts | None = None,
    prefix: tuple[int, ...] | None = None,
    suffix: tuple[int, ...] = (),
    generation: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    source: Source | None = None,
) -> Proof:
    """Writes `out` for transformers and everything that reads its layout; returns the proof.

    `tensors` gives the weights by Hugging Face name, `load` the same as our tree, for the
    proof. `dtype` is one of `FOLDER_TYPES`; `prefix` are the ids that began the documents in
    training and `suffix` those that ended them, where known (the tokenizer's own file has the say
    otherwise); `generation` are settings of generation_config.json beside the tokenizer's ids;
    `source` is the original, where transformers may read it. Tensors stream through one shard of
    host memory; the proof then holds the source and the result once, one after the other.
    Raises UserError, leaving nothing behind, if `out` is a folder with something in it
    (`overwrite` replaces an earlier export), cannot be written, or the model does not fit
    the format; RuntimeError where the proof fails.
    """
    _refuse_tied(model)
    encoding = encoding_of(dtype, model, tensors)
    if max_shard_bytes < 1:
        raise UserError(f"max_shard_bytes: {max_shard_bytes} must be at least 1")
    facts = facts or Facts(name=Path(out).absolute().name)
    tokenizer = checked_tokenizer(model, tokenizer_dir)
    with new_folder(Path(out), overwrite) as folder:
        _write_weights(folder, model, tensors, encoding, max_shard_bytes)
        _write_config(folder, model, tokenizer, encoding, generation or {})
        if isinstance(model, Embedder):
            write_modules(folder, model)
        if tokenizer_dir is not None:
            write_tokenizer(tokenizer_dir, folder, prefix, suffix)
            fit_tokenizer(folder, model)
        files = TensorFiles(folder)
        proof = prove(
            model,
            tensors,
            load,
            lambda: import_hf(folder)[:2],
            tokenizer,
            dtype=dtype,
            compared=f"all {len(files)} equal bit for bit in {dtype}",
            xxh3=compare_tensors(files, encoding.tensors(model, tensors)),
            result=folder,
            source=source,
            exact=encoding.rest in ("fp32", stored_dtype(model, tensors)),
        )
        write_json(folder / CONVERT, proof.to_dict())
        card = model_card(facts, model, proof, dtype, Path(out).absolute().name)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return proof


def _refuse_tied(model: Any) -> None:
    """Raises UserError for a head of which transformers would make a random one."""
    if getattr(model.hf, "own_head", False) and model.head == "tied":
        raise UserError(
            f'model.head: "tied" is not computed by transformers\' {model.hf.name}, which would '
            'make a random head; export to GGUF, or train with model.head = "untied"'
        )


@contextmanager
def new_folder(out: Path, overwrite: bool = False, *, again: bool = False) -> Iterator[Path]:
    """A hidden folder beside `out` that takes its name when the block ends well, and is
    removed otherwise, by the next one where this process is killed. Where `out` is a link to a
    folder, that one is meant. Disk trouble becomes a UserError. With `again` an adapter that lies
    there is compared with the new one, and stays where they are equal: a command that was killed
    as it ended can be run again."""
    out = new_place(out).absolute()
    if out.is_dir():
        out = out.resolve()
    again = again and (out / CONFIG).is_file()
    with being_written(out, ".tmp") as temporary:
        if not again:
            refuse_existing_folder(out, overwrite)
        temporary.mkdir()
        yield temporary
        if again and _contents(out) == _contents(temporary):
            return
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        refuse_existing_folder(out, overwrite)  # another command may have made it meanwhile
        _take_name(temporary, out)


def refuse_existing_folder(out: Path, overwrite: bool) -> None:
    """Raises UserError for a folder with something in it, unless it is an earlier export that may
    be replaced, and for the current folder, which would be gone for whoever is in it."""
    if out.is_dir():
        if out.resolve() == Path.cwd():
            raise UserError(
                f"{out}: is the current folder, which the output would replace; name a new folder "
                "in it"
            )
        exported = (out / CONVERT).exists()
        if not any(out.iterdir()):
            return
        if overwrite and exported:
            if own := _not_exported(out):
                raise UserError(
                    f"{out}: holds {own}, which no export wrote and --overwrite would remove; move "
                    "it away, or choose another folder"
                )
            return
        if exported:
            raise UserError(f"{out}: holds an earlier export; replace it with --overwrite")
        if (out / CONFIG).exists():
            raise UserError(f"{out}: holds an adapter; remove it, or choose another folder")
        raise UserError(
            f"{out}: is not empty and was not written by lmwright export; choose another folder"
        )
    if out.exists() or out.is_symlink():
        raise UserError(f"{out}: is not a folder; choose another name")


def _contents(folder: Path) -> dict[Path, bytes]:
    """The files of a folder, by their places in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}


def _not_exported(out: Path) -> str | None:
    """The first name in an earlier export that no export has; None without one."""
    for path in sorted(out.rglob("*")):
        place = path.relative_to(out)
        if path.is_dir():
            known = re.fullmatch(r"\d+_[A-Z]\w*", str(place))  # a module of sentence-transformers
        else:
            known = path.suffix in ENDINGS or re.match(NAMES, path.name)
        if not known:
            return str(place)
    return None


def _take_name(temporary: Path, out: Path) -> None:
    """Gives the finished folder its name; what it overwrites has the temporary one afterwards, or
    is removed where the two names cannot be exchanged."""
    if out.exists() and exchange(temporary, out):
        sync(out.parent)
        return
    old = unfinished(out, ".old")
    if out.exists() and any(out.iterdir()):
        os.rename(out, old)
    os.replace(temporary, out)
    shutil.rmtree(old, ignore_errors=True)
    sync(out.parent)


def _write_weights(
    folder: Path, model: HfModel, tensors: Mapping[str, Any], encoding: Encoding,
    max_shard_bytes: int,
) -> None:  # fmt: skip
    sizes = encoding.sizes(model)
    shards = plan_shards(sizes, max_shard_bytes)
    total = sum(size for _, size in sizes)
    write_shards(folder, encoding.tensors(model, tensors), shards, total)


def checked_tokenizer(model: HfModel, tokenizer_dir: Path | None) -> Any:
    """The tokenizer of a folder, or None. Raises UserError where it is another model's."""
    if tokenizer_dir is None:
        return None
    tokenizer = open_tokenizer(tokenizer_dir)
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"{tokenizer_dir}: the tokenizer has {tokenizer.vocab_size} ids, the model only "
            f"{model.vocab_size}; they do not belong to the same model"
        )
    return tokenizer


def _write_config(
    folder: Path, model: HfModel, tokenizer: Any, encoding: Encoding, generation: Mapping[str, Any]
) -> None:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = dict.fromkeys(names)
    if tokenizer is not None:
        ids = {name: getattr(tokenizer, name.replace("_token", "")) for name in names}
        if model.both_ways and tokenizer.mask_id is not None:
            ids["mask_token_id"] = tokenizer.mask_id
    name = TORCH_NAMES[encoding.rest]
    # torch_dtype is what transformers before 4.56 reads
    own = model.hf.config(model)
    if not model.hf.needs_ids and (pad := own.get("pad_token_id")) is not None:
        ids["pad_token_id"] = pad  # by which positions are counted
    known = {name: value for name, value in ids.items() if value is not None}
    config = own | (known if model.hf.needs_ids else ids) | {"dtype": name, "torch_dtype": name}
    write_json(folder / "config.json", config | encoding.config)
    write_json(folder / GENERATION, {**generation, **known} | _ends(ids, generation))


def _ends(ids: Mapping[str, int | None], generation: Mapping[str, Any]) -> dict[str, Any]:
    """`eos_token_id` of generation_config.json: a list where several ids end a text."""
    others = generation.get("eos_token_id") or []
    others = others if isinstance(others, list) else [others]
    ends = [each for each in dict.fromkeys((ids["eos_token_id"], *others)) if each is not None]
    return {"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {}
