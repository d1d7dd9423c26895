"""Rotary position embedding (https://arxiv.org/abs/2104.09864), halves rotated as in
Hugging Face: pairs are (i, i + H/2). Scalings make rotations fit contexts longer than a model was
trained on.

theta --> 1 / wavelength of each pair --kind of scaling--> slower rotations, longer q and k

linear    all slower (https://arxiv.org/abs/2306.15595)
dynamic   a larger theta for rows longer than those of training ("NTK-aware")
yarn      slow ones slower, fast ones as they were (https://arxiv.org/abs/2309.00071)
llama3    the same with other borders (https://arxiv.org/abs/2407.21783)
longrope  a searched factor for each pair (https://arxiv.org/abs/2402.13753)
proportional  slow pairs not rotated at all, those of the whole head divided by a factor (Gemma 4)

Numbers are those of transformers' `modeling_rope_utils`, in float32 as there. What depends on
the length of a row (dynamic, longrope) takes the length that the compiled program is made for:
that of the rows in training, that of the kv cache in generation.
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from pydantic import Field

from lmwright.config.registry import Registry
from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.sharding import by_platform

Factor = Annotated[float, Field(ge=1, allow_inf_nan=False)]
CHECK, TURN = "rope_scaling.refuse_lists", "rope_scaling.rotations"
SCALED = Registry("lmwright.nn", {"rotations": TURN, "refuse lists": CHECK})  # on demand


@section
class LinearRope:
    """Positions divided by a factor."""

    kind: Literal["linear"] = "linear"
    factor: Factor
    """Factor by which the context becomes longer."""


@section
class DynamicRope:
    """A theta that grows with rows beyond the original length."""

    kind: Literal["dynamic"] = "dynamic"
    factor: Factor
    """Rate at which theta grows with the length."""
    original_seq_len: PositiveInt
    """Context length, in tokens, of the training before."""


@section
class YarnRope:
    """Slow rotations divided by a factor, fast ones left, a ramp in between."""

    kind: Literal["yarn"] = "yarn"
    factor: Factor
    """Factor by which the context becomes longer."""
    original_seq_len: PositiveInt
    """Context length, in tokens, of the training before."""
    beta_fast: Positive = 32.0
    """Rotations within the original length above which a pair stays as it is."""
    beta_slow: Positive = 1.0
    """Rotations within the original length below which a pair is slowed down in full."""
    borders: Literal["whole", "exact"] = "whole"
    """Ends of the ramp: rounded to whole pairs, or exact."""
    attention_factor: Positive | None = None
    """Factor on the length of q and k; 0.1 log(factor) + 1 if unset."""
    mscale: Positive | None = None
    """Weight of the logarithm in the factor's numerator; `mscale_all_dim` is the denominator's."""
    mscale_all_dim: Positive | None = None


@section
class Llama3Rope:
    """Slow rotations divided by a factor, fast ones left, as in Llama 3.1."""

    kind: Literal["llama3"] = "llama3"
    factor: Factor
    """Factor by which the context becomes longer."""
    original_seq_len: PositiveInt
    """Context length, in tokens, of the training before."""
    low_freq_factor: Positive = 1.0
    """Rotations within the original length below which a pair is slowed down in full."""
    high_freq_factor: Positive = 4.0
    """Rotations within the original length above which a pair stays as it is."""


@section
class LongRope:
    """A factor for each pair: one list for rows up to the original length, one for longer."""

    kind: Literal["longrope"] = "longrope"
    factor: Factor
    """Factor by which the context becomes longer; it sets the length of q and k."""
    original_seq_len: PositiveInt
    """Context length, in tokens, of the training before."""
    short_factor: tuple[Positive, ...]
    long_factor: tuple[Positive, ...]
    attention_factor: Positive | None = None
    """Factor on the length of q and k; sqrt(1 + log(factor) / log(original_seq_len)) if unset."""


@section
class ProportionalRope:
    """Slow pairs not rotated, fast ones as if all were, divided by a factor."""

    kind: Literal["proportional"] = "proportional"
    fraction: Annotated[float, Field(gt=0, le=1)]
    """Share of the pairs that are rotated."""
    factor: Factor = 1.0
    """Factor by which the context becomes longer."""


RopeScaling = Annotated[
    LinearRope | DynamicRope | YarnRope | Llama3Rope | LongRope | ProportionalRope,
    Field(discriminator="kind"),
]


def rotations(
    rotary_dim: int, theta: float, scaling: RopeScaling | None, length: int
) -> tuple[np.ndarray, float]:
    """(radians a token, float32 [rotary_dim / 2], length of q and k) in rows of `length`."""
    if scaling is not None:
        return SCALED["rotations"](rotary_dim, theta, scaling, length)
    return 1 / periods(rotary_dim, theta), 1.0


def periods(rotary_dim: int, theta: float) -> np.ndarray:
    """Tokens a radian of each pair, float32 [rotary_dim / 2]."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return np.float32(theta) ** exponents


def rope_tables(
    positions: Array,
    rotary_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
    *,
    length: int | None = None,
) -> tuple[Array, Array]:
    """cos and sin, float32 [B, T, R/2], for int positions [B, T]; R is `rotary_dim`, what is
    rotated of a head.

    `length` is that of the rows for scalings that depend on it, T if it is not given; some
    scalings also make the rotated vectors longer, which the tables contain.
    """
    turns, longer = rotations(rotary_dim, theta, scaling, length or positions.shape[1])
    angles = positions[..., None].astype(jnp.float32) * turns
    # computed once: without the barrier, each layer's loop would take the cosines again
    return lax.optimization_barrier((jnp.cos(angles) * longer, jnp.sin(angles) * longer))


def apply_rope(x: Array, tables: tuple[Array, Array]) -> Array:
    """Rotates the first R of the H dims of x [B, T, N, H] by tables [B, T, R/2]; the arithmetic
    is float32."""
    rotary_dim = 2 * tables[0].shape[-1]
    if rotary_dim == x.shape[-1]:
        return _rotated(x, tables)
    first, rest = jnp.split(x, [rotary_dim], axis=-1)
    return jnp.concatenate([_rotated(first, tables), rest], axis=-1)


@jax.custom_vjp
def _rotated(x: Array, tables: tuple[Array, Array]) -> Array:
    """The rotation. Its gradient is the rotation back, which needs nothing of the forward pass."""
    cos, sin = (table[:, :, None, :] for table in tables)  # [B, T, 1, H/2]
    return by_platform(x, cos, sin, tpu=_by_product, default=_by_halves)


def _by_halves(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _by_product(x: Array, cos: Array, sin: Array) -> Array:
    """Rotation with the halves swapped by a permutation matrix, which is exact: half a head leaves
    most vector lanes of a TPU empty."""
    head_dim = x.shape[-1]
    swap = jnp.asarray(np.roll(np.eye(head_dim), head_dim // 2, axis=0), x.dtype)
    whole = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # TPUs would round it
    swapped = jnp.einsum(
        "btnh,hg->btng", x, swap, precision=whole, preferred_element_type=jnp.float32
    )
    both = lambda a, b: jnp.concatenate([a, b], axis=-1)  # noqa: E731
    return (x.astype(jnp.float32) * both(cos, cos) + swapped * both(-sin, sin)).astype(x.dtype)


def _rope_fwd(x: Array, tables: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
    return _rotated(x, tables), tables


def _rope_bwd(tables: tuple[Array, Array], g: Array) -> tuple[Array, None]:
    cos, sin = tables
    return _rotated(g, (cos, -sin)), None  # positions are integers: tables have no gradient


_rotated.defvjp(_rope_fwd, _rope_bwd)
