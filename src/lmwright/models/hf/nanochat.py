"""nanochat in Hugging Face."""

from dataclasses import replace
from typing import ClassVar

from lmwright.models.hf.pairs import BIAS, HEAD, NO_IDS, PLAIN_ACT
from lmwright.models.hf.rope import ROPE
from lmwright.models.hf.table import WEIGHTS, Table

MLP = {"up": "fc1", "down": "fc2"}


class NanoChatHf(Table):
    """Both directions of the family's Hugging Face form."""

    name = "nanochat"
    model_types: ClassVar = {"NanoChatForCausalLM": "nanochat"}
    weights = {n: theirs for n, theirs in WEIGHTS.items() if "norm" not in n} | {
        f"layers.{ours}": f"model.layers.{{i}}.mlp.{theirs}.weight" for ours, theirs in MLP.items()
    }
    optional: ClassVar = {"logits_soft_cap": "final_logit_softcapping"}
    pairs = (replace(PLAIN_ACT, usual="relu2"), HEAD, BIAS, ROPE, NO_IDS)
    defaults: ClassVar = {
        "vocab_size": 50_304, "hidden_size": 768, "intermediate_size": 8192,
        "num_hidden_layers": 12, "num_attention_heads": 6, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "final_logit_softcapping": 15.0,
    }  # fmt: skip
