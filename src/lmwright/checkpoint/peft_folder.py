"""PEFT's folder: adapter_config.json and adapter_model.safetensors, and nothing that runs code.

base_model.model.<module>.lora_A.weight             [R, inputs]
base_model.model.<module>.lora_B.weight             [outputs, R]
base_model.model.<module>.lora_magnitude_vector     [outputs], DoRA
base_model.model.<module>.lora_embedding_A, _B      of a table, [R, vocab] and [embed, R]
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lmwright.errors import UserError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
KINDS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
# features of PEFT that compute something else than base + scale * B A
UNKNOWN = {
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False),
    "arrow_config": (None,),
    "velora_config": (None,),
}


@dataclass(frozen=True)
class PeftModule:
    """One module's factors in PEFT's layout, float32 on the host."""

    a: np.ndarray
    """[R, inputs]"""
    b: np.ndarray
    """[outputs, R]"""
    scale: float
    magnitude: np.ndarray | None = None
    is_table: bool = False

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def delta(self) -> np.ndarray:
        """What it adds to the weight, [outputs, inputs]."""
        return self.scale * (self.b @ self.a)


@dataclass(frozen=True)
class PeftFolder:
    """An adapter as PEFT keeps it: its config, and its modules by name."""

    config: dict[str, Any]
    modules: dict[str, PeftModule]


def read_folder(folder: str | Path) -> PeftFolder:
    """Reads an adapter. Raises UserError for a folder that is none, is damaged, or uses a
    feature that is not plain LoRA, rsLoRA or DoRA."""
    folder = Path(folder)
    config = _config(folder / CONFIG)
    path = folder / TENSORS
    parts: dict[str, dict[str, np.ndarray]] = {}
    tables = set()
    try:
        with safe_open(path, framework="np") as file:
            for key in file.keys():
                module, kind = _split(key, path)
                parts.setdefault(module, {})[kind] = file.get_tensor(key).astype(np.float32)
                tables |= {module} if "lora_embedding" in key else set()
    except FileNotFoundError:
        raise UserError(
            f"{path}: missing; point at a folder that PEFT saved as safetensors"
        ) from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: damaged ({error}); download it again") from None
    modules = {}
    for name, part in parts.items():
        if not {"a", "b"} <= part.keys() or part["a"].shape[0] != part["b"].shape[1]:
            raise UserError(f"{path}: {name} lacks a factor or its ranks differ; save it again")
        scale = _scale(config, name, part["a"].shape[0])
        modules[name] = PeftModule(
            part["a"], part["b"], scale, part.get("magnitude"), name in tables
        )
    if not modules:
        raise UserError(f"{path}: holds no LoRA factors")
    return PeftFolder(config, modules)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: missing; point at a PEFT adapter folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); download it again") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise UserError(f"{path}: is not the config of a LoRA adapter")
    for name, plain in UNKNOWN.items():
        if config.get(name) not in plain:
            raise UserError(f"{path}: {name} = {config[name]!r} is not supported")
    return config


def _split(key: str, path: Path) -> tuple[str, str]:
    for ending, kind in KINDS.items():
        if key.endswith(f".{ending}"):
            return key.removesuffix(f".{ending}").removeprefix(PREFIX), kind
    raise UserError(f"{path}: {key} is no factor of LoRA; only plain LoRA and DoRA are read")


def _scale(config: Mapping[str, Any], name: str, rank: int) -> float:
    """Alpha over the rank, or over its root, with PEFT's patterns for single modules."""
    rank = _pattern(config.get("rank_pattern"), name, rank)
    alpha = _pattern(config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _pattern(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def write_folder(folder: Path, adapter: PeftFolder) -> None:
    """Writes both files into an existing folder."""
    tensors = {}
    for name, module in adapter.modules.items():
        stem = f"{PREFIX}{name}."
        first, second = ("lora_A.weight", "lora_B.weight")
        if module.is_table:
            first, second = ("lora_embedding_A", "lora_embedding_B")
        tensors[stem + first] = np.ascontiguousarray(module.a, np.float32)
        tensors[stem + second] = np.ascontiguousarray(module.b, np.float32)
        if module.magnitude is not None:
            tensors[stem + "lora_magnitude_vector"] = np.ascontiguousarray(module.magnitude)
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(adapter.config, indent=2) + "\n", encoding="utf-8")


def make_config(
    modules: Mapping[str, PeftModule], base: str, alphas: Mapping[str, float], **said: Any
) -> dict[str, Any]:
    """adapter_config.json of modules; the most common rank and alpha stand for all, patterns
    name the others."""
    ranks = {name: module.rank for name, module in modules.items()}
    rank, alpha = (max(set(d.values()), key=list(d.values()).count) for d in (ranks, alphas))
    targets = sorted({".".join(name.split(".")[-1:]) for name in modules})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": targets,
        "rank_pattern": {re.escape(n): r for n, r in ranks.items() if r != rank},
        "alpha_pattern": {re.escape(n): a for n, a in alphas.items() if a != alpha},
        "use_rslora": False,
        "use_dora": any(module.magnitude is not None for module in modules.values()),
        **said,
    }
