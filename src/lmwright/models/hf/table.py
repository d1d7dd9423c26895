"""Table of a family in Hugging Face: config.json and weight names, both ways.

    keys      fields that have the same value there     num_layers  <-> num_hidden_layers
    optional  the same, where null means unset          qkv_limit   <-> clip_qkv
    words     fields whose values have other names      mlp swiglu  <-> hidden_act silu
    derived   fields that follow from several keys      window      <-> use_sliding_window, ...

A family adds the rest in `own_config` and `own_fields`. A field that no architecture can
express is refused, never dropped. The layout of each weight follows from its arrow.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.hf.rope import rope_config, rope_fields

Json = dict[str, Any]

WEIGHTS = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "layers.attention_norm": "model.layers.{i}.input_layernorm.weight",
    "layers.mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    **{
        f"layers.{ours}{end}": f"model.layers.{{i}}.{theirs}_proj.{kind}"
        for ours, theirs in {
            "q": "self_attn.q", "k": "self_attn.k", "v": "self_attn.v", "o": "self_attn.o",
            "gate": "mlp.gate", "up": "mlp.up", "down": "mlp.down",
        }.items()
        for end, kind in (("", "weight"), ("_bias", "bias"))
    },
    "layers.q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.k_norm": "model.layers.{i}.self_attn.k_norm.weight",
}  # fmt: skip

KEYS = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}


@dataclass(frozen=True)
class Words:
    """A field whose values have other names in config.json."""

    ours: str
    theirs: str
    values: Mapping[str, Any]
    """Their name of each of our values."""
    usual: Any = False
    """Where the key is absent."""
    null: Any = False
    """Where it is null."""

    def read(self, config: Mapping[str, Any], where: str) -> str:
        """Our value. Raises UserError for an unsupported one."""
        value = config.get(self.theirs, self.usual)
        value = self.null if value is None else value
        kinds = {theirs: ours for ours, theirs in self.values.items()}
        if value not in kinds:
            names = ", ".join(map(str, kinds))
            raise UserError(
                f"{where}: {self.theirs} {value!r} is not supported; these are: {names}"
            )
        return kinds[value]

    def write(self, model: Any, family: str) -> Any:
        """The Hugging Face name of the model's value. Raises UserError where there is none."""
        value = getattr(model, self.ours)
        if value not in self.values:
            raise UserError(
                f"model.{self.ours}: {value!r} does not exist in Hugging Face's {family}; change it"
            )
        return self.values[value]


@dataclass(frozen=True)
class Derived:
    """Fields that follow from keys of config.json by a rule, and the rule back."""

    read: Callable[[Json, Json, str], Json]
    """Fields, from a config.json that is filled in, the fields of other pairs, and where it is."""
    write: Callable[[Any, str], Json]
    """Keys, from a model and the architecture that is written."""


@dataclass(frozen=True)
class ClassifierForm:
    """A family's head over documents in Hugging Face."""

    architecture: str
    pooling: str
    """What transformers takes where config.json does not say `classifier_pooling`."""
    weights: Mapping[str, str]
    """Names of the weights that its encoder does not have."""


GATED_ACT = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "reglu": "relu"}
ACT = Words("mlp", "hidden_act", GATED_ACT, "silu", "silu")
HEAD = Words("head", "tie_word_embeddings", {"tied": True, "untied": False})
BIAS = Words("bias", "attention_bias", {"attention": True, "none": False})


class Table:
    """Both directions of a family's Hugging Face form."""

    name: ClassVar[str]
    """The family's, in messages."""
    mark: ClassVar[str] = ""
    """Key of config.json that tells it from another family with its architectures."""
    model_types: ClassVar[dict[str, str]]
    """`model_type` of each architecture."""
    weights: ClassVar[dict[str, str]] = WEIGHTS
    classifier: ClassVar[ClassifierForm | None] = None
    keys: ClassVar[dict[str, str]] = KEYS
    optional: ClassVar[dict[str, str]] = {}
    words: ClassVar[tuple[Words, ...]] = (ACT, HEAD)
    derived: ClassVar[tuple[Derived, ...]] = ()
    quantized: ClassVar[bool] = False
    """Whether `own_fields` reads `quantization_config`, which is refused otherwise."""
    defaults: ClassVar[Json] = {}
    """Those of `usual` that do not depend on a config.json."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """The architectures that are read and written."""
        return tuple(self.model_types)

    def architecture(self, model: Any) -> str:
        """The architecture that expresses `model`. Raises UserError where none does."""
        return self.architectures[0]

    def config(self, model: Any) -> Json:
        """config.json of a model, tokenizer ids left out. Raises UserError for what it cannot
        say."""
        architecture = self.architecture(model)
        same = self.keys | self.optional
        config = {theirs: getattr(model, ours) for ours, theirs in same.items()}
        config |= {pair.theirs: pair.write(model, self.name) for pair in self.words}
        for rule in self.derived:
            config |= rule.write(model, architecture)
        config |= self.rope_keys(model)
        config["architectures"] = [architecture]
        config["model_type"] = self.model_types[architecture]
        if model.embed_std is not None:  # which some derive from their width
            config["initializer_range"] = model.embed_std
        return config | self.own_config(model, config)

    def rope_keys(self, model: Any) -> Json:
        """Keys of the rotations."""
        fraction = getattr(model, "rotary_fraction", None)
        return rope_config(model.rope_theta, model.rope_scaling, model.seq_len, fraction)

    def own_config(self, model: Any, config: Json) -> Json:
        """Keys that are no pairs, beside those in `config`."""
        return {}

    def fields(self, config: Json, where: str) -> Json:
        """Fields of the model for a config.json at `where`. Raises UserError for anything that
        this family does not compute."""
        architecture = config["architectures"][0]
        known = {k: v for k, v in config.items() if v is not None or k not in self.keys.values()}
        config = self.usual(known, architecture) | known
        fields = required(config, self.keys, where)
        fields |= {ours: config.get(theirs) for ours, theirs in self.optional.items()}
        fields |= {pair.ours: pair.read(config, where) for pair in self.words}
        for rule in self.derived:
            fields |= rule.read(config, fields, where)
        fields |= self.rope(config, architecture, where)
        return fields | self.own_fields(config, fields, where)

    def usual(self, config: Json, architecture: str) -> Json:
        """Values that transformers fills in where config.json is silent."""
        heads = {"num_key_value_heads": config.get("num_attention_heads")}
        return heads | head_dim(config) | self.defaults

    def rope(self, config: Json, architecture: str, where: str) -> Json:
        """Fields of the rotations."""
        return rope_fields(config, where)

    def own_fields(self, config: Json, fields: Json, where: str) -> Json:
        """Fields that are no pairs; `config` is filled in, `fields` are those of the pairs."""
        return {}


def required(config: Mapping[str, Any], keys: Mapping[str, str], where: str) -> Json:
    """Fields by our names. Raises UserError for those that config.json lacks."""
    missing = [theirs for theirs in keys.values() if config.get(theirs) is None]
    if missing:
        raise UserError(f"{where}: lacks {', '.join(missing)}; add them with the model's values")
    return {ours: config[theirs] for ours, theirs in keys.items()}


def head_dim(config: Mapping[str, Any]) -> Json:
    """The width of a head where config.json does not say it."""
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int) and heads > 0:
        return {"head_dim": width // heads}
    return {}
