"""Weights that tests hold in memory: as shapes, by their Hugging Face names, as a folder."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lmwright.core.contract import HfModel
from lmwright.core.param import Tree, map_params
from lmwright.formats.hf_layout import HfTensors
from lmwright.formats.hf_write import write_hf
from lmwright.formats.proof import Proof


def abstract_weights(spec: Tree, dtype: jnp.dtype = jnp.float32) -> Tree:
    """ShapeDtypeStructs in place of arrays."""
    return map_params(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), spec)


def to_hf(model: HfModel, w: Tree) -> dict[str, np.ndarray]:
    """All weights (or gradients), on the host, under their Hugging Face names."""
    return dict(HfTensors(model, jax.tree.map(np.asarray, w)))


def export_hf(
    model: HfModel,
    w: Tree,
    tokenizer_dir: Path | None,
    out: str | Path,
    *,
    dtype: str = "fp32",
    **options: Any,
) -> Proof:
    """Writes weights in memory as the folder `out`; the options are those of `write_hf`."""
    tensors = HfTensors(model, w)
    return write_hf(model, tensors, lambda: w, tokenizer_dir, out, dtype=dtype, **options)
