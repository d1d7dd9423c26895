"""PEFT's folder: adapter_config.json and adapter_model.safetensors, and nothing that runs code.

base_model.model.<module>.lora_A.weight             [R, inputs]
base_model.model.<module>.lora_B.weight             [outputs, R]
base_model.model.<module>.lora_magnitude_vector     [outputs], DoRA
base_model.model.<module>.lora_embedding_A, _B      of a table, [R, vocab] and [embed, R]
base_model.model.<module>.base_layer.weight         of a table or head, in place of the base's own
base_model.model.<module>.weight, .bias             of modules_to_save: trained whole
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lmwright.data.json_text import write_json
from lmwright.errors import UserError
from lmwright.formats import peft_experts
from lmwright.formats.peft_config import patterned, read_config, start_of

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
KINDS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "base_layer.weight": "whole",
    "weight": "whole",
}
FLOATS = ("float16", "bfloat16", "float32", "float64")
VOCABULARY = ("lm_head", "embed_tokens", "embed_in", "decoder")
"""Modules whose whole weight PEFT may keep beside the factors."""
COPIES = (".modules_to_save.", ".original_module.")
"""In names of the same weight once more, and of the base's, which PEFT writes of tables and heads
in modules_to_save where tokens were added, and does not read."""


@dataclass(frozen=True)
class PeftModule:
    """One module's factors in PEFT's layout, float32 on the host."""

    a: np.ndarray
    """Factor A, [R, inputs]."""
    b: np.ndarray
    """Factor B, [outputs, R]."""
    scale: float
    magnitude: np.ndarray | None = None
    is_table: bool = False

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def delta(self) -> np.ndarray:
        """Update that the adapter adds to the weight, [outputs, inputs]."""
        return self.scale * (self.b @ self.a)


@dataclass(frozen=True)
class PeftFolder:
    """An adapter as PEFT keeps it: its config, and its modules by name."""

    config: dict[str, Any]
    modules: dict[str, PeftModule]
    whole: dict[str, np.ndarray] = field(default_factory=dict)
    """Weights of the base, [outputs, inputs], that PEFT loads in place of the base's own."""
    saved: dict[str, np.ndarray] = field(default_factory=dict)
    """Weights of modules_to_save, by their whole names: trained with the factors."""
    stacked: str | None = None
    """Order of gate and up where the factors of a layer's experts are in the tensors of all: in
    "turns" or "halves", or "plain" without a gate."""
    start: str | None = None
    """"pissa" or "olora" where the product that the factors began with is still to be taken
    out of the base: `formats.peft_start`."""


def read_folder(folder: str | Path, turns: bool | None = None) -> PeftFolder:
    """Reads an adapter. Where it has factors for the tensor of all gates and ups of a layer,
    `turns` tells whether their rows are in turn, as in gpt-oss; by default their name does.

    Raises UserError for a folder that is none, is damaged, or uses a feature that is not plain
    LoRA, rsLoRA or DoRA."""
    folder = Path(folder)
    config = read_config(folder / CONFIG)
    path = folder / TENSORS
    parts, tables, saved = _tensors(path, config.get("modules_to_save") or [])
    whole = {name: part.pop("whole") for name, part in parts.items() if "whole" in part}
    modules = {name: part for name, part in parts.items() if part}
    targets = config.get("target_parameters") or []
    modules = peft_experts.named(modules, targets, str(path))
    keys = {name: _key(name, targets) for name in modules}
    ranks, scales = _ranks_and_scales(config, keys, str(folder / CONFIG))
    start = start_of(config, str(folder / CONFIG))
    factors = {}
    for name, part in modules.items():
        if targets and peft_experts.is_stacked(name):
            in_turn = peft_experts.in_turn(name) if turns is None else turns
            for own, a, b in peft_experts.of_each(name, part, ranks[name], str(path), in_turn):
                factors[own] = PeftModule(a, b, scales[name])
            continue
        _check(part, name, path, bool(config.get("use_dora")))
        if name in tables and "magnitude" in part:
            raise UserError(f"{path}: DoRA of {name}, a table, is not supported; merge with PEFT")
        rank = len(part["a"])
        if keys[name] != name and peft_experts.EXPERT.fullmatch(name):
            if part["a"].any() or part["b"].any():  # no stand-in for a part without factors
                factors[name] = PeftModule(part["a"], part["b"], scales[name])
            continue
        # an SVD or QR has no more directions than the matrix has rows or columns
        most = min(part["a"].shape[1], len(part["b"])) if start else ranks[name]
        if rank != min(ranks[name], most):
            raise UserError(
                f"{path}: {name} has rank {rank} and {CONFIG} says {ranks[name]}; save it again"
            )
        factors[name] = PeftModule(
            part["a"], part["b"], scales[name], part.get("magnitude"), name in tables
        )
    if not factors:
        raise UserError(f"{path}: holds no LoRA factors")
    stacks = [name for name in modules if peft_experts.is_stacked(name)]
    ordered = any(map(peft_experts.in_turn, stacks)) if turns is None else turns
    stacked = ("turns" if ordered else "halves") if stacks else None
    if any(name.endswith(f".{peft_experts.UP}") for name in stacks):
        stacked = "plain"
    return PeftFolder(config, factors, whole, saved, stacked, start)


def _key(name: str, targets: Sequence[str]) -> str:
    """The name that patterns of ranks match: of a module, or of its parameter that is a target."""
    parameter = peft_experts.parameter_of(name)
    is_target = any(f".{parameter}".endswith(f".{target}") for target in targets)
    return parameter if is_target else name


def _tensors(
    path: Path, modules: Sequence[str]
) -> tuple[dict[str, dict[str, np.ndarray]], set[str], dict[str, np.ndarray]]:
    """Module name to its arrays by kind, which modules are tables, and the weights of `modules`
    that are saved whole."""
    parts: dict[str, dict[str, np.ndarray]] = {}
    tables, saved = set(), {}
    try:
        with safe_open(path, framework="np") as file:
            keys = set(file.keys())
            for key in sorted(keys):
                if any(copy in key and key.replace(copy, ".") in keys for copy in COPIES):
                    continue
                array = file.get_tensor(key)
                if _is_saved(key, modules) and array.dtype.name in FLOATS:
                    saved[key.removeprefix(PREFIX)] = array.astype(np.float32)
                    continue
                module, kind = _split(key, path)
                if array.dtype.name not in FLOATS or kind in parts.get(module, {}):
                    raise UserError(
                        f"{path}: {key} is {array.dtype}, or occurs twice; save it again"
                    )
                parts.setdefault(module, {})[kind] = array.astype(np.float32)
                tables |= {module} if "lora_embedding" in key else set()
    except FileNotFoundError:
        raise UserError(
            f"{path}: missing; point at a folder that PEFT saved as safetensors"
        ) from None
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged ({error}); download it again") from None
    return parts, tables, saved


def _is_saved(key: str, modules: Sequence[str]) -> bool:
    """True for a weight within a module whose name ends with one of these, as PEFT looks."""
    above = accumulate(key.split(".")[:-1], "{}.{}".format)
    return ".lora_" not in key and any(name.endswith(tuple(modules)) for name in above)


def _check(part: Mapping[str, np.ndarray], name: str, path: Path, dora: bool) -> None:
    a, b, magnitude = (part.get(kind) for kind in ("a", "b", "magnitude"))
    if a is None or b is None or a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
        raise UserError(f"{path}: {name} lacks a factor or its ranks differ; save it again")
    if (magnitude is not None) != dora:
        raise UserError(
            f"{path}: {name} has {'no' if dora else 'a'} magnitude and {CONFIG} says use_dora = "
            f"{str(dora).lower()}; save it again"
        )
    if magnitude is not None and magnitude.size != len(b):
        raise UserError(f"{path}: the magnitude of {name} has another size; save it again")


def _split(key: str, path: Path) -> tuple[str, str]:
    for ending, kind in KINDS.items():
        if key.endswith(f".{ending}"):
            module = key.removesuffix(f".{ending}").removeprefix(PREFIX)
            if kind != "whole" or module.rpartition(".")[2] in VOCABULARY:
                return module, kind
    raise UserError(f"{path}: {key} is not a LoRA factor; only plain LoRA and DoRA are supported")


def _ranks_and_scales(
    config: Mapping[str, Any], keys: Mapping[str, str], where: str
) -> tuple[dict[str, int], dict[str, float]]:
    """Rank and scale of each module, of which patterns match `keys`: alpha over the rank, or over
    its root."""
    names = list(dict.fromkeys(keys.values()))
    ranks = dict.fromkeys(names, config.get("r", 8))
    ranks |= patterned(config.get("rank_pattern"), names, where)
    alphas = dict.fromkeys(names, config.get("lora_alpha", 8))
    alphas |= patterned(config.get("alpha_pattern"), names, where)
    over = {name: rank**0.5 if config.get("use_rslora") else rank for name, rank in ranks.items()}
    scales = {name: float(alphas[key]) / over[key] for name, key in keys.items()}
    return {name: ranks[key] for name, key in keys.items()}, scales


def write_folder(folder: Path, adapter: PeftFolder) -> None:
    """Writes both files into an existing folder."""
    tensors = {}
    experts = {}
    if adapter.stacked:
        experts = peft_experts.stacked(adapter.modules, adapter.stacked)
    for name, (a, b) in experts.items():
        stem = f"{PREFIX}{peft_experts.keys_of(name, experts)}."
        tensors |= {f"{stem}lora_A.weight": a, f"{stem}lora_B.weight": b}
    for name, module in adapter.modules.items():
        if experts and peft_experts.OWN.fullmatch(f"{name}.weight"):
            continue
        stem = f"{PREFIX}{name}."
        first, second = ("lora_A.weight", "lora_B.weight")
        if module.is_table:
            first, second = ("lora_embedding_A", "lora_embedding_B")
        tensors[stem + first] = np.ascontiguousarray(module.a, np.float32)
        tensors[stem + second] = np.ascontiguousarray(module.b, np.float32)
        if module.magnitude is not None:
            tensors[stem + "lora_magnitude_vector"] = np.ascontiguousarray(module.magnitude)
    for name, weight in adapter.whole.items():
        ending = "base_layer.weight" if name in adapter.modules else "weight"
        tensors[f"{PREFIX}{name}.{ending}"] = np.ascontiguousarray(weight, np.float32)
    tensors |= {PREFIX + name: np.ascontiguousarray(a) for name, a in adapter.saved.items()}
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    write_json(folder / CONFIG, adapter.config)


def make_config(
    modules: Mapping[str, PeftModule], base: str, alphas: Mapping[str, float], **fields: Any
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
        **fields,
    }
