"""Table of a family in Hugging Face: config.json and weight names, both ways.

    keys      fields that have the same value there     num_layers  <-> num_hidden_layers
    optional  the same, where null means unset          qkv_limit   <-> clip_qkv
    pairs     all others (`models.hf.pairs`)            mlp swiglu  <-> hidden_act silu

A field that no architecture can express is refused, never dropped. The layout of each weight
follows from its arrow.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lmwright.errors import UserError
from lmwright.models.hf.pairs import ACT, HEAD, Json, Pair, refuse_number
from lmwright.models.hf.rope import ROPE

ENDS = {"": "weight", "_bias": "bias"}
"""Ends of the names of a layer's weights, theirs by ours."""


def with_biases(names: Mapping[str, str]) -> dict[str, str]:
    """Names of layers, theirs by ours, as names of their weights and of their biases."""
    return {
        f"{ours}{e}": f"{name}.{end}" for ours, name in names.items() for e, end in ENDS.items()
    }


STREAM_BIASES = {
    "norm_bias": "model.norm.bias",
    "layers.attention_norm_bias": "model.layers.{i}.input_layernorm.bias",
    "layers.mlp_norm_bias": "model.layers.{i}.post_attention_layernorm.bias",
}
"""Biases of layer norms."""
WEIGHTS = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "layers.attention_norm": "model.layers.{i}.input_layernorm.weight",
    "layers.mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
    **with_biases({
        f"layers.{ours}": f"model.layers.{{i}}.{theirs}_proj"
        for ours, theirs in {
            "q": "self_attn.q", "k": "self_attn.k", "v": "self_attn.v", "o": "self_attn.o",
            "gate": "mlp.gate", "up": "mlp.up", "down": "mlp.down",
        }.items()
    }),
    "layers.q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "layers.k_norm": "model.layers.{i}.self_attn.k_norm.weight",
}  # fmt: skip

KEYS = {
    "vocab_size": "vocab_size", "embed_dim": "hidden_size", "mlp_dim": "intermediate_size",
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "seq_len": "max_position_embeddings", "norm_eps": "rms_norm_eps",
}  # fmt: skip
NUMBERS = {*KEYS.values(), "layer_norm_eps", "norm_eps", "norm_epsilon"}
"""Keys whose values are above 0."""
EVEN_KEYS = {n: key for n, key in KEYS.items() if n not in ("num_kv_heads", "head_dim")}
"""Those beside `EVEN_HEADS`."""


@dataclass(frozen=True)
class ClassifierForm:
    """A family's head over documents in Hugging Face."""

    architecture: str
    pooling: str
    """transformers' choice where config.json does not say `classifier_pooling`."""
    dense: str = ""
    """Name of the dense layer that its encoder does not have."""
    out: str = "classifier"
    """Name of the layer of scores."""

    @property
    def weights(self) -> dict[str, str]:
        """Names of the weights that its encoder does not have."""
        layers = {"out": self.out} | ({"dense": self.dense} if self.dense else {})
        return with_biases({f"classifier.{ours}": theirs for ours, theirs in layers.items()})


Stacked = Literal["turns", "columns", "halves", "plain"] | None
Fused = Mapping[str, tuple[tuple[str, int], ...]]
"""Tensors in which several are one, by the ending of their names: the endings of the parts' names
and their rows, in order."""


class Table:
    """Both directions of a family's Hugging Face form."""

    name: ClassVar[str]
    """The family's, in messages."""
    mark: ClassVar[str] = ""
    """Key of config.json that tells it from another family with its architectures."""
    model_types: ClassVar[dict[str, str]]
    """`model_type` of each architecture."""
    weights: ClassVar[dict[str, str]] = WEIGHTS
    modules: ClassVar[dict[str, str]] = {}
    """Names of modules in transformers' class, which PEFT's are, where its files have others; `{i}`
    is the number of a layer."""
    body_prefix: ClassVar[str] = ""
    """Beginning of the names of all weights but the head, which older files leave out."""
    inputs_first: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of matrices that files hold as [in, out] (transformers' Conv1D)."""
    convs: ClassVar[tuple[str, ...]] = ()
    """Paths of filters, which are [numbers, 1, tokens] there."""
    rows: ClassVar[tuple[str, ...]] = ()
    """Paths of vectors, which are [1, numbers] there."""
    by_head: ClassVar[tuple[str, ...]] = ()
    """Paths of vectors of heads, which are [heads, numbers] there; or one tensor for each head, if
    the name has its number, `{}`."""
    classifier: ClassVar[ClassifierForm | None] = None
    answers: ClassVar[str | None] = None
    """The layer of scores in its class for question answering."""
    body: ClassVar[str | None] = None
    """The architecture without a head, of a model that gives vectors."""
    detector: ClassVar[str | None] = None
    """The architecture with Microsoft's head for replaced tokens."""
    gguf_types: ClassVar[tuple[str, ...]] = ()
    """Each `model_type` whose GGUF metadata transformers reads in full; of others it leaves scales,
    caps or sizes at their defaults."""
    keys: ClassVar[dict[str, str]] = KEYS
    optional: ClassVar[dict[str, str]] = {}
    pairs: ClassVar[tuple[Pair, ...]] = (ACT, HEAD, ROPE)
    """Fields that are read and written by functions, in this order."""
    stacked_experts: ClassVar[Stacked] = None
    """Order of gate and up where files hold the experts of a layer in a few tensors: row by row in
    turn, or one behind the other, as columns or as rows (`formats.stacked_experts`)."""
    peft_experts: ClassVar[Stacked] = None
    """The same of PEFT's factors, where files hold each expert alone; "plain" experts have no
    gate."""
    peft_refuses: ClassVar[tuple[str, ...]] = ()
    """Names of a layer's matrices for which PEFT takes no factors in this family."""
    stacked_names: ClassVar[dict[str, str]] = {}
    """Ends of the names of these tensors in files, where transformers' class has others."""
    quantized: ClassVar[bool] = False
    """True if a pair reads `quantization_config`, which is refused otherwise."""
    needs_ids: ClassVar[bool] = False
    """True where transformers' class takes no null for ids of tokens: a pair writes some, in whose
    place come those that a tokenizer has."""
    own_head: ClassVar[bool] = False
    """True where transformers' class ties no head to the embedding, whatever config.json says."""
    defaults: ClassVar[Json] = {}
    """Values that transformers fills in where config.json has none."""
    own_defaults: ClassVar[dict[str, Json]] = {}
    """Such values of single architectures."""

    @classmethod
    def is_of(cls, config: Json) -> bool:
        """False for a config.json with its architectures that another family reads."""
        return not cls.mark or config.get(cls.mark) not in (None, 0)

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
        for pair in self.pairs:
            config |= pair.write(model, architecture, self.name)
        if model.embed_std is not None:  # which some derive from their width
            config["initializer_range"] = model.embed_std
        named = {"architectures": [architecture], "model_type": self.model_types[architecture]}
        return config | named

    def fused(self, config: Json, where: str) -> Fused:
        """Tensors of a folder with this config.json at `where` in which several are one."""
        return {}

    def recut(self, config: Json, where: str) -> tuple[Fused, Mapping[str, str]]:
        """Tensors that transformers' class has as one and files in parts, whose rows some cut
        elsewhere; pieces of names in such files, and the usual ones."""
        return {}, {}

    def fields(self, config: Json, where: str) -> Json:
        """Fields of the model for a config.json at `where`. Raises UserError for anything that
        this family does not compute."""
        architecture = config["architectures"][0]
        known = {k: v for k, v in config.items() if v is not None or k not in self.keys.values()}
        usual = {"num_key_value_heads": known.get("num_attention_heads")} | head_dim(known)
        null = {name: value for name, value in usual.items() if config.get(name, ...) is None}
        config = usual | self.defaults | self.own_defaults.get(architecture, {}) | null | known
        for name in sorted(NUMBERS & known.keys() & set(self.keys.values())):
            refuse_number(name, known[name], where, whole=not name.endswith(("eps", "epsilon")))
        fields = required(config, self.keys, where)
        fields |= {ours: config.get(theirs) for ours, theirs in self.optional.items()}
        for pair in self.pairs:
            fields |= pair.read(config, fields, where)
        return fields


def required(config: Mapping[str, Any], keys: Mapping[str, str], where: str) -> Json:
    """Fields by our names. Raises UserError for those that config.json lacks."""
    missing = [theirs for theirs in keys.values() if config.get(theirs) is None]
    if missing:
        raise UserError(f"{where}: lacks {', '.join(missing)}; add them with the model's values")
    return {ours: config[theirs] for ours, theirs in keys.items()}


def head_dim(config: Mapping[str, Any]) -> Json:
    """The width of a head where config.json does not say it."""
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if isinstance(heads, int) and isinstance(width, int) and heads > 0 and width % heads == 0:
        return {"head_dim": width // heads}
    return {}
