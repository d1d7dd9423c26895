"""FANformer (https://arxiv.org/abs/2502.21309): blocks of a llama whose queries, keys and values
read cosines and sines of their input beside the input.

    norm(x) --> times W, plus b --> p, g --> [cos p, sin p, g] --> q, k, v

With a fraction of r, p has r D numbers and g has (1 - 2 r) D, so that the width stays D.
"""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from lmwright.config.run import Positive, PositiveInt, section
from lmwright.core.param import Param, Tree, map_params
from lmwright.core.sharding import constrain
from lmwright.core.weight import before_products, dot
from lmwright.errors import UserError
from lmwright.models.block import Bias, with_bias
from lmwright.models.decoder import Head
from lmwright.models.llama import PreNorm

CUT = 3.0  # deviations beyond which fresh weights are drawn anew


@section
class Fanformer(PreNorm):
    """A decoder of the FANformer family; its fields are the model."""

    bias: ClassVar[Bias] = "none"  # type: ignore[misc]
    embed_std: ClassVar[None] = None  # type: ignore[misc, assignment]

    kind: Literal["fanformer"] = "fanformer"
    mlp_dim: PositiveInt
    periodic_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.125
    """Share of a layer's projected input that is taken as angles, over `embed_dim`; each angle
    gives a cosine and a sine."""
    norm_eps: Positive = 1e-6
    head: Head = "tied"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (angles := self.periodic_fraction * self.embed_dim) != self.num_angles:
            raise UserError(
                f"model.periodic_fraction: {self.periodic_fraction} of model.embed_dim = "
                f"{self.embed_dim} are {angles:g} angles; use {self.num_angles / self.embed_dim:g}"
            )

    @property
    def num_angles(self) -> int:
        """Number of angles, whose cosines and sines are taken."""
        return round(self.periodic_fraction * self.embed_dim)

    def spec(self) -> Tree:
        """Every weight, once; all matrices start alike."""
        std = self.embed_dim**-0.5
        return map_params(
            lambda p: replace(p, std=std, cut=CUT) if p.is_matrix else p, super().spec()
        )

    def layer_spec(self, kind: str) -> Tree:
        """The weights of a layer."""
        d, width = self.embed_dim, self.embed_dim - self.num_angles
        return super().layer_spec(kind) | {
            "fan": Param("embed -> embed", (d, width)),
            "fan_bias": Param("norm", (width,), fill=0.0),
        }

    def attention_input(self, w: Tree, x: Array) -> Array:
        """The input of the projections of queries, keys and values, [B, T, D]. Cosines and sines
        are taken in float32, since a large angle has no digits left in bfloat16."""
        h = before_products(super().attention_input(w, x))
        y = with_bias(dot("btd,de->bte", h, w["fan"]), w, "fan")
        angles, rest = jnp.split(y, [self.num_angles], axis=-1)
        wide = angles.astype(jnp.float32)
        waves = (jnp.cos(wide).astype(y.dtype), jnp.sin(wide).astype(y.dtype))
        return constrain(jnp.concatenate([*waves, rest], axis=-1), "batch stream embed")
