"""FANformer as a folder of lmwright's own: no class of transformers computes its layers."""

from typing import ClassVar

from lmwright.models.hf.table import KEYS, WEIGHTS, Table


class FanformerHf(Table):
    """Both directions of a folder that lmwright alone reads, laid out as those of Hugging Face."""

    name = "FANformer"
    model_types: ClassVar = {"FanformerForCausalLM": "fanformer"}
    weights = WEIGHTS | {
        "layers.fan": "model.layers.{i}.self_attn.fan.weight",
        "layers.fan_bias": "model.layers.{i}.self_attn.fan.bias",
    }
    keys = KEYS | {"periodic_fraction": "periodic_fraction"}
    defaults: ClassVar = {"rms_norm_eps": 1e-6, "periodic_fraction": 0.125}
