"""Vocabulary: checks that a tokenizer and a model fit together."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmwright.config.check_data import EARLIER_VOCAB_SIZE
from lmwright.config.run import Data, Tokenizer
from lmwright.data.dropped import read_made
from lmwright.data.manifest import Manifest, read_manifest
from lmwright.data.tokens.hub_tokenizer import local_tokenizer, on_hub, pinned_path
from lmwright.data.tokens.tokenizer_formats import import_tokenizer
from lmwright.errors import UserError

# A token of a trained vocabulary is then seen some sixteen times.
BYTES_PER_ID = 64
# Below this share, a vocabulary that is padded to a round number is nothing to speak of.
WORTH_SAYING = 0.01


def choose_size(spec: Tokenizer, model_size: int | None, text_bytes: int) -> int:
    """Size of a tokenizer to train: as set, else the model's, limited by the amount of text."""
    if spec.vocab_size is not None:
        return spec.vocab_size
    if model_size is None:
        return EARLIER_VOCAB_SIZE
    enough = min(text_bytes, spec.sample_bytes) // BYTES_PER_ID
    return min(model_size, max(EARLIER_VOCAB_SIZE, enough))


def train_bytes(normalized: Manifest) -> int:
    """Bytes of the training text."""
    train = normalized.counts["sources"].get("train", {})
    return sum(entry["bytes"] for entry in train.values())


def check_imported(data: Data, model_size: int | None) -> None:
    """Raises UserError, before any text is read, for a tokenizer that is missing, unreadable or too
    large for the model."""
    path = data.tokenizer.path
    if path is None:
        return
    if on_hub(path) and pinned_path(data.dir, data.tokenizer) != path:
        return  # nothing is fetched again; check_size is told of it when the stage is done
    try:
        local, _ = local_tokenizer(path)
    except UserError as error:
        raise error.at("data.tokenizer.path") from error
    if not local.exists():
        raise UserError(
            f"data.tokenizer.path: {path} does not exist; give a file or folder, or hf://owner/name"
        )
    check_size(import_tokenizer(local).vocab_size, model_size, path)


def check_size(ids: int, model_size: int | None, where: str) -> None:
    """Raises UserError for a tokenizer with ids that the model has no row for."""
    if model_size is not None and ids > model_size:
        raise UserError(
            f"model.vocab_size: {model_size} is smaller than the {ids} ids of the tokenizer in "
            f"{where}; raise it"
        )


def note_unused(model: Any, data_dir: str, ids: int) -> str | None:
    """Note about embedding rows that no token uses, and what to do about them; None if there are
    few."""
    size = model.vocab_size
    if ids >= size:
        return None
    leaves = list(_leaves(model.spec()))
    count = sum(math.prod(p.shape) for p in leaves)
    rows = sum(math.prod(p.shape) for p in leaves if "vocab" in p.axes)
    share = rows * (size - ids) / size / count
    if share < WORTH_SAYING:
        return None
    return (
        f"model.vocab_size = {size:,}, but the tokenizer has {ids:,} ids: {share:.0%} of the "
        f"model's parameters are rows that nothing uses; set {_cure(data_dir, size, ids)}"
    )


def _cure(data_dir: str, size: int, ids: int) -> str:
    rounded = -(-ids // 128) * 128  # which a mesh divides
    smaller = f"model.vocab_size = {rounded if rounded < size else ids}"
    try:
        made = read_manifest(Path(data_dir) / "tokenizer")
        normalized = read_made(Path(data_dir) / "normalize")
    except UserError:
        return smaller
    fingerprint = made.fingerprint["fingerprint"]
    if "files" in fingerprint:
        return f"{smaller}, or import a larger tokenizer"
    text_bytes = train_bytes(normalized)
    if ids < fingerprint["vocab_size"] or choose_size(Tokenizer(), size, text_bytes) <= ids:
        return f"{smaller}; {text_bytes / 1e6:.1f} MB of text suffice for no more ids"
    return f"{smaller}, or data.tokenizer.vocab_size = {size} and prepare again"


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    else:
        yield tree
