"""Granite 4, Granite 3 with experts, and Bamba in GGUF, as llama.cpp's converter writes them.

attention.head_count_kv     of each layer, 0 where Mamba-2 is in the place of attention
A_log [N], D [N]            [N, 1]; -e^A_log, the rate itself
mamba.norm [I]              [G, I / G], for G groups
conv1d [C, 1, K]            [C, K]
shared_mlp.input_linear     gate and up, apart

One without Mamba-2 and experts is a Granite 3 there. A Bamba has the same name and no multipliers.
Its pairs of rotated dims are those that llama.cpp rotates; its converter takes them from all dims.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from lmwright.core.contract import HfModel
from lmwright.core.param import Tree
from lmwright.errors import UserError
from lmwright.formats.gguf_apart import Apart, Cut
from lmwright.formats.gguf_lfm2 import HEADS
from lmwright.formats.hf_layout import slots
from lmwright.formats.safetensors import Tensors
from lmwright.models.granite import Granite
from lmwright.models.granite4 import Granite4, HybridGranite
from lmwright.models.hf.bamba import FULL
from lmwright.models.hf.granite4 import TYPES
from lmwright.models.mamba import MAMBA

MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
SHARED, ROTATES = "expert_shared_feed_forward_length", "rope.scaling.finetuned"
NAME = "granitehybrid"
MIXER = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
KEYS = MULTIPLIERS | MIXER | {SHARED: "shared_intermediate_size"}
INNER, PLAIN = "ssm.inner_size", "feed_forward_length"
SCALARS = (".mamba.A_log", ".mamba.D", ".mixer.A_log", ".mixer.D")  # the latter of Nemotron-H
NORM = (".mamba.norm.weight", ".mixer.norm.weight")


def is_bamba(meta: Mapping[str, Any], _: Collection[str]) -> bool:
    """True for a file of Granite 4's architecture without its multipliers."""
    return not any(f"{NAME}.{key}" in meta for key in MULTIPLIERS)


def metadata(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys below the architecture's name. Raises UserError for a model without attention, whose
    heads the file would not say."""
    if FULL in config:
        return _of_bamba(config, where)
    heads = config["num_key_value_heads"]
    if TYPES["full"] not in config["layer_types"]:
        raise UserError(
            f"{where}: GGUF's Granite 4 has attention in some layers, and here is none "
            "(model.mixer_pattern); export to a Hugging Face folder instead"
        )
    meta = {
        HEADS: [heads if kind == TYPES["full"] else 0 for kind in config["layer_types"]],
        INNER: config["mamba_n_heads"] * config["mamba_d_head"],
        ROTATES: config["position_embedding_type"] == "rope",
    }
    plain = not config["num_local_experts"]
    return meta | ({PLAIN: config["shared_intermediate_size"]} if plain else {})


def _of_bamba(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    heads, full, count = config["num_key_value_heads"], config[FULL], config["num_hidden_layers"]
    if not 0 < len(full) < count:
        raise UserError(
            f"{where}: GGUF's Bamba has attention in some layers and Mamba-2 in others, and here "
            f"{len(full)} of {count} have attention (model.mixer_pattern); export to a Hugging "
            "Face folder instead"
        )
    return {
        HEADS: [heads if i in full else 0 for i in range(count)],
        INNER: config["mamba_n_heads"] * config["mamba_d_head"],
        ROTATES: True,
    }


def config_of(meta: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Keys of config.json that other architectures do not have."""
    said = lambda key: meta.get(f"{name}.{key}")  # noqa: E731
    heads, inner, width = said(HEADS), said(INNER), said("embedding_length")
    expand = {"mamba_expand": inner // width} if inner and width else {}
    if is_bamba(meta, ()):
        layers = enumerate(heads if isinstance(heads, list) else ())
        return expand | {FULL: [i for i, each in layers if each]}
    config: dict[str, Any] = {"position_embedding_type": "rope" if said(ROTATES) else "nope"}
    if isinstance(heads, list):
        config["layer_types"] = [TYPES["full" if each else "mamba"] for each in heads]
    if said(SHARED) is None and said("expert_count") in (None, 0):
        config["shared_intermediate_size"] = said(PLAIN)
    return config | expand


def shape_in_file(name: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape in GGUF of a tensor of this one in Hugging Face's form."""
    if name.endswith(NORM):
        groups = config["mamba_n_groups" if "mamba_n_groups" in config else "n_groups"]
        return groups, shape[0] // groups
    return (*shape, 1) if name.endswith(SCALARS) else shape


def shape_of(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in Hugging Face's form of a tensor of this one in GGUF."""
    return (int(np.prod(shape)),) if name.endswith((*SCALARS, *NORM)) else shape


def cuts(config: Mapping[str, Any]) -> tuple[Cut, ...]:
    """Gate and up of the mlp, where there is one; what is behind them has another name where there
    are experts."""
    wide, width = config.get("shared_intermediate_size"), config["hidden_size"]
    if not wide:
        return ()
    stem = "block_sparse_moe.shared_experts" if config["num_local_experts"] else "mlp"
    gate, up, down = (f"{stem}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return (
        Cut(
            "shared_mlp.input_linear.weight", (gate, up), ((wide, width),) * 2,
            lambda whole: np.split(whole, 2), lambda *parts: np.concatenate(parts),
        ),
        Cut(
            "shared_mlp.output_linear.weight", (down,), ((width, wide),),
            lambda whole: (whole,), lambda whole: whole,
        ),
    )  # fmt: skip


class _OfGranite(Tensors):
    """Tensors by the names of a Granite 3."""

    def __init__(self, model: Granite, tensors: Mapping[str, np.ndarray], cuts: tuple[Cut, ...]):
        self._apart = Apart(tensors, cuts)
        super().__init__({slot.name: None for slot in slots(model)})

    def __getitem__(self, name: str) -> np.ndarray:
        return self._apart[name]


def as_granite(
    model: HfModel, tensors: Mapping[str, np.ndarray], load: Callable[[], Tree]
) -> tuple[HfModel, Mapping[str, np.ndarray], Callable[[], Tree]]:
    """A model, its tensors and the function that loads its weights, those of a Granite 4 without
    Mamba-2 as a Granite 3. Raises UserError for one that no Granite 3 is."""
    if not isinstance(model, HybridGranite) or MAMBA in model.kinds:
        return model, tensors, load
    if not isinstance(model, Granite4) or model.rotation != "rope":
        raise UserError(
            f"model.mixer_pattern: llama.cpp computes a {model.kind!r} without Mamba-2 only where "
            "it rotates, and has no experts; export to a Hugging Face folder instead"
        )
    known = {field.name for field in fields(model)} - {"kind"}
    same = {
        field.name: getattr(model, field.name) for field in fields(Granite) if field.name in known
    }
    plain = Granite(**same)
    return plain, _OfGranite(plain, tensors, cuts(model.hf.config(model))), lambda: _plain(load())


def _plain(w: Tree) -> Tree:
    """The weights with gate and up of each mlp apart."""
    found = {name: _plain(leaf) if isinstance(leaf, dict) else leaf for name, leaf in w.items()}
    if (both := found.pop("gate_up", None)) is not None:  # [L, D, 2, F]
        found |= {"gate": both[..., 0, :], "up": both[..., 1, :]}
    return found
