"""Compute settings of evaluation outside of a run: the platform's kernels and fastest precision."""

from dataclasses import replace
from typing import Any, Literal

import jax

from lmwright.core.cards import refuse_lost_card
from lmwright.core.compute import DTYPES, Compute
from lmwright.core.contract import Model
from lmwright.core.cpu import has_amx
from lmwright.core.param import Tree
from lmwright.core.weight import nbytes
from lmwright.errors import UserError
from lmwright.kernels.select import kernels_for
from lmwright.program.plan import MAX_UNROLLED

Kernels = Literal["platform", "reference"]

# what compiling a layer by itself costs, and by kernels, copying a layer out of a stack; a 135M on
# an H100 says 0.17 s and 5e11
COMPILE_S = 0.2
COPIED_BYTES_S = {"cpu": 15e9, "gpu": 5e11, "early gpu": 1.5e11}


def row_compute(precision: str | None = None, kernels: Kernels = "platform") -> Compute:
    """Compute settings for whole rows on one device of this machine.

    None is the fastest precision: bf16 on TPUs, GPUs and CPUs that multiply it in hardware.
    Raises UserError for an unknown precision.
    """
    return _compute(precision or ("bf16" if has_bf16() else "fp32"), kernels)


def has_bf16() -> bool:
    """True if devices of this machine multiply bfloat16 in hardware."""
    device = _device()
    if device.platform == "cpu":
        return has_amx()
    return kernels_for(device.platform, 1, device.device_kind) != "early gpu"


def decode_compute(
    model: Model,
    w: Tree,
    new_tokens: int,
    precision: str | None = None,
    kernels: Kernels = "platform",
) -> Compute:
    """Compute settings for decoding `new_tokens` tokens on one device of this machine.

    None is the fastest precision: bf16 on TPUs and GPUs, fp32 on CPUs, which have no fast product
    of a matrix and a vector in bf16. Raises UserError as `row_compute`, and
    for an encoder.
    """
    refuse_encoder(model)
    platform = _device().platform
    slow = platform == "cpu" or not has_bf16()
    compute = _compute(precision or ("fp32" if slow else "bf16"), kernels)
    if (rate := COPIED_BYTES_S.get(compute.kernels)) is None or model.num_layers > MAX_UNROLLED:
        return compute
    # CPUs and GPUs copy a layer out of a stack before they read it, unless each is compiled alone
    copying_s = new_tokens * nbytes(w) / rate
    return replace(compute, unroll=copying_s > COMPILE_S * model.num_layers)


def text_compute(
    model: Any, w: Tree, new_tokens: int, precision: str | None = None,
    kernels: Kernels = "platform",
) -> Compute:  # fmt: skip
    """`decode_compute`, or for a model that fills in masks, `row_compute`."""
    if model.fills_masks:
        return row_compute(precision, kernels)
    return decode_compute(model, w, new_tokens, precision, kernels)


def spread(compute: Compute, num_devices: int) -> Compute:
    """The settings for several devices that share the weights: with layers in one stack, and
    without the kernels of CPUs, which are for one."""
    if num_devices == 1:
        return compute
    kernels = "reference" if compute.platform == "cpu" else compute.kernels
    return replace(compute, kernels=kernels, unroll=False)


def refuse_encoder(model: Model) -> None:
    """Raises UserError for a model that sees the tokens it is asked for."""
    if model.fills_masks:
        raise UserError(
            f"model.kind: {model.kind!r} fills in masks and predicts no next tokens; give a "
            "decoder, or measure the whole text: lmwright eval MODEL --text FILE"
        )
    if model.both_ways:
        raise UserError(
            f"model.kind: {model.kind!r} is an encoder, which predicts no next tokens; "
            "give a decoder, or fill masks with the export: docs/encoders.md"
        )


def refuse_samples(model: Model, samples: int | None) -> None:
    """Raises UserError for `samples` of masks of a model that fills in none."""
    if samples is not None and not model.fills_masks:
        raise UserError(
            f"--samples: is for models that fill in masks, which {model.kind!r} does not; leave "
            "it out"
        )


def _device() -> jax.Device:
    """The device that computes. Raises UserError for a card that JAX cannot use."""
    refuse_lost_card()
    return jax.local_devices()[0]


def _compute(precision: str, kernels: Kernels) -> Compute:
    if precision not in DTYPES:
        raise UserError(f"precision: {precision!r} is not one of {', '.join(DTYPES)}")
    device = _device()
    chosen = kernels_for(device.platform, 1, device.device_kind)
    return Compute(precision=precision, kernels=chosen if kernels == "platform" else "reference")


def compute_text(compute: Compute, num_devices: int = 1, num_copies: int = 1) -> str:
    """Text for compute settings, such as "fp32, cpu kernels"."""
    platform = _device().platform
    on = "" if platform in compute.kernels else f" on {platform}"
    over = "" if num_devices == 1 else f", over {num_devices} devices"
    over += "" if num_copies == 1 else f", on each of {num_copies} devices"
    return f"{compute.precision}, {compute.kernels} kernels{on}{over}"
