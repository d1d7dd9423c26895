"""Attention on Hopper and Blackwell by tokamax's kernels (https://github.com/openxla/tokamax),
which read an interval of keys per query as ours do.

tokamax is optional. Masks of intervals are not in its public functions, so another version of it
may lack what is used here; then, as without it, `gpu_attention` takes other kernels.
"""

import importlib.util
import logging
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from lmwright.core.compute import ATTENTION
from lmwright.nn.attention import Scoring
from lmwright.nn.intervals import Interval, Reach, in_place, zero_unseen

# whose kernels and their gradients tokamax has in Mosaic; parts of JAX's names of devices
HOPPER = ("H100", "H200", "H800", "H20")
CARDS = (*HOPPER, "B100", "B200", "B300")


class Kernels(NamedTuple):
    """tokamax's attention, its gradients, and its class of masks."""

    attend: Any
    gradients: Any
    mask: Any


class Call(NamedTuple):
    """Static arguments."""

    kernels: Kernels
    scoring: Scoring
    causal: bool
    """True where no query sees what is behind it: only starts are read then."""

    def options(self, seen: Interval) -> dict[str, Any]:
        """Keyword arguments of tokamax's functions."""
        start, end = (side[:, None] for side in seen)  # [B, 1, T], of all heads
        end = None if self.causal else end
        mask = self.kernels.mask(k_start=start, k_end=end, is_causal=self.causal)
        scale, cap = self.scoring.scale, self.scoring.soft_cap
        return {"mask": mask, "logits_scale": scale, "logits_soft_cap": cap}


@cache
def library() -> Kernels | None:
    """tokamax's kernels in Mosaic; None where they are not there."""
    if importlib.util.find_spec("tokamax") is None:
        return None
    try:
        from absl import flags
        from tokamax._src.ops.attention import base
        from tokamax._src.ops.attention import pallas_mosaic_gpu as mosaic
        from tokamax._src.ops.attention import pallas_mosaic_gpu_vjp as gradients
    except (ImportError, RuntimeError) as error:  # another version, or one for another JAX
        logging.getLogger(__name__).warning("tokamax's attention is not used: %s", error)
        return None
    if not flags.FLAGS.is_parsed():  # else older versions read this program's own arguments
        flags.FLAGS.mark_as_parsed()
    logging.getLogger("absl").addFilter(_is_not_about_tuning)
    attend, back = mosaic.PallasMosaicGpuFlashAttention, gradients.PallasMosaicGpuFlashAttentionVjp
    return Kernels(attend(), back(), base.Mask)


def _is_not_about_tuning(record: logging.LogRecord) -> bool:
    """False for the line that each shape without tuned blocks gives."""
    return not str(record.msg).startswith("Autotuning cache miss")


def is_hopper(device_kind: str) -> bool:
    """True for cards of the Hopper generation."""
    return any(card in device_kind for card in HOPPER)


def has_card(device_kind: str) -> bool:
    """True for cards that tokamax has kernels for."""
    return any(card in device_kind for card in CARDS)


def fits(q: Array, k: Array, scoring: Scoring, device_kind: str) -> bool:
    """True if tokamax is there and its kernels take these shapes on a device of this kind."""
    if q.dtype != jnp.bfloat16 or not has_card(device_kind):
        return False
    return _fits(q.shape, k.shape, scoring._replace(window=None))


@cache
def _fits(q_shape: tuple[int, ...], k_shape: tuple[int, ...], scoring: Scoring) -> bool:
    if (kernels := library()) is None:
        return False
    q, k = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (q_shape, k_shape))
    side = jax.ShapeDtypeStruct(q_shape[:2], jnp.int32)
    call = Call(kernels, scoring, causal=True)

    def run(q: Array, k: Array, v: Array, start: Array, end: Array) -> tuple[Array, ...]:
        out, back = jax.vjp(lambda *a: _attention(call, *a, Interval(start, end)), q, k, v)
        return back(out)

    try:
        jax.eval_shape(run, q, k, k, side, side)
    except (NotImplementedError, ValueError) as error:
        logging.getLogger(__name__).info("tokamax's attention does not take %s: %s", q, error)
        return False
    return True


def attention(
    q: Array, k: Array, v: Array, seen: Interval, scoring: Scoring, reach: Reach,
    kernels: Kernels | None = None,
) -> Array:  # fmt: skip
    """`nn.intervals.attention` of one device's own rows, for which `fits` holds; by other `kernels`
    for tests."""
    call = Call(kernels or library(), scoring._replace(window=None), reach.causal)
    if reach.exact:
        return _attention(call, q, k, v, seen)
    return zero_unseen(_attention(call, q, k, v, in_place(seen)), seen)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: Call, q: Array, k: Array, v: Array, seen: Interval) -> Array:
    return _forward(call, q, k, v, seen)[0]


def _forward(call: Call, q: Array, k: Array, v: Array, seen: Interval):
    out, *sums = (checkpoint_name(a, ATTENTION) for a in _attention_out(call, q, k, v, seen))
    return out, (q, k, v, seen, out, tuple(sums))


def _backward(call: Call, residuals: tuple[Any, ...], g: Array):
    return *_attention_gradients(call, residuals, g), None


_attention.defvjp(_forward, _backward)


# traced and lowered once for all layers, which takes seconds
@partial(jax.jit, static_argnums=0)
def _attention_out(call: Call, q: Array, k: Array, v: Array, seen: Interval) -> tuple[Array, ...]:
    out, sums = call.kernels.attend(q, k, v, return_residuals=True, **call.options(seen))
    return out, *sums


@partial(jax.jit, static_argnums=0)
def _attention_gradients(call: Call, residuals: tuple[Any, ...], g: Array) -> tuple[Array, ...]:
    q, k, v, seen, out, sums = residuals
    bound = call.kernels.attend.bind(q, k, v, **call.options(seen))  # all arguments, defaults too
    options = {name: value for name, value in bound.kwargs.items() if name != "return_residuals"}
    gradients = call.kernels.gradients(sums, out, g.astype(q.dtype), *bound.args, **options)
    return tuple(gradients[name].astype(a.dtype) for name, a in (("q", q), ("k", k), ("v", v)))
