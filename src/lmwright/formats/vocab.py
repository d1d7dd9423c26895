"""Vocabulary surgery: rows added to or cut from a model's embedding, tokens to its tokenizer.

    old tokenizer --encode(new token)--> [i, j, k] --mean of their rows--> the new token's row

The same is done to an untied head; a tied one follows by itself. Rows for which there is no token
take the mean of all, so that no such id becomes likely
(https://nlp.stanford.edu/~johnhew/vocab-expansion.html).
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from lmwright.core.contract import HfModel
from lmwright.core.param import count_params
from lmwright.data.json_text import write_json
from lmwright.data.tokens.bpe import merges_of
from lmwright.data.tokens.tokenizer import TextTokenizer, read_json
from lmwright.data.tokens.tokenizer_formats import import_tokenizer
from lmwright.errors import UserError
from lmwright.formats.encoding import stored_dtype
from lmwright.formats.hf_layout import slots
from lmwright.formats.hf_stream import from_hf
from lmwright.formats.hf_write import write_hf
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel
from lmwright.formats.proof import (
    Agreement,
    Proof,
    agreement,
    finite,
    logits,
    proof_tokens,
    sentence,
)
from lmwright.formats.reference import too_large
from lmwright.formats.safetensors import Tensors, described
from lmwright.formats.tokenizer_files import write_tokenizer
from lmwright.guard.temporary import temporary_folder
from lmwright.models.over import OverEncoder
from lmwright.storage.mirror import sending

BROKEN = "\ufffd"
STALE = ("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")


@dataclass(frozen=True)
class Surgery:
    """Changes to a vocabulary."""

    rows: int
    """Rows of the embedding, afterwards."""
    parts: dict[int, tuple[int, ...]]
    """New id to the old ids whose mean it begins as."""
    filler_from: int
    """Ids from here on have no token: they take the mean of the old ones that have."""
    old_tokens: int


class ResizedTensors(Tensors):
    """Tensors by Hugging Face name with other rows where the vocabulary is."""

    def __init__(self, model: HfModel, tensors: Mapping[str, np.ndarray], surgery: Surgery):
        super().__init__(tensors)
        self._tensors, self._surgery = tensors, surgery
        self._resized = {slot.name for slot in slots(model) if "vocab" in slot.param.axes}

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape)."""
        dtype, shape = described(self._tensors, name)
        return dtype, (self._surgery.rows, *shape[1:]) if name in self._resized else shape

    def __getitem__(self, name: str) -> np.ndarray:
        array = np.asarray(self._tensors[name])
        return resized(array, self._surgery) if name in self._resized else array


def resized(array: np.ndarray, surgery: Surgery) -> np.ndarray:
    """A tensor [V, ...] with its rows added, cut and filled; the dtype stays, means are in
    float32."""
    out = np.empty((surgery.rows, *array.shape[1:]), array.dtype)
    num_kept = min(len(array), surgery.rows)
    out[:num_kept] = array[:num_kept]
    for new, old in surgery.parts.items():
        out[new] = array[list(old)].astype(np.float32).mean(0)
    if surgery.filler_from < surgery.rows:
        # rows that had no token before stay what they were
        first = max(surgery.filler_from, num_kept)
        out[first:] = array[: surgery.old_tokens].astype(np.float32).mean(0)
    return out


def vocab_command(
    path: str,
    out: str | Path,
    *,
    tokens: tuple[str, ...] = (),
    add_file: str | None = None,
    add_from: str | None = None,
    max_new: int | None = None,
    special: bool = False,
    size: int | None = None,
    multiple: int = 1,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Proof:
    """Writes the model at `path` with another vocabulary to the folder `out`, and prints what
    was done. Raises UserError where nothing is asked for or it does not fit."""
    if max_new is not None and add_from is None:
        raise UserError("--max-new: needs --add-from TOKENIZER")
    wanted = _wanted(tokens, add_file)
    loaded = load_model(path)
    if isinstance(loaded.model, OverEncoder):
        if loaded.model.reads_documents:
            cure = "change the vocabulary of its encoder first"
        else:
            cure = "change the vocabulary before its pretraining"
        raise UserError(f"{path}: is {loaded.model.called}; {cure}")
    loaded.check()
    if not (wanted or add_from or size or multiple > 1):
        raise UserError("vocab: nothing to do; give --add, --add-from, --size or --multiple")
    if special and not wanted:
        raise UserError("--special: applies to tokens of --add and --add-file; give one of them")
    old = loaded.tokenizer if loaded.tokenizer_dir or wanted or add_from else None
    new = old
    if add_from:
        new = merged(new, import_tokenizer(add_from), max_new, add_from)
    if wanted:
        _refuse_known(new, tokens, wanted, add_file)
        new = with_tokens(new, wanted, special)
    surgery = plan(loaded.model.vocab_size, old, new, size, multiple)
    model = replace(loaded.model, vocab_size=surgery.rows)
    tensors = ResizedTensors(loaded.model, loaded.tensors, surgery)
    unchanged = _check_old_logits(loaded, model, tensors, old)
    with temporary_folder() as folder, sending(out, overwrite=overwrite) as local:
        if new is not None:
            write_files(loaded.tokenizer_dir, Path(folder), new)
        proof = write_hf(
            model,
            tensors,
            lambda: from_hf(model, tensors, path),
            Path(folder) if new is not None else None,
            local,
            dtype=dtype or stored_dtype(model, tensors),
            facts=loaded.facts,
            prefix=loaded.prefix,
            generation=loaded.generation,
            overwrite=overwrite,
        )
    _say(out, loaded.model.vocab_size, surgery, unchanged, proof)
    return proof


def _wanted(tokens: tuple[str, ...], file: str | None) -> list[str]:
    if "" in tokens:
        raise UserError("--add: a token cannot be empty; give its text")
    return [*tokens, *(_lines(file) if file else ())]


def _lines(path: str) -> list[str]:
    try:
        text = Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text ({error})") from None
    if not (lines := [line for line in text.splitlines() if line.strip()]):
        raise UserError(f"{path}: holds no tokens; write one per line")
    return lines


def plan(
    rows: int,
    old: TextTokenizer | None,
    new: TextTokenizer | None,
    size: int | None,
    multiple: int,
) -> Surgery:
    """The surgery from `rows` and the old tokenizer to the new one. Raises UserError where
    `size` would cut tokens off."""
    known = old.vocab_size if old is not None else rows
    needed = new.vocab_size if new is not None else 1
    if size is not None and size < needed:
        raise UserError(f"--size: {size} is less than the tokenizer's {needed} tokens")
    # without a tokenizer nobody knows which rows stand for something
    if size is not None and old is None and size < rows:
        raise UserError(f"--size: {size} would cut rows of a model without a tokenizer ({rows})")
    count = size or max(rows, needed)
    count = -(-count // multiple) * multiple
    parts = {}
    for i in range(known, needed):
        parts[i] = _parts(i, old, new) or tuple(range(known))
    return Surgery(count, parts, max(needed, known), known)


def _parts(i: int, old: TextTokenizer, new: TextTokenizer) -> tuple[int, ...]:
    """Ids into which the old tokenizer splits a new token."""
    token = new.backend.id_to_token(i)
    if i not in new.backend.get_added_tokens_decoder():  # of a merge, maybe no whole characters
        return tuple(piece.id for piece in old.backend.model.tokenize(token))
    text = new.backend.decode([i], skip_special_tokens=False)
    # decoders of bytes take letters such as \u00fc for the byte that they stand for elsewhere
    return tuple((old.encode(text) if BROKEN not in text else []) or old.encode(token))


def _refuse_known(
    tokenizer: TextTokenizer, by_option: Collection[str], wanted: list[str], file: str | None
) -> None:
    """Raises UserError for a token that is there or given twice, by the option, else the file."""
    for token, count in Counter(wanted).items():
        known = tokenizer.backend.token_to_id(token) is not None
        if known or count > 1:
            where = "--add" if token in by_option else f"--add-file: {file}"
            what = "is there already; leave it out" if known else "is given twice; give it once"
            raise UserError(f"{where}: {token!r} {what}")


def with_tokens(tokenizer: TextTokenizer, tokens: list[str], special: bool) -> TextTokenizer:
    """The tokenizer with tokens that are cut out of any text before it is split: special ones of
    the text as it is, others, as in transformers, of the normalized text."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_tokens([tokenizers.AddedToken(t, special=special, normalized=not special)
                        for t in tokens])  # fmt: skip
    return replace(tokenizer, backend=backend, sentencepiece=None)


def merged(
    tokenizer: TextTokenizer, other: TextTokenizer, max_new: int | None, where: str
) -> TextTokenizer:
    """A BPE tokenizer with the merges of another of its kind after its own, and the tokens that
    they make under new ids; ids of the old tokens stay. Raises UserError for other kinds."""
    spec, more = json.loads(tokenizer.backend.to_str()), other.spec
    theirs, ours = _kind(more), _kind(spec)
    if theirs != ours or "BPE" not in ours:
        better = ""
        if ours == BYTE_LEVEL:
            better = f", or with a {BYTE_LEVEL} tokenizer (lmwright tokenizer train makes one)"
        raise UserError(
            f"{where}: is {theirs} and the model's tokenizer is {ours}, so its merges cannot be "
            f"appended; use --add-file with the new tokens{better}"
        )
    vocab = spec["model"]["vocab"]
    for token in spec["added_tokens"]:  # the library numbers those outside anew, at the end
        vocab.setdefault(token["content"], token["id"])
    merges = merges_of(spec["model"])
    taken, next_id, added = set(merges), tokenizer.vocab_size, 0
    known = set(tokenizer.backend.get_vocab(with_added_tokens=True))
    for left, right in merges_of(more["model"]):
        piece = left + right
        if (left, right) in taken or left not in vocab or right not in vocab:
            continue
        if piece not in vocab:
            if piece in known or (max_new is not None and added == max_new):
                continue
            vocab[piece], next_id, added = next_id, next_id + 1, added + 1
            merges.append((left, right))
    if not added:
        raise UserError(f"{where}: has no token that the model's tokenizer lacks")
    spec["model"]["merges"] = [list(merge) for merge in merges]
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    return replace(tokenizer, backend=backend, sentencepiece=None)


BYTE_LEVEL = "byte-level BPE"


def _kind(spec: Mapping[str, Any]) -> str:
    kind = str(spec["model"]["type"])
    if kind != "BPE":
        return kind
    return BYTE_LEVEL if (spec["decoder"] or {}).get("type") == "ByteLevel" else "sentencepiece BPE"


def write_files(source: Path, folder: Path, tokenizer: TextTokenizer) -> None:
    """The files beside an old tokenizer, with the new tokenizer.json; those that would still
    tell of the old one are left out."""
    write_tokenizer(source, folder, None)
    if tokenizer.spec == json.loads((folder / "tokenizer.json").read_text("utf-8")):
        return
    write_json(folder / "tokenizer.json", tokenizer.spec, ascii_only=False)
    for name in STALE:
        (folder / name).unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    config = read_json(path)
    # classes of one family build themselves from files that are gone now
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if "added_tokens_decoder" in config:
        config["added_tokens_decoder"] = {
            str(t["id"]): {k: v for k, v in t.items() if k != "id"}
            for t in tokenizer.spec["added_tokens"]
        }
    write_json(path, config, ascii_only=False)


def _check_old_logits(
    loaded: LoadedModel, model: HfModel, tensors: Mapping[str, Any], old: TextTokenizer | None
) -> Agreement | None:
    """Logits of the old ids before and after; None where the model is too large to run.
    Raises RuntimeError where they changed, UserError where they are not finite."""
    if too_large(count_params(model.spec())):
        return None
    tokens = proof_tokens(loaded.model, old)
    before = finite(logits(loaded.model, loaded.load(), tokens))
    after = logits(model, from_hf(model, tensors, str(loaded.path)), tokens)
    count = min(model.vocab_size, before.shape[-1], old.vocab_size if old else before.shape[-1])
    distance = agreement(before[..., :count], after[..., :count])
    if not distance.max_abs_diff <= 1e-4 * max(distance.max_abs_logit, 1.0):
        raise RuntimeError(f"logits of the old tokens changed by {distance.max_abs_diff:.3g}")
    return distance


def _say(
    out: str | Path, rows: int, surgery: Surgery, unchanged: Agreement | None, proof: Proof
) -> None:
    new = len(surgery.parts)
    spare = surgery.rows - surgery.filler_from
    print(f"{out}: {rows:,} rows became {surgery.rows:,}; {new:,} new tokens, {spare:,} spare rows")
    if unchanged is not None:
        print(f"  old tokens, before and after: {sentence(unchanged)}")
    for line in proof.lines():
        print(f"  {line}")
