"""Qwen3-Next and Qwen3-Coder-Next (https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct): the
layers of Qwen3.5 with experts, in whose linear ones a head of keys has all of its own in a matrix:

    x --> qkvz    of each of G heads: query, key, then values and output gates of its N / G heads
    x --> ba      of each of G heads: gates of writing, then of decay
"""

from typing import Literal

import jax.numpy as jnp
from jax import Array

from lmwright.config.run import section
from lmwright.core.compute import HEADS
from lmwright.core.param import Param, Tree
from lmwright.core.weight import dot, name_result
from lmwright.models.qwen3_5 import HybridMoe


@section
class Qwen3Next(HybridMoe):
    """A decoder of the Qwen3-Next family; its fields are the model."""

    kind: Literal["qwen3-next"] = "qwen3-next"

    @property
    def values_of_key(self) -> int:
        """Heads of values that share a head of keys."""
        return self.linear_num_value_heads // self.linear_num_key_heads

    def linear_inputs_spec(self) -> Tree:
        """Weights of `linear_inputs`."""
        d, g, h, of_key = (
            self.embed_dim, self.linear_num_key_heads, self.linear_head_dim, self.values_of_key
        )  # fmt: skip
        return {
            "qkvz": Param("embed -> heads head_dim", (d, g, (2 + 2 * of_key) * h)),
            "ba": Param("embed -> heads head_dim", (d, g, 2 * of_key)),
        }

    def linear_inputs(self, w: Tree, x: Array) -> tuple[Array, Array, Array, Array]:
        """Inputs of the memory, as in Qwen3.5, of products that lie together by head of keys."""
        g, of_key, h = self.linear_num_key_heads, self.values_of_key, self.linear_head_dim
        both = name_result(dot("btd,dnh->btnh", x, w["qkvz"]), HEADS)
        parts = both.reshape(*x.shape[:2], g, 2 + 2 * of_key, h)
        q, k, v, gate = jnp.split(parts, (1, 2, 2 + of_key), axis=3)
        values = (*x.shape[:2], self.linear_num_value_heads, h)
        qkv = jnp.concatenate([q[:, :, :, 0], k[:, :, :, 0], v.reshape(values)], axis=2)
        narrow = name_result(dot("btd,dnh->btnh", x, w["ba"], out_dtype=jnp.float32), HEADS)
        write, decay = (a.reshape(values[:3]) for a in jnp.split(narrow, 2, axis=3))
        return qkv, gate.reshape(values), write, decay
