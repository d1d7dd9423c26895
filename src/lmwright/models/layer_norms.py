"""Layer norms with biases: their weights, and the activations after one.

x [..., D] --w[name], w[name_bias]--> normed [..., D]
"""

from jax import Array

from lmwright.core.param import Param, Tree
from lmwright.nn.layer_norm import layer_norm


def norm_spec(embed_dim: int, *names: str, biases: bool = True) -> Tree:
    """Weights of layer norms with these names, with or without biases."""
    spec = {name: Param("norm", (embed_dim,), fill=1.0) for name in names}
    more = names if biases else ()
    return spec | {f"{name}_bias": Param("norm", (embed_dim,), fill=0.0) for name in more}


def normed(w: Tree, name: str, x: Array, eps: float) -> Array:
    """x [..., D] after the layer norm of this name, times its scale and plus its bias, if it has
    these."""
    return layer_norm(x, w.get(name), w.get(f"{name}_bias"), eps)
