"""Rows of the tables of presets: a text, and a model that is made when it is asked for."""

from collections.abc import Callable
from typing import Any

Shape = tuple[int, int, int, int, int]
"""embed_dim, mlp_dim, num_layers, num_heads, num_kv_heads."""


def row(about: str, make: Callable[..., Any], *args: Any, **fields: Any) -> Callable[[], Any]:
    """A function that makes the model, with `about` as its docstring."""

    def preset() -> Any:
        return make(*args, **fields)

    preset.__doc__ = f"{about}."
    return preset


def llama(shape: Shape, **fields: Any) -> Any:
    """A decoder of the llama family; heads have 128 dims if nothing else is said."""
    from lmwright.models.llama import Llama

    return Llama(**sizes(shape), **({"head_dim": 128} | fields))


def sizes(shape: Shape) -> dict[str, int]:
    """The fields of a shape by name."""
    names = ("embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads")
    return dict(zip(names, shape, strict=True))
