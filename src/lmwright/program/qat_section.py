"""Quantization-aware training in a run file: the section `[qat]`.

The string under a field is its help text. Reading it imports no jax.
"""

from typing import Any, Literal

from lmwright.config.run import PositiveInt, Run, section
from lmwright.errors import UserError
from lmwright.program.lora_section import SMALL


@section
class Qat:
    """Quantization-aware training (https://arxiv.org/abs/1712.05877): matrices of the layers are
    trained as floats and compute rounded, as the exported ones will."""

    kind: Literal["qat"] = "qat"
    weights: Literal["int4", "int8", "q4_0"] = "int4"
    """Grid: `int4` by groups of inputs, `int8` by outputs, or `q4_0`, GGUF's own of 32."""
    group_size: PositiveInt | None = None
    """Inputs that share a scale of `int4`; 32 if unset."""
    activations: Literal["none", "int8"] = "none"
    """`int8` rounds what the matrices read, each token by its own scale."""

    def __post_init__(self) -> None:
        if self.group_size is not None and self.weights != "int4":
            raise UserError(
                f'qat.group_size: has no effect with qat.weights = "{self.weights}"; leave it out'
            )

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0 if all do."""
        return 0 if self.weights == "int8" else self.group_size or 32

    def refuse_model(self, model: Any) -> None:
        """Raises UserError for a model whose matrices do not allow it."""
        from lmwright.core.param import walk

        if any(param.ternary for _, param in walk(model.spec())):
            raise UserError(
                f"qat: the weights of a {model.kind!r} model are ternary already; remove [qat]"
            )
        if (found := uneven(model, self.group)) is None:
            return
        path, inputs, fits = found
        field, cure = "group_size", f"use {fits}"
        if self.weights != "int4":
            field, cure = "weights", f'use "int4" with group_size = {fits}'
        raise UserError(
            f"qat.{field}: groups of {self.group} do not divide the {inputs} inputs of "
            f"{path}; {cure}"
        )

    def refuse(self, run: Run) -> None:
        """Raises UserError for a model or adapters that cannot be inside the rounding."""
        self.refuse_model(run.model)
        if (lora := run.lora) is None:
            return
        dropout = any(map(lora.dropout_of, lora.listed))
        if lora.variant != "lora" or dropout or lora.base in SMALL:
            raise UserError(
                'lora: with [qat] the adapter is inside the rounding: use variant = "lora", base = '
                '"bf16" or "fp32" and no dropout'
            )
        for adapter in lora.listed:
            if adapter.init_from is not None:
                where = f"lora.adapters[{adapter.name!r}]" if lora.adapters else "lora"
                raise UserError(
                    f"{where}.init_from: an adapter of PEFT has no scales, which [qat] trains; "
                    "merge it (lmwright adapters merge), and name the result in train.init_from"
                )


def uneven(model: Any, group: int) -> tuple[str, int, int] | None:
    """(path, number of inputs, a smaller group that divides them) of the first matrix whose inputs
    cannot be cut into groups of this size; None without one, or if `group` is 0."""
    from lmwright.core.param import walk
    from lmwright.models.counts import is_layer_matrix

    for path, param in walk(model.spec()):
        inputs = param.matrix_shape[0]
        if group and is_layer_matrix(param) and inputs % group:
            return path, inputs, next(n for n in range(group, 0, -1) if inputs % n == 0)
    return None


KINDS = {"qat": Qat}
"""Kinds of training whose weights compute rounded."""
