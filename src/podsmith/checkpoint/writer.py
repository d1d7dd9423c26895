"""A Hugging Face model folder written: weights, config, tokenizer, card, and the proof.

weights --layout, dtype--> shards --read again--> proof --> convert.json, README.md
                             |
all in a hidden folder beside `out`, which is renamed when everything holds
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from podsmith.checkpoint.card import Facts, model_card
from podsmith.checkpoint.layout import slots
from podsmith.checkpoint.proof import Proof, compare_tensors, prove
from podsmith.checkpoint.safetensors import DTYPES, plan_shards, write_shards
from podsmith.checkpoint.tokenizer_files import open_tokenizer, write_tokenizer
from podsmith.core.param import Tree, walk
from podsmith.errors import UserError

MAX_SHARD_BYTES = 5_000_000_000
CONVERT = "convert.json"
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def export_hf(
    model: Any,
    w: Tree,
    tokenizer_dir: Path | None,
    out: str | Path,
    *,
    dtype: str = "fp32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    facts: Facts | None = None,
    prefix: tuple[int, ...] | None = None,
    overwrite: bool = False,
) -> Proof:
    """Writes `out` for transformers and everything that reads its layout; returns the proof.

    `dtype` is fp32, bf16 or fp16; `prefix` are the ids that began the documents in training,
    where known (the tokenizer's own file has the say otherwise). The weights stream through
    one shard of host memory; the proof then holds the model once more, in float32.
    Raises UserError, leaving nothing behind, if `out` is a folder with something in it
    (`overwrite` replaces an earlier export), cannot be written, or the model does not fit
    the format; RuntimeError where the proof fails.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    if max_shard_bytes < 1:
        raise UserError(f"max_shard_bytes: {max_shard_bytes} must be at least 1")
    facts = facts or Facts(name=Path(out).absolute().name)
    tokenizer = _checked_tokenizer(model, tokenizer_dir)
    with new_folder(Path(out), overwrite) as folder:
        _write_weights(folder, model, w, dtype, max_shard_bytes)
        _write_config(folder, model, tokenizer, dtype)
        if tokenizer_dir is not None:
            write_tokenizer(tokenizer_dir, folder, prefix)
        compare_tensors(folder, _cast(model, w, DTYPES[dtype]))
        proof = prove(folder, model, w, tokenizer, dtype)
        _write_json(folder / CONVERT, proof.to_dict())
        card = model_card(facts, model, proof, dtype)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return proof


@contextmanager
def new_folder(out: Path, overwrite: bool = False) -> Iterator[Path]:
    """A hidden folder beside `out` that takes its name when the block ends well, and is
    removed otherwise. Disk trouble becomes a UserError."""
    _refuse_existing(out, overwrite)
    out = out.absolute()
    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        _sync(temporary)
        _take_name(temporary, out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{out}: cannot be written ({reason}); free some space or choose another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refuse_existing(out: Path, overwrite: bool) -> None:
    if out.is_dir():
        exported = (out / CONVERT).exists()
        if not any(out.iterdir()) or (overwrite and exported):
            return
        if exported:
            raise UserError(f"{out}: holds an earlier export; replace it with --overwrite")
        raise UserError(
            f"{out}: is not empty and was not written by podsmith export; choose another folder"
        )
    if out.exists() or out.is_symlink():
        raise UserError(f"{out}: is not a folder; choose another name")


def _take_name(temporary: Path, out: Path) -> None:
    """Renames; what an overwritten export held goes only when the new one is in place."""
    old = out.parent / f".{out.name}.{os.getpid()}.old"
    if out.exists() and any(out.iterdir()):
        os.rename(out, old)
    os.replace(temporary, out)
    shutil.rmtree(old, ignore_errors=True)
    _sync_one(out.parent)


def _sync(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        _sync_one(path)


def _sync_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cast(model: Any, w: Tree, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors in the target dtype. Raises UserError where a value is not a finite number."""
    leaves = dict(walk(w))
    for slot in slots(model):
        with np.errstate(over="ignore"):
            cast = slot.to_layout(leaves[slot.path], dtype)
        if not np.isfinite(cast).all():
            if np.isfinite(slot.to_layout(leaves[slot.path])).all():
                raise UserError(
                    f"dtype: {slot.name} has values too large for {dtype}; use bf16 or fp32"
                )
            raise UserError(
                f"{slot.name}: holds values that are not finite, so the training diverged; "
                f"export an earlier checkpoint"
            )
        yield slot.name, cast
        del cast  # not beside the next one


def _write_weights(folder: Path, model: Any, w: Tree, dtype: str, max_shard_bytes: int) -> None:
    sizes = [(slot.name, slot.size * DTYPES[dtype].itemsize) for slot in slots(model)]
    shards = plan_shards(sizes, max_shard_bytes)
    total = sum(size for _, size in sizes)
    write_shards(folder, _cast(model, w, DTYPES[dtype]), shards, total)


def _checked_tokenizer(model: Any, tokenizer_dir: Path | None) -> Any:
    if tokenizer_dir is None:
        return None
    tokenizer = open_tokenizer(tokenizer_dir)
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"{tokenizer_dir}: the tokenizer has {tokenizer.vocab_size} ids, the model only "
            f"{model.vocab_size}; they are not of one model"
        )
    return tokenizer


def _write_config(folder: Path, model: Any, tokenizer: Any, dtype: str) -> None:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = dict.fromkeys(names)
    if tokenizer is not None:
        ids = {name: getattr(tokenizer, name.replace("_token", "")) for name in names}
    name = TORCH_NAMES[dtype]
    # torch_dtype is what transformers before 4.56 reads
    _write_json(
        folder / "config.json", model.hf.config(model) | ids | {"dtype": name, "torch_dtype": name}
    )
    _write_json(folder / "generation_config.json", {k: v for k, v in ids.items() if v is not None})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
