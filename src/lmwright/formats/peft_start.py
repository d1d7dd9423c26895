"""PiSSA and OLoRA: factors that begin as a part of the base, which PEFT takes out of it.

    PEFT, on load:   base - start + scale * B A,    start = product that the factors began with
    here:            base + scale * [B, -B0] [A; A0],    start = scale * B0 A0

    pissa   scale * B0 A0 is the base's best approximation of that rank
            https://arxiv.org/abs/2404.02948
    olora   B0 A0 are the first columns and rows of its QR, whatever the scale
            https://arxiv.org/abs/2406.01775

The start is found from the base again, as PEFT does whenever it loads such a folder.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from lmwright.formats.peft_folder import PeftFolder, PeftModule


def as_plain(adapter: PeftFolder, weight_of: Callable[[str], np.ndarray]) -> PeftFolder:
    """Adapter as plain LoRA of up to twice the rank, for the base whose weights [outputs, inputs]
    `weight_of` gives by module name."""
    if adapter.start is None:
        return adapter
    modules = {
        # of a table PEFT takes nothing out; a weight that is kept whole has lost it already
        name: module
        if module.is_table or name in adapter.whole
        else _plain(module, weight_of(name), adapter.start)
        for name, module in adapter.modules.items()
    }
    return replace(adapter, modules=modules, start=None)


def _plain(module: PeftModule, weight: np.ndarray, start: str) -> PeftModule:
    if weight.shape != (len(module.b), module.a.shape[1]):
        return module  # of another base, which the caller finds
    if start == "pissa":
        b0 = leading(weight, module.rank)
        a0 = b0.T @ weight.astype(np.float64) / module.scale
    else:
        b0 = first(weight, module.rank)
        a0 = b0.T @ weight.astype(np.float64)
    return replace(
        module,
        a=np.concatenate([module.a, a0.astype(np.float32)]),
        b=np.concatenate([module.b, -b0.astype(np.float32)], axis=1),
    )


def leading(weight: np.ndarray, rank: int) -> np.ndarray:
    """float64 [outputs, rank]: left singular vectors of the largest singular values. Their
    product with the weight is its best approximation of that rank."""
    wide = weight.astype(np.float64)
    if len(wide) <= wide.shape[1]:
        _, vectors = np.linalg.eigh(wide @ wide.T)
        return vectors[:, ::-1][:, :rank]
    # the smaller of both products, several times as fast as a singular value decomposition
    _, vectors = np.linalg.eigh(wide.T @ wide)
    return np.linalg.qr(wide @ vectors[:, ::-1][:, :rank])[0]


def first(weight: np.ndarray, rank: int) -> np.ndarray:
    """float64 [outputs, rank]: an orthonormal basis of the first columns."""
    return np.linalg.qr(weight.astype(np.float64)[:, :rank])[0]
