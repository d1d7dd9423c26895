"""Scalings of the rotary embedding, as `nn.rope` describes them."""

import math

import numpy as np

from lmwright.errors import UserError
from lmwright.nn.rope import (
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    RopeScaling,
    YarnRope,
    periods,
)


def rotations(
    rotary_dim: int, theta: float, scaling: RopeScaling, length: int
) -> tuple[np.ndarray, float]:
    """(radians a token, float32 [rotary_dim / 2], length of q and k) in rows of `length`."""
    if isinstance(scaling, DynamicRope):
        longer = max(length, scaling.original_seq_len) / scaling.original_seq_len
        growth = scaling.factor * longer - (scaling.factor - 1)
        theta = theta * growth ** (rotary_dim / (rotary_dim - 2))
    tokens = periods(rotary_dim, theta)
    if isinstance(scaling, LongRope):
        return _longrope(tokens, scaling, length)
    if isinstance(scaling, YarnRope):
        return _yarn(tokens, scaling, rotary_dim, theta)
    plain = 1 / tokens
    if isinstance(scaling, LinearRope):
        return plain / np.float32(scaling.factor), 1.0
    if isinstance(scaling, ProportionalRope):
        plain[int(scaling.fraction * rotary_dim // 2) :] = 0
        return plain / np.float32(scaling.factor), 1.0
    return (_llama3(plain, scaling) if isinstance(scaling, Llama3Rope) else plain), 1.0


def _llama3(plain: np.ndarray, s: Llama3Rope) -> np.ndarray:
    turns = s.original_seq_len * plain / np.float32(2 * math.pi)
    smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    smooth = np.clip(smooth, 0, 1).astype(np.float32)
    return (1 - smooth) * plain / np.float32(s.factor) + smooth * plain


def _yarn(
    tokens: np.ndarray, s: YarnRope, rotary_dim: int, theta: float
) -> tuple[np.ndarray, float]:
    def pair(turns: float) -> float:
        """The pair, counted as a fraction, that turns `turns` times within the original length."""
        log = math.log(s.original_seq_len / (turns * 2 * math.pi))
        return rotary_dim * log / (2 * math.log(theta))

    low, high = pair(s.beta_fast), pair(s.beta_slow)
    if s.borders == "whole":
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 0.001
    slowed = (np.arange(rotary_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width)
    slowed = np.clip(slowed, 0, 1)
    rotation = slowed / (np.float32(s.factor) * tokens) + (1 - slowed) / tokens
    return rotation, _yarn_factor(s)


def _yarn_factor(s: YarnRope) -> float:
    """Factor on the length of q and k."""
    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return yarn_length(s.factor, s.mscale) / yarn_length(s.factor, s.mscale_all_dim)
    return yarn_length(s.factor, 1.0)


def yarn_length(factor: float, weight: float) -> float:
    """Factor on the length of q and k for a context that is `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0


def _longrope(tokens: np.ndarray, s: LongRope, length: int) -> tuple[np.ndarray, float]:
    each = s.long_factor if length > s.original_seq_len else s.short_factor
    longer = s.attention_factor
    if longer is None:
        longer = math.sqrt(1 + math.log(s.factor) / math.log(s.original_seq_len))
    return 1 / (np.asarray(each, np.float32) * tokens), longer


def refuse_lists(scaling: RopeScaling, pairs: int) -> None:
    """Raises UserError where factors are listed for more or fewer pairs than a head has."""
    if not isinstance(scaling, LongRope):
        return
    for name in ("short_factor", "long_factor"):
        count = len(getattr(scaling, name))
        if count != pairs:
            raise UserError(
                f"model.rope_scaling.{name}: has {count} numbers for the {pairs} pairs of a "
                "head; give one per pair"
            )
