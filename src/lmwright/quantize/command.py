"""quantize: a model in few bits, whose results stay near those of the floats on text like its own.

model --moments of inputs on calibration rows--> integers (GPTQ) --export--> folder or GGUF file
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from jax import Array

from lmwright.core.compute import Compute
from lmwright.core.param import Param, walk
from lmwright.data.progress import console_progress
from lmwright.errors import UserError
from lmwright.evals.compute import row_compute
from lmwright.formats.compressed import is_packed
from lmwright.formats.convert import export_loaded
from lmwright.formats.encoding import refuse_packed, stored_dtype
from lmwright.formats.gguf_blocks import EightBits, of_blocks
from lmwright.formats.gguf_names import NameMap, gguf_arch_of
from lmwright.formats.gguf_read import refuse_blocks, slots_in_file
from lmwright.formats.gguf_write import TYPES, kind_in_file
from lmwright.formats.hf_layout import Slot, slots
from lmwright.formats.hf_write import checked_tokenizer, refuse_existing_folder
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel
from lmwright.formats.open import open_place
from lmwright.formats.places import new_place, refuse_existing
from lmwright.formats.proof import Proof
from lmwright.formats.tensor_hash import hash_tensors
from lmwright.formats.ternary import has_ternary
from lmwright.models.counts import is_layer_matrix
from lmwright.models.over import OverEncoder
from lmwright.program.qat_section import uneven
from lmwright.quantize.difference import Difference, compare
from lmwright.quantize.gptq import Integers, Method, Rounder
from lmwright.quantize.grids import FILES, MIXED, GridName, Target
from lmwright.quantize.layers import Weights
from lmwright.quantize.moments import Measured, measured
from lmwright.quantize.parts import Parts, Rounded, folder_of, kept_parts, remove_finished
from lmwright.quantize.rows import Rows, rows_of_run, rows_of_text
from lmwright.quantize.superblocks import BLOCK, KINDS
from lmwright.storage.bucket import is_bucket

ROWS, CONTEXT, GROUP = 32, 1024, 32
WORST = 3  # matrices that are named


@dataclass(frozen=True)
class Quantized:
    """A model in few bits."""

    loaded: LoadedModel
    difference: Difference
    errors: Mapping[str, float]
    """Mean squared error of a matrix's results as a share of their mean square, by its name in
    Hugging Face folders."""


def quantize_command(
    path: str | Path,
    out: str | Path,
    *,
    to: Target | None = None,
    group_size: int | None = None,
    text: str | None = None,
    text_column: str | None = None,
    rows: int = ROWS,
    context: int | None = None,
    method: Method = "gptq",
    adapter: str | None = None,
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
) -> Proof:
    """Writes the model at `path` in few bits as `out`, a Hugging Face folder (int4 or int8) or a
    .gguf file (the others), and prints how far it is from the floats and the proof of the
    files.

    `group_size` inputs share a scale of int4. `rows` of `context` tokens are measured: of `text`, a
    file as `prepare` reads them, or of those that a run trained on. Raises UserError, before
    anything is measured, for a model or a place that does not allow it.
    """
    to = grid_of(out, to, group_size)
    remove_finished(folder_of(out))
    loaded = _opened(path, adapter)
    _refuse_model(loaded, out, to, group_size, overwrite)
    chosen = _rows(loaded, text, text_column, rows, context)
    asked = _asked(loaded, chosen, to, group_of(to, group_size), method)
    with kept_parts(folder_of(out), asked, overwrite) as parts:
        done = quantized(
            loaded, chosen, parts, to, row_compute(), group_size=group_size, method=method
        )
        _tell(done, chosen, to, text or loaded.place)
        return export_loaded(
            done.loaded, out, dtype=to, max_shard_bytes=max_shard_bytes, overwrite=overwrite
        )


def grid_of(out: str | Path, to: Target | None, group_size: int | None) -> Target:
    """The grid that is meant: by the ending of `out` if none is given. Raises UserError for one
    that is for other files, and for groups without effect."""
    gguf = Path(out).suffix == ".gguf"
    to = to or ("q4_0" if gguf else "int4")
    if (to in FILES) != gguf:
        what, cure = "a folder", f"{', '.join(FILES[:-1])} or {FILES[-1]}"
        if to in FILES:
            what, cure = "a .gguf file", "int4 or int8"
        raise UserError(f"--to: {to} is for {what}, and OUT is {out}; use {cure}")
    if group_size is not None and to != "int4":
        raise UserError(f"--group-size: has no effect with --to {to}; leave it out")
    return to


def quantized(
    loaded: LoadedModel,
    rows: Rows,
    parts: Parts,
    to: Target,
    compute: Compute,
    *,
    group_size: int | None = None,
    method: Method = "gptq",
    moments: Iterable[Measured] | None = None,
) -> Quantized:
    """The model with the matrices of its layers as integers on the grid `to`, beside which the
    others stay as they are stored. What `parts` lacks is added to it, by the `moments` of `rows`,
    in any order; they are measured if not given."""
    model, params, done = loaded.model, matrices_of(loaded.model, to), parts.done
    floats = Weights(model, loaded.tensors)
    if moments is None:
        moments = measured(model, floats, rows.batches(), params, compute, done)
    rounder, grids = Rounder(method, group_of(to, group_size)), grids_of(model, params, to)
    moments = (each for each in moments if each.path in params and each[:2] not in done)
    progress = console_progress()
    total = sum(param.shape[0] for param in params.values())
    progress.start("quantize", total, len(done), "weights")
    try:
        for path, layer, moment in moments:
            weight = floats.weight(path, layer)
            round_matrix = partial(rounder, grid=grids[path, layer])
            parts.put(path, layer, _rounded(weight, moment, params[path], round_matrix))
            progress.advance({"weights": weight.size})
    finally:
        progress.finish()
    rest = stored_dtype(model, loaded.tensors)
    stored = EightBits(loaded.tensors, names) if (names := in_eight_bits(model, to)) else None
    tensors = Rounded(model, stored or loaded.tensors, params, parts, to, rest, grids)
    facts = replace(loaded.facts, origin=_origin(loaded, to, method))
    rounded = replace(loaded, tensors=tensors, reference=None, origin=None, facts=facts)
    difference = compare(model, (floats, Weights(model, tensors)), rows.compared, compute)
    return Quantized(rounded, difference, tensors.errors())


def _rounded(
    weight: Array,
    moments: Array,
    param: Param,
    round_matrix: Callable[[Array, Array], Integers],
) -> dict[str, np.ndarray]:
    """Codes, scales, errors and other parts of a rounded weight of a layer, [*batch, ...] each."""
    batch = moments.shape[:-2]
    pairs = zip(
        weight.reshape(-1, *param.matrix_shape),
        moments.reshape(-1, *moments.shape[-2:]),
        strict=True,
    )
    matrices = [
        {name: np.asarray(part) for name, part in parts.items() if part is not None}
        for parts in (round_matrix(matrix, moment)._asdict() for matrix, moment in pairs)
    ]
    stacked = {name: np.stack([parts[name] for parts in matrices]) for name in matrices[0]}
    return {name: array.reshape((*batch, *array.shape[1:])) for name, array in stacked.items()}


def group_of(to: Target, group_size: int | None) -> int:
    """Inputs that share a scale; 0 if all do."""
    return 0 if to == "int8" else group_size or GROUP


def matrices_of(model: Any, to: Target) -> dict[str, Param]:
    """The weights that are rounded, by path: the matrices of attention, mlps and experts; of a
    .gguf file those whose inputs are whole blocks, as it holds the others otherwise."""
    matrices = {path: param for path, param in walk(model.spec()) if is_layer_matrix(param)}
    if to not in FILES:
        return matrices
    blocks = of_blocks(TYPES[to])
    others = {slot.path for slot, kind in _kinds(model, to) if kind not in blocks}
    return {path: param for path, param in matrices.items() if path not in others}


def grids_of(
    model: Any, params: Mapping[str, Param], to: Target
) -> dict[tuple[str, int], GridName]:
    """The grid of each weight that is rounded, by path and layer."""
    if to not in MIXED:
        return {(path, i): to for path, param in params.items() for i in range(param.shape[0])}
    return {
        (slot.path, slot.at[0]): kind.lower()
        for slot, kind in _kinds(model, to) if slot.path in params
    }  # type: ignore[misc] # fmt: skip


def matrices_left(model: Any, to: Target) -> int:
    """Number of weights of matrices that a K-quant cannot hold."""
    if to not in (*KINDS, *MIXED):
        return 0
    both = (matrices_of(model, "int8"), matrices_of(model, to))
    whole, rounded = (sum(param.size for param in each.values()) for each in both)
    return whole - rounded


def in_eight_bits(model: Any, to: Target) -> set[str]:
    """Names of the tensors that a .gguf file holds as Q8_0 beside the blocks that are rounded:
    of K-quants tables, the head, and matrices with rows that are no multiple of 256."""
    return {slot.name for slot, kind in _kinds(model, to) if kind == "Q8_0"}


def _kinds(model: Any, to: Target) -> Iterator[tuple[Slot, str]]:
    """The parts of the weights, and the types that a .gguf file holds them in; none of a folder."""
    if to not in FILES:
        return
    config = model.hf.config(model)
    place = NameMap(gguf_arch_of(config)[0], config["num_hidden_layers"])
    for slot in slots_in_file(model):
        yield slot, kind_in_file(slot, place(slot.name)[0], TYPES[to], config)


def _opened(path: str | Path, adapter: str | None) -> LoadedModel:
    loaded = load_model(path, adapter)
    loaded.check()
    if grid := getattr(loaded.tensors, "grid", ""):
        raise UserError(
            f"{path}: was trained with qat.weights = {grid!r}, and holds its integers already; "
            f"write them with lmwright export {path} OUT --dtype {grid}"
        )
    if is_packed(loaded.tensors):
        raise UserError(f"{path}: holds integers already; start from the model in floats")
    return loaded


def _refuse_model(
    loaded: LoadedModel, out: str | Path, to: Target, group_size: int | None, overwrite: bool
) -> None:
    """Raises UserError for a model that cannot be written so, or an `out` that is there."""
    model = loaded.model
    if isinstance(model, OverEncoder):
        raise UserError(
            f"{loaded.place}: has an encoder's head for texts; only language models are quantized"
        )
    if has_ternary(model):
        raise UserError(
            f"{loaded.place}: the weights of a {model.kind!r} model are ternary already"
        )
    if to in (*KINDS, *MIXED) and not matrices_of(model, to):
        raise UserError(
            f"--to: {to} rounds rows of a multiple of {BLOCK}, and no matrix of "
            f"{loaded.place} has such; use iq4_nl"
        )
    found = uneven(model, group_of(to, group_size))
    if found and (to not in FILES or not matrices_of(model, to)):
        path, inputs, fits = found
        cure = f"use {'' if to == 'int4' else '--to int4 and a folder with '}--group-size {fits}"
        raise UserError(
            f"--to: groups of {group_of(to, group_size)} do not divide the {inputs} inputs of "
            f"{path}; {cure}"
        )
    if to in FILES:
        refuse_blocks(model, "--to", to)
    else:
        refuse_packed(to, model, "--to", "use q4_0 and a .gguf file")
    checked_tokenizer(model, loaded.tokenizer_dir)
    if not is_bucket(out):
        refuse = refuse_existing if to in FILES else refuse_existing_folder
        refuse(new_place(out), overwrite)


def _rows(
    loaded: LoadedModel, text: str | None, column: str | None, count: int, context: int | None
) -> Rows:
    length = context or min(CONTEXT, loaded.model.seq_len)
    if not 2 <= length <= loaded.model.seq_len:
        raise UserError(f"--context: {length} must be from 2 to the model's {loaded.model.seq_len}")
    if text is not None:
        return rows_of_text(loaded, text, column, count, length)
    if loaded.step is None:
        raise UserError(
            "--text: missing; give a file of text like that which the model is for (txt, jsonl, "
            "csv, tsv or parquet), on which it is measured"
        )
    if column is not None:
        raise UserError("--text-column: has no effect without --text; leave it out")
    return rows_of_run(open_place(loaded.path).run, count, length)


def _asked(
    loaded: LoadedModel, rows: Rows, to: Target, group: int, method: Method
) -> dict[str, Any]:
    """Model, text and settings, which decide the integers."""
    model = loaded.model
    text = xxhash.xxh3_128_hexdigest(np.concatenate(rows).tobytes())
    return {
        "model": repr(model),
        "weights": hash_tensors(loaded.tensors, [slot.name for slot in slots(model)]),
        "text": [list(rows.measured.shape), text],
        "to": to,
        "group_size": group,
        "method": method,
    }


def _origin(loaded: LoadedModel, to: Target, method: Method) -> str:
    how = {"gptq": "with GPTQ", "nearest": "to the nearest"}[method]
    return f"{loaded.facts.origin} Rounded to {to} {how} by lmwright.".strip()


def _tell(done: Quantized, rows: Rows, to: Target, where: str) -> None:
    rounded = sum(param.size for param in matrices_of(done.loaded.model, to).values())
    count, length = rows.measured.shape
    measured = f"{count} row{'s' * (count != 1)} of {length:,} tokens of {where}"
    print(f"measured on {measured}: {rounded:,} weights rounded")
    if left := matrices_left(done.loaded.model, to):
        print(f"{left:,} weights have rows that blocks of {BLOCK} do not divide: 8 bits (Q8_0)")
    others = len(rows.compared)
    print(f"on {others} other row{'s' * (others != 1)}: {done.difference.line()}")
    worst = sorted(done.errors, key=lambda name: -done.errors[name])[:WORST]
    each = ", ".join(f"{name} {done.errors[name]:.1%}" for name in worst)
    print(f"largest errors of results: {each}", flush=True)
