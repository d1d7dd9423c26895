"""ModernBERT in Hugging Face, in the form of transformers 5 and the one before."""

from typing import Any, ClassVar

from lmwright.errors import UserError
from lmwright.models.decoder import Reach, reaches
from lmwright.models.hf.rope import rope_config, rope_fields
from lmwright.models.hf.table import (
    GATED_ACT,
    HEAD,
    KEYS,
    ClassifierForm,
    Derived,
    Json,
    Table,
    Words,
)
from lmwright.models.hf.window import TYPES, pattern_of, reach_of

ACTS = GATED_ACT | {"geglu_erf": "gelu"}
ACT = Words("mlp", "hidden_activation", ACTS, "gelu", "gelu")
TIED = Words("head", HEAD.theirs, HEAD.values, True, True)
BIASES = {
    "attention": "attention_bias", "mlp": "mlp_bias", "norm": "norm_bias",
    "dense": "classifier_bias", "decoder": "decoder_bias",
}  # fmt: skip
OTHERS = ("head_dim", "num_kv_heads")  # follow from the rest over there
NORMS = {"attention_norm": "attn_norm", "mlp_norm": "mlp_norm"}
LINEARS = {"qkv": "attn.Wqkv", "o": "attn.Wo", "gate_up": "mlp.Wi", "down": "mlp.Wo"}


def _weights() -> dict[str, str]:
    """Names over there of ours, whose biases end in `_bias`."""
    layer = "model.layers.{i}."
    outer = {
        "embed_norm": "model.embeddings.norm", "norm": "model.final_norm",
        "dense": "head.dense", "head_norm": "head.norm", "decoder": "decoder",
    }  # fmt: skip
    both = outer | {f"layers.{n}": layer + theirs for n, theirs in (NORMS | LINEARS).items()}
    return {
        "embed": "model.embeddings.tok_embeddings.weight",
        "head": "decoder.weight",
        **{ours: f"{theirs}.weight" for ours, theirs in both.items() if ours != "decoder"},
        **{f"{ours}_bias": f"{theirs}.bias" for ours, theirs in both.items()},
    }


def _read_reach(config: Json, fields: Json, where: str) -> Json:
    num_layers = fields["num_layers"]
    types = config.get("layer_types")
    if types is None:
        every = config.get("global_attn_every_n_layers") or 3
        reach = _every(every, num_layers)
    else:
        reach = reach_of(types, num_layers, where)
    return {"window": config["local_attention"] // 2 + 1, "layer_pattern": pattern_of(reach)}


def _write_reach(model: Any, _: str) -> Json:
    reach = reaches(model.layer_pattern, model.num_layers)
    every = len(pattern_of(reach))
    own = {"layer_types": [TYPES[each] for each in reach], "local_attention": 2 * model.window - 2}
    if list(reach) == _every(every, model.num_layers):
        own["global_attn_every_n_layers"] = every  # what transformers 4 and llama.cpp read
    return own


def _every(count: int, num_layers: int) -> list[Reach]:
    """The reach of layers of which the first of each `count` is global."""
    return ["local" if i % count else "global" for i in range(num_layers)]


class ModernBertHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "ModernBERT"
    model_types: ClassVar = {"ModernBertForMaskedLM": "modernbert"}
    weights = _weights()
    classifier: ClassVar = ClassifierForm(
        "ModernBertForSequenceClassification",
        "cls",
        {"classifier.out": "classifier.weight", "classifier.out_bias": "classifier.bias"},
    )
    keys = {ours: theirs for ours, theirs in KEYS.items() if ours not in OTHERS} | {
        "norm_eps": "norm_eps"
    }
    words = (ACT, TIED)
    derived = (Derived(_read_reach, _write_reach),)
    defaults: ClassVar[Json] = {
        "norm_eps": 1e-5, "local_attention": 128, "vocab_size": 50_368, "hidden_size": 768,
        "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12,
        "max_position_embeddings": 8192,
    }  # fmt: skip

    def usual(self, config: Json, architecture: str) -> Json:
        """Values that transformers fills in where config.json is silent."""
        return self.defaults

    def own_config(self, model: Any, config: Json) -> Json:
        """Biases, rotations by the reach of a layer, and ids that its class would fill in with
        those of the released models. Raises UserError for heads that it cannot have."""
        if model.num_kv_heads != model.num_heads:
            raise UserError(
                f"model.num_kv_heads: {model.num_kv_heads} differs from model.num_heads = "
                f"{model.num_heads}, which Hugging Face's ModernBERT cannot have; make them equal"
            )
        if model.head_dim * model.num_heads != model.embed_dim:
            raise UserError(
                f"model.head_dim: {model.head_dim} times {model.num_heads} heads is not "
                f"model.embed_dim = {model.embed_dim}, as in Hugging Face's ModernBERT; change it"
            )
        whole = config.pop("rope_parameters")
        theta = config.pop("rope_theta")
        local = rope_config(model.local_rope_theta, None, model.seq_len)["rope_parameters"]
        own: Json = {
            "rope_parameters": {TYPES["global"]: whole, TYPES["local"]: local},
            "global_rope_theta": theta,
            "local_rope_theta": model.local_rope_theta,
            "classifier_activation": "gelu",
        }
        own |= {theirs: ours in model.biases for ours, theirs in BIASES.items()}
        if config.pop("rope_scaling", None):  # the form before can say no scaling
            del own["global_rope_theta"], own["local_rope_theta"]
        ids = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")
        return own | dict.fromkeys(ids)

    def rope(self, config: Json, architecture: str, where: str) -> Json:
        """Fields of the rotations, by the reach of a layer."""
        rope = config.get("rope_parameters") or {}
        context = {"max_position_embeddings": config["max_position_embeddings"]}
        scaling = config.get("rope_scaling") or {}

        def side(reach: Reach, name: str, theta: float) -> Json:
            said = dict(rope.get(TYPES[reach]) or {}) | scaling
            said.setdefault("rope_theta", config.get(name) or theta)
            return rope_fields({**context, "rope_parameters": said}, where)

        whole = side("global", "global_rope_theta", 160_000.0)
        local = side("local", "local_rope_theta", 10_000.0)
        if local["rope_scaling"] is not None:
            raise UserError(f"{where}: rope scaling of sliding_attention layers is not supported")
        return {**whole, "local_rope_theta": local["rope_theta"]}

    def own_fields(self, config: Json, fields: Json, where: str) -> Json:
        """Heads, biases. Raises UserError for another activation of the head."""
        if (act := config.get("classifier_activation", "gelu")) != "gelu":
            raise UserError(f"{where}: classifier_activation {act!r} is not supported, only 'gelu'")
        heads = fields["num_heads"]
        usual = {"decoder_bias": True}
        return {
            "num_kv_heads": heads,
            "head_dim": fields["embed_dim"] // heads,
            "biases": [
                ours for ours, theirs in BIASES.items() if config.get(theirs, usual.get(theirs))
            ],
        }
