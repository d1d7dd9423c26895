"""Check of models in which each head of queries has keys and values of its own."""

from typing import Any

from lmwright.errors import UserError


def refuse_groups(model: Any) -> None:
    """Raises UserError for other than as many kv heads as query heads."""
    if model.num_kv_heads != model.num_heads:
        raise UserError(
            f"model.num_kv_heads: {model.num_kv_heads} differs from model.num_heads = "
            f"{model.num_heads}, and each head has keys of its own here; make them equal"
        )
