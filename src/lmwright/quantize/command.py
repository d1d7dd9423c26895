"""quantize: a model in few bits, whose results stay near those of the floats on text like its own.

model --moments of inputs on calibration rows--> integers (GPTQ) --export--> folder or GGUF file
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lmwright.core.compute import Compute
from lmwright.core.param import Param, nest, walk
from lmwright.data.progress import console_progress
from lmwright.errors import UserError
from lmwright.evals.compute import row_compute
from lmwright.formats.compressed import is_packed
from lmwright.formats.convert import export_loaded
from lmwright.formats.encoding import refuse_packed, stored_dtype
from lmwright.formats.gguf_read import refuse_blocks
from lmwright.formats.hf_layout import HfTensors, slots
from lmwright.formats.hf_write import checked_tokenizer, refuse_existing_folder
from lmwright.formats.load import load_model
from lmwright.formats.loaded import LoadedModel
from lmwright.formats.open import open_place
from lmwright.formats.places import new_place, refuse_existing
from lmwright.formats.proof import Proof
from lmwright.formats.ternary import has_ternary
from lmwright.models.counts import is_layer_matrix
from lmwright.models.over import OverEncoder
from lmwright.program.qat_section import uneven
from lmwright.quantize.difference import Difference, compare
from lmwright.quantize.gptq import gptq, nearest
from lmwright.quantize.grids import BLOCKS, GridName
from lmwright.quantize.moments import Measured, measured
from lmwright.quantize.rows import Rows, rows_of_run, rows_of_text
from lmwright.storage.bucket import is_bucket

Method = Literal["gptq", "nearest"]
ROWS, CONTEXT, GROUP = 32, 1024, 32
WORST = 3  # matrices that are named
METHODS = {"gptq": gptq, "nearest": nearest}


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
    to: GridName | None = None,
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
    .gguf file (q4_0 or iq4_nl), and prints how far it is from the floats and the proof of the
    files.

    `group_size` inputs share a scale of int4. `rows` of `context` tokens are measured: of `text`, a
    file as `prepare` reads them, or of those that a run trained on. Raises UserError, before
    anything is measured, for a model or a place that does not allow it.
    """
    to = grid_of(out, to, group_size)
    loaded = _opened(path, adapter)
    _refuse_model(loaded, out, to, group_size, overwrite)
    chosen = _rows(loaded, text, text_column, rows, context)
    compute = row_compute()
    moments = measured(
        loaded.model, loaded.weights, chosen.batches(), matrices_of(loaded.model, to), compute
    )
    done = quantized(loaded, chosen, moments, to, compute, group_size=group_size, method=method)
    _tell(done, chosen, to, text or str(loaded.path))
    return export_loaded(
        done.loaded, out, dtype=to, max_shard_bytes=max_shard_bytes, overwrite=overwrite
    )


def grid_of(out: str | Path, to: GridName | None, group_size: int | None) -> GridName:
    """The grid that is meant: by the ending of `out` if none is given. Raises UserError for one
    that is for other files, and for groups without effect."""
    gguf = Path(out).suffix == ".gguf"
    to = to or ("q4_0" if gguf else "int4")
    if (to in BLOCKS) != gguf:
        what, cure = "a folder", "q4_0 or iq4_nl"
        if to in BLOCKS:
            what, cure = "a .gguf file", "int4 or int8"
        raise UserError(f"--to: {to} is for {what}, and OUT is {out}; use {cure}")
    if group_size is not None and to != "int4":
        raise UserError(f"--group-size: has no effect with --to {to}; leave it out")
    return to


def quantized(
    loaded: LoadedModel,
    rows: Rows,
    moments: Iterable[Measured],
    to: GridName,
    compute: Compute,
    *,
    group_size: int | None = None,
    method: Method = "gptq",
) -> Quantized:
    """The model with the matrices of its layers as integers on the grid `to`, beside which the
    others stay as they are stored; `moments` are those of `rows`, in any order."""
    model, w, group = loaded.model, loaded.weights, group_of(to, group_size)
    params = matrices_of(model, to)
    names = {(slot.path, slot.at): slot.name.removesuffix(".weight") for slot in slots(model)}
    leaves, errors = dict(walk(w)), {}
    codes = {path: np.zeros(param.shape, np.int8) for path, param in params.items()}
    scales = {path: np.zeros(_scales_shape(param, group), "f4") for path, param in params.items()}
    progress = console_progress()
    progress.start("quantize", sum(param.shape[0] for param in params.values()), 0, "weights")
    try:
        for each in moments:
            if (param := params.get(each.path)) is None:
                continue
            for at in np.ndindex(each.moments.shape[:-2]):
                place, moment = (each.layer, *at), each.moments[at]
                with jax.default_matmul_precision("highest"):
                    matrix = jnp.asarray(leaves[each.path][place], jnp.float32)
                    found = METHODS[method](matrix.reshape(param.matrix_shape), moment, to, group)
                codes[each.path][place] = np.reshape(found.codes, matrix.shape)
                scales[each.path][place] = np.reshape(found.scale, scales[each.path][place].shape)
                errors[names[each.path, place]] = float(found.error)
            progress.advance({"weights": param.size // param.shape[0]})
    finally:
        progress.finish()
    for path, param in params.items():
        leaves[path] = _values(codes[path], scales[path], param)
    rounded = nest(leaves.items())
    rest = stored_dtype(model, loaded.tensors)
    both = {path: (codes[path], scales[path]) for path in params}
    return Quantized(
        replace(
            loaded,
            tensors=HfTensors(model, rounded, both, to, rest),
            reference=None,
            origin=None,
            facts=replace(loaded.facts, origin=_origin(loaded, to, method)),
        ),
        compare(model, w, rounded, rows.compared, compute),
        errors,
    )


def group_of(to: GridName, group_size: int | None) -> int:
    """Inputs that share a scale; 0 if all do."""
    return 0 if to == "int8" else group_size or GROUP


def matrices_of(model: Any, to: GridName) -> dict[str, Param]:
    """The weights that are rounded, by path: the matrices of attention, mlps and experts; of a
    .gguf file those whose inputs are whole groups, as it holds the others as floats."""
    matrices = {path: param for path, param in walk(model.spec()) if is_layer_matrix(param)}
    even = {path: param for path, param in matrices.items() if param.matrix_shape[0] % GROUP == 0}
    return even if to in BLOCKS else matrices


def _scales_shape(param: Param, group: int) -> tuple[int, ...]:
    """Shape of a weight's scales, [*batch, groups, *outputs]."""
    groups = param.matrix_shape[0] // group if group else 1
    stacked, outputs = len(param.batch), len(param.batch + param.inputs)
    return (*param.shape[:stacked], groups, *param.shape[outputs:])


def _values(codes: np.ndarray, scale: np.ndarray, param: Param) -> jax.Array:
    """float32 values of integers, like the weight."""
    stacked = param.shape[: len(param.batch)]
    groups = scale.shape[len(stacked)]
    parts = codes.reshape(*stacked, groups, -1, param.matrix_shape[1]).astype(np.float32)
    scale = scale.reshape(*stacked, groups, 1, -1)
    return jnp.asarray((parts * scale).reshape(param.shape))


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
    loaded: LoadedModel, out: str | Path, to: GridName, group_size: int | None, overwrite: bool
) -> None:
    """Raises UserError for a model that cannot be written so, or an `out` that is there."""
    model = loaded.model
    if isinstance(model, OverEncoder):
        raise UserError(
            f"{loaded.path}: has an encoder's head for texts; only language models are quantized"
        )
    if has_ternary(model):
        raise UserError(f"{loaded.path}: the weights of a {model.kind!r} model are ternary already")
    found = uneven(model, group_of(to, group_size))
    if found and (to not in BLOCKS or not matrices_of(model, to)):
        path, inputs, fits = found
        cure = f"use {'' if to == 'int4' else '--to int4 and a folder with '}--group-size {fits}"
        raise UserError(
            f"--to: groups of {group_of(to, group_size)} do not divide the {inputs} inputs of "
            f"{path}; {cure}"
        )
    if to in BLOCKS:
        refuse_blocks(model, "--to", to)
    else:
        refuse_packed(to, model, "--to", "use q4_0 and a .gguf file")
    checked_tokenizer(model, loaded.tokenizer_dir)
    if not is_bucket(out):
        refuse = refuse_existing if to in BLOCKS else refuse_existing_folder
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


def _origin(loaded: LoadedModel, to: GridName, method: Method) -> str:
    how = {"gptq": "with GPTQ", "nearest": "to the nearest"}[method]
    return f"{loaded.facts.origin} Rounded to {to} {how} by lmwright.".strip()


def _tell(done: Quantized, rows: Rows, to: GridName, where: str) -> None:
    rounded = sum(param.size for param in matrices_of(done.loaded.model, to).values())
    count, length = rows.measured.shape
    print(f"measured on {count} rows of {length:,} tokens of {where}: {rounded:,} weights rounded")
    print(f"on {len(rows.compared)} other rows: {done.difference.line()}")
    worst = sorted(done.errors, key=lambda name: -done.errors[name])[:WORST]
    each = ", ".join(f"{name} {done.errors[name]:.1%}" for name in worst)
    print(f"largest errors of results: {each}", flush=True)
