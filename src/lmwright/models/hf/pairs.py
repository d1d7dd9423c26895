"""Pairs of a model's fields and the keys of config.json that say them, each read and written.

Words    a field whose values have other names     mlp swiglu  <-> hidden_act silu
Fixed    a key with one value in all that is computed          --> use_bias false
Derived  fields that follow from keys by a rule    window      <-> use_sliding_window, ...
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmwright.errors import UserError

Json = dict[str, Any]


class Pair(Protocol):
    """Fields of a model and the keys of config.json that say them."""

    def read(self, config: Json, fields: Json, where: str, /) -> Json:
        """Fields of the model. `config` is a config.json with its defaults filled in, `fields` has
        what earlier pairs have read, `where` is its path. Raises UserError for what is not
        computed."""

    def write(self, model: Any, architecture: str, family: str, /) -> Json:
        """Keys of config.json for a model; `family` is its name in messages. Raises UserError for
        what the architecture cannot express."""


@dataclass(frozen=True)
class Words:
    """A field whose values have other names in config.json."""

    ours: str
    theirs: str
    values: Mapping[str, Any]
    """Their name of each of our values."""
    usual: Any = False
    """Value where the key is absent."""
    null: Any = False
    """Value where it is null."""
    same: Mapping[str, str] = field(default_factory=dict)
    """Further names over there that mean the same, by name."""

    def read(self, config: Json, _: Json, where: str) -> Json:
        """Our value. Raises UserError for an unsupported one."""
        value = config.get(self.theirs, self.usual)
        value = self.null if value is None else value
        value = self.same.get(value, value) if isinstance(value, str) else value
        kinds = {theirs: ours for ours, theirs in self.values.items()}
        if value not in kinds:
            names = ", ".join(map(str, kinds))
            raise UserError(
                f"{where}: {self.theirs} {value!r} is not supported; these are: {names}"
            )
        return {self.ours: kinds[value]}

    def write(self, model: Any, _: str, family: str) -> Json:
        """The Hugging Face name of the model's value. Raises UserError where there is none."""
        value = getattr(model, self.ours)
        if value not in self.values:
            raise UserError(
                f"model.{self.ours}: {value!r} does not exist in Hugging Face's {family}; change it"
            )
        return {self.theirs: self.values[value]}


@dataclass(frozen=True)
class Fixed:
    """A key of config.json that has one value in all that is computed, also where it is absent."""

    key: str
    value: Any
    refusal: str = "{key} = {said} is not supported; it is {value} in released models"
    """Message for any other: `{key}`, what it `{said}` and the `{value}`."""
    same: tuple[Any, ...] = ()
    """Other values that mean the same."""
    written: bool = True

    def read(self, config: Json, _: Json, where: str) -> Json:
        """No field. Raises UserError for another value."""
        said = config.get(self.key, self.value)
        if said != self.value and said not in self.same:
            refusal = self.refusal.format(key=self.key, said=repr(said), value=repr(self.value))
            raise UserError(f"{where}: {refusal}")
        return {}

    def write(self, *_: Any) -> Json:
        """The key with its value."""
        return {self.key: self.value} if self.written else {}


def _nothing(*_: Any) -> Json:
    return {}


@dataclass(frozen=True)
class Derived:
    """Fields that follow from keys of config.json by a rule, and the rule back; either may be
    nothing, or only a refusal."""

    read: Callable[[Json, Json, str], Json] = _nothing
    write: Callable[[Any, str, str], Json] = _nothing


def only_written(**keys: Any) -> Derived:
    """Keys that say nothing about a model."""
    return Derived(write=lambda *_: dict(keys))


def refuse_number(name: str, value: Any, where: str, whole: bool = False) -> None:
    """Raises UserError unless a value of config.json is a number above 0, with `whole` a whole
    one."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 < value < math.inf and (not whole or value % 1 == 0)):
        kind = "whole number" if whole else "number"
        raise UserError(
            f"{where}: {name} = {value!r} is not a {kind} above 0; correct it, or download the "
            "file again"
        )


GATED_ACT = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "reglu": "relu"}
ACT = Words("mlp", "hidden_act", GATED_ACT, "silu", "silu")
PLAIN = {"gelu_erf": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "relu2": "relu2"}
PLAIN_ACT = Words(
    "mlp", "hidden_act", PLAIN, "gelu",
    same=dict.fromkeys(("gelu_fast", "gelu_pytorch_tanh"), "gelu_new"),
)  # fmt: skip
HEAD = Words("head", "tie_word_embeddings", {"tied": True, "untied": False})
BIAS = Words("bias", "attention_bias", {"attention": True, "none": False})
NO_IDS = only_written(bos_token_id=None, eos_token_id=None, pad_token_id=None)
"""Ids that a class would fill in with those of the released models."""


def _read_width(config: Json, fields: Json, where: str) -> Json:
    heads, width = fields["num_heads"], fields["embed_dim"]
    if width % heads:
        raise UserError(
            f"{where}: hidden_size = {width} is not a multiple of num_attention_heads = {heads}; "
            "correct one of them"
        )
    return {"head_dim": width // heads}


def _write_width(model: Any, _: str, family: str) -> Json:
    if model.head_dim * model.num_heads != model.embed_dim:
        raise UserError(
            f"model.head_dim: {model.head_dim} times {model.num_heads} heads is not "
            f"model.embed_dim = {model.embed_dim}, as in Hugging Face's {family}; change it"
        )
    return {}


def _write_heads(model: Any, architecture: str, family: str) -> Json:
    if model.num_kv_heads != model.num_heads:
        raise UserError(
            f"model.num_kv_heads: {model.num_kv_heads} differs from model.num_heads = "
            f"{model.num_heads}, which Hugging Face's {family} cannot have; make them equal"
        )
    return _write_width(model, architecture, family)


EVEN_WIDTH = Derived(_read_width, _write_width)
"""Heads of queries that share the width."""
EVEN_HEADS = Derived(
    lambda config, fields, where: {
        "num_kv_heads": fields["num_heads"], **_read_width(config, fields, where)
    },
    _write_heads,
)  # fmt: skip
"""Heads of keys and of values as many as of queries, which share the width."""
