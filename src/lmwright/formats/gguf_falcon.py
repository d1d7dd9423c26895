"""Falcon-H1 in GGUF, as llama.cpp's convert_hf_to_gguf.py writes it: the multipliers are in the
weights, so that what is read has none.

q_proj, v_proj       times attention_in, k_proj times key, too
in_proj              times ssm_in, and rows of each of its five parts times ssm_multipliers
pre_ff_layernorm     ffn_norm, whose name has no ending
A_log, D, norm, ...  as Granite 4's (`gguf_mamba`)
output               apart from token_embd where their multipliers differ, also in a tied model
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lmwright.core.contract import HfModel
from lmwright.formats.safetensors import Tensors, described
from lmwright.models.falcon_h1 import FalconH1
from lmwright.models.hf.falcon_h1 import LISTS, NUMBERS

NAME = "falcon-h1"
KEYS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.inner_size": "mamba_d_ssm",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
FIXED = {"hidden_act": "silu", "mamba_norm_before_gate": False}
NORM = "blk.0.ssm_norm.weight"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NONE: dict[str, Any] = dict.fromkeys(NUMBERS, 1.0) | {
    name: (1.0,) * count for name, count in LISTS.items()
}
"""Multipliers of a model that has none."""


def config_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Keys of config.json that the metadata do not have."""
    return {"mamba_rms_norm": NORM in shapes, "mamba_d_head": "auto"}


def has_multipliers(model: HfModel) -> bool:
    """True for a Falcon-H1 that GGUF cannot hold as it is."""
    return isinstance(model, FalconH1) and replace(model, **NONE) != model


def folded(
    model: HfModel, tensors: Mapping[str, np.ndarray]
) -> tuple[HfModel, Mapping[str, np.ndarray]]:
    """A model and its tensors, those of a Falcon-H1 with the multipliers in the weights."""
    if not isinstance(model, FalconH1) or not has_multipliers(model):
        return model, tensors
    own_head = model.embedding_multiplier != model.lm_head_multiplier
    plain = replace(model, **NONE, head="untied" if own_head else model.head)
    return plain, _Folded(model, plain, tensors)


def _factors(model: FalconH1) -> dict[str, float | np.ndarray]:
    """The factor of each tensor that has one, or those of its rows, by the end of its name."""
    into, (gate, down) = model.attention_in_multiplier, model.mlp_multipliers
    of_groups = model.written_dim // 2
    rows = (model.inner_dim, model.inner_dim, of_groups, of_groups, model.mamba_num_heads)
    return {
        EMBED: model.embedding_multiplier,
        HEAD: model.lm_head_multiplier,
        ".q_proj.weight": into,
        ".k_proj.weight": into * model.key_multiplier,
        ".v_proj.weight": into,
        ".o_proj.weight": model.attention_out_multiplier,
        ".in_proj.weight": model.ssm_in_multiplier
        * np.repeat(model.ssm_multipliers, rows)[:, None],
        ".out_proj.weight": model.ssm_out_multiplier,
        ".gate_proj.weight": gate,
        ".down_proj.weight": down,
    }


class _Folded(Tensors):
    """Tensors with the multipliers of a model in them."""

    def __init__(self, model: FalconH1, plain: Any, stored: Mapping[str, np.ndarray]):
        self._stored, self._factors = stored, _factors(model)
        self.file = getattr(stored, "file", None)  # of GGUF
        self._tied = model.head == "tied"
        super().__init__([*stored, *([HEAD] if plain.head != model.head else [])])

    def _factor(self, name: str) -> float | np.ndarray | None:
        return next((f for end, f in self._factors.items() if name.endswith(end)), None)

    def described(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype, shape)."""
        there = EMBED if self._tied and name == HEAD else name
        dtype, shape = described(self._stored, there)
        return dtype if self._factor(name) is None else "float32", shape

    def __getitem__(self, name: str) -> np.ndarray:
        array, factor = (
            self._stored[EMBED if self._tied and name == HEAD else name], self._factor(name)
        )  # fmt: skip
        if factor is None:
            return array
        return (np.asarray(array).astype(np.float64) * factor).astype(np.float32)
