"""Nemotron-4 (https://arxiv.org/abs/2402.16819) and Minitron (https://arxiv.org/abs/2407.14679):
blocks of a llama with layer norms, times 1 + weight, and an mlp without a gate; a part of each head
is rotated. Jais 2 (https://huggingface.co/inceptionai/Jais-2-8B-Chat) has the same blocks with
ordinary norms and whole heads rotated."""

from typing import Literal

import jax.numpy as jnp
from jax import Array

from lmwright.config.run import PositiveInt, section
from lmwright.core.param import Tree
from lmwright.models.from_zero import norm_from_zero
from lmwright.models.layer_normed import LayerNormed, RotaryFraction
from lmwright.nn.layer_norm import layer_norm
from lmwright.nn.mlp import PlainMlp


@section
class Nemotron(LayerNormed):
    """A decoder of the Nemotron-4 family; its fields are the model."""

    kind: Literal["nemotron"] = "nemotron"
    mlp_dim: PositiveInt
    mlp: PlainMlp = "relu2"
    """Activation of the feed-forward."""
    rotary_fraction: RotaryFraction = 0.5
    bias: Literal["none", "attention", "mlp", "all"] = "none"
    """Projections that add a bias."""

    def norms_spec(self, *names: str) -> Tree:
        """Weights of norms of the stream, zero where they change nothing, and their biases."""
        scales = {name: norm_from_zero("norm", self.embed_dim) for name in names}
        return super().norms_spec(*names) | scales

    def stream_norm(self, w: Tree, x: Array, name: str = "norm") -> Array:
        """x [B, T, D] after the norm of this name; the last one's is what the head sees."""
        scale = 1.0 + w[name].astype(jnp.float32)
        return layer_norm(x, scale, w[f"{name}_bias"], self.norm_eps)


@section
class Jais2(LayerNormed):
    """A decoder of the Jais 2 family; its fields are the model."""

    kind: Literal["jais2"] = "jais2"
    mlp_dim: PositiveInt
    mlp: PlainMlp = "relu2"
    """Activation of the feed-forward."""
    bias: Literal["none", "attention", "mlp", "all"] = "all"
    """Projections that add a bias."""
