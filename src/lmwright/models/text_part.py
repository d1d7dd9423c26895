"""Checkpoints that hold more than the model that is read, or name its weights in another way.

config.json                  language_model.model.layers... --> model.layers...
  text_config --> config     vision_tower...                --> not taken, and counted
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from lmwright.errors import UserError
from lmwright.models.hf.remote import without_remote_code

POSITIONS = "deberta.embeddings.position_"
MASK_DECODER = "mask_decoder"
"""Key in the config.json of a model with one, of which transformers makes another model."""


@dataclass(frozen=True)
class TextPart:
    """Location of the text model in one architecture of Hugging Face."""

    architecture: str
    """Architecture of the text model alone."""
    prefixes: Mapping[str, str]
    """Beginnings of the names of its tensors, and what they are in the text model alone."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of the names of all other tensors, and what those belong to."""
    inner: Mapping[str, str] = field(default_factory=dict)
    """Parts of names behind those beginnings, and what they are in the text model alone."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of the names of its modules in transformers' class of the whole, by what they are
    in the text model alone."""
    by_type: Mapping[str, str] = field(default_factory=dict)
    """Architectures of other text models that stand there, by their `model_type`."""

    @property
    def architectures(self) -> tuple[str, ...]:
        """Architecture of each text model that may stand there."""
        return self.architecture, *self.by_type.values()


GEMMA4 = "Gemma4ForCausalLM"
SHARED_LAYERS = "num_kv_shared_layers"
"""Key for the last layers of a Gemma 4, which have no keys and values of their own."""
FURTHER_LAYER = "layer that predicts a further token"
FURTHER = {"mtp.": FURTHER_LAYER}
BEHIND = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
"""Classes whose layers that predict a further token stand behind the others."""
TEXT_PARTS = MappingProxyType(
    {
        **{
            f"Qwen3_5{kind}ForConditionalGeneration": TextPart(
                f"Qwen3_5{kind}ForCausalLM",
                {"model.language_model.": "model.", "lm_head.": "lm_head."},
                {"model.visual.": "vision tower", **FURTHER},
                modules={"model.": "model.language_model."},
            )
            for kind in ("", "Moe")
        },
        **{
            f"{name}ForConditionalGeneration": TextPart(
                GEMMA4,
                {"model.language_model.": "model.", "lm_head.": "lm_head."},
                {
                    "model.vision_tower.": "vision tower",
                    "model.vision_embedder.": "embedding of images",
                    "model.embed_vision.": "projector of images",
                    "model.audio_tower.": "audio tower",
                    "model.embed_audio.": "projector of sounds",
                },
                modules={"model.": "model.language_model."},
            )
            for name in ("Gemma4", "Gemma4Unified")
        },
        **{
            whole: TextPart(
                text,
                # the second forms are those within transformers, which some tools write
                {"language_model.": "", "model.language_model.": "model.", "lm_head.": "lm_head."},
                {
                    "vision_tower.": "vision tower",
                    "model.vision_tower.": "vision tower",
                    "multi_modal_projector.": "projector of the vision tower",
                    "model.multi_modal_projector.": "projector of the vision tower",
                },
                modules={"model.": "model.language_model."},
                by_type=others,
            )
            for whole, text, others in (
                ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM", {}),
                (
                    "Mistral3ForConditionalGeneration",
                    "MistralForCausalLM",
                    {"ministral3": "Ministral3ForCausalLM", "mistral4": "Mistral4ForCausalLM"},
                ),
                ("Lfm2VlForConditionalGeneration", "Lfm2ForCausalLM", {}),
            )
        },
        "Llama4ForConditionalGeneration": TextPart(
            "Llama4ForCausalLM",
            {"language_model.": ""},
            {
                "vision_model.": "vision tower",
                "multi_modal_projector.": "projector of the vision tower",
            },
            modules={"model.": "language_model.model."},
        ),
    }
)

OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
BERTS = {"Bert": "bert", "Roberta": "roberta", "XLMRoberta": "roberta"}
"""Beginnings of the names of classes, and of the tensors in them."""


def _berts() -> dict[str, TextPart]:
    """Classes of BERT's families: norms as they were first named, and what no class reads or all
    but one leave out."""
    parts: dict[str, TextPart] = {}
    for name, body in BERTS.items():
        for use in USES:
            cls = f"{name}{use}"
            inside = "" if use == "Model" else f"{body}."
            others = {f"{inside}embeddings.position_ids": "numbers of positions"}
            if cls != "BertForSequenceClassification":  # whose head it is
                others[f"{inside}pooler."] = "pooler"
            if use == "ForMaskedLM":
                others["cls.seq_relationship."] = "head over pairs of sentences"
            parts[cls] = TextPart(cls, {"": ""}, others, inner=OLD_NORMS)
    return parts


USES = (
    "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification",
    "ForQuestionAnswering",
)  # fmt: skip
OTHER_NAMES = MappingProxyType(
    {
        **_berts(),
        **{name: TextPart(name, {"": ""}) for name in (GEMMA4, *BEHIND)},
        **{
            name: TextPart(name, {"": ""}, FURTHER)
            for name in (
                "Qwen3_5ForCausalLM",
                "Qwen3_5MoeForCausalLM",
                "Qwen3NextForCausalLM",
                "NemotronHForCausalLM",
                "MellumForCausalLM",
                "ExaoneMoeForCausalLM",
            )
        },
        "Ernie4_5_MoeForCausalLM": TextPart(
            "Ernie4_5_MoeForCausalLM", {"": ""}, {"model.mtp_": FURTHER_LAYER, **FURTHER}
        ),
        "DebertaV2ForMaskedLM": TextPart(
            "DebertaV2ForMaskedLM",
            # those of `legacy` true
            {
                "cls.predictions.transform.": "lm_predictions.lm_head.",
                "cls.predictions.bias": "lm_predictions.lm_head.bias",
            },
            {
                "cls.predictions.decoder.": "copy of the embedding in the head",
                "mask_predictions.": "head of the discriminator",
                POSITIONS: "positions of the generator",
            },
        ),
        "LLaDAModelLM": TextPart(
            "EuroBertForMaskedLM",
            {
                "model.transformer.wte.": "model.embed_tokens.",
                "model.transformer.ln_f.": "model.norm.",
                "model.transformer.ff_out.": "lm_head.",
                "model.transformer.blocks.": "model.layers.",
            },
            inner={
                ".attn_norm.": ".input_layernorm.",
                ".ff_norm.": ".post_attention_layernorm.",
                ".q_proj.": ".self_attn.q_proj.",
                ".k_proj.": ".self_attn.k_proj.",
                ".v_proj.": ".self_attn.v_proj.",
                ".attn_out.": ".self_attn.o_proj.",
                ".ff_proj.": ".mlp.gate_proj.",
                ".up_proj.": ".mlp.up_proj.",
                ".ff_out.": ".mlp.down_proj.",
            },
        ),
    }
)
"""Checkpoints of the model alone."""

NONE = "?"


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first of the architectures that a config.json names; NONE where it names none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else NONE


def text_part_of(config: Mapping[str, Any]) -> TextPart | None:
    """Location of a config.json's model among the tensors; None if these have its own names
    alone."""
    name = architecture_of(config)
    part = TEXT_PARTS.get(name) or OTHER_NAMES.get(name)
    if part and MASK_DECODER in config:
        return replace(part, others={k: v for k, v in part.others.items() if k != POSITIONS})
    if part and part.architecture == GEMMA4:
        return replace(part, others={**part.others, **_unused_heads(config, part)})
    if part and part.architecture in BEHIND:
        return replace(part, others=_further_layers(config))
    return part


def _further_layers(config: Mapping[str, Any]) -> dict[str, str]:
    """Beginnings of the names in layers that predict a further token."""
    layers, further = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if not (isinstance(layers, int) and isinstance(further, int) and 0 < further < 100):
        return {}
    return {f"model.layers.{layers + i}.": FURTHER_LAYER for i in range(further)}


def _unused_heads(config: Mapping[str, Any], part: TextPart) -> dict[str, str]:
    """Beginnings of the names of keys and values in layers that share those of others, which
    released files hold all the same."""
    text = config.get("text_config", config)
    layers, shared = text.get("num_hidden_layers"), text.get(SHARED_LAYERS)
    if not (isinstance(layers, int) and isinstance(shared, int) and 0 < shared <= layers < 1000):
        return {}
    inside = next(before for before, after in part.prefixes.items() if after in ("model.", ""))
    inside = inside or "model."
    heads = ("k_proj", "v_proj", "k_norm", "v_norm")
    return {
        f"{inside}layers.{i}.self_attn.{head}.": "unused keys and values of shared layers"
        for i in range(layers - shared, layers)
        for head in heads
    }


def text_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """config.json of the text model alone. Raises UserError where it ought to be there and is
    not."""
    if (part := TEXT_PARTS.get(architecture_of(config))) is None:
        return without_remote_code(config, where)
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        raise UserError(
            f"{where}: {architecture_of(config)} without a text_config; download config.json again"
        )
    outer = ("quantization_config", "tie_word_embeddings")
    own = {name: config[name] for name in outer if name in config}
    architecture = part.by_type.get(str(inner.get("model_type")), part.architecture)
    return {**inner, **own, "architectures": [architecture]}
