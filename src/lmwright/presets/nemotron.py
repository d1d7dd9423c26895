"""Presets of Nemotron-H, each of whose layers is Mamba-2, attention, an mlp or experts alone."""

from typing import Any

from lmwright.presets.rows import Shape, row, sizes

NANO = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
"""Layers of Nemotron Nano 9B v2: Mamba-2 (M), attention (*) and mlps (-)."""
NANO_3 = f"{'MEMEM*E' * 5}MEMEMEM*EMEMEMEME"
"""Layers of Nemotron 3 Nano; mixtures of experts are E."""
SUPER_3 = f"MEMEMEM*{'EMEMEMEM*' * 2}{'EMEMEMEMEM*' * 4}EMEMEMEM*EMEMEMEME"
"""Layers of Nemotron 3 Super."""


def _nemotron_h(shape: Shape, layers: str, **fields: Any) -> Any:
    from lmwright.models.hf.window import pattern_of
    from lmwright.models.nemotron_h import LETTERS, NemotronH, NemotronHMoe

    usual = sizes(shape) | {"vocab_size": 131_072, "head_dim": 128, "seq_len": 131_072}
    pattern = tuple(pattern_of([LETTERS[each] for each in layers]))
    family = NemotronHMoe if "experts" in fields else NemotronH
    return family(**(usual | fields), mixer_pattern=pattern)


def _nemotron3(shape: Shape, layers: str, mamba_num_heads: int, **experts: Any) -> Any:
    from lmwright.models.experts import Experts

    usual = {"mlp_dim": shape[1], "shared_dim": 2 * shape[1], "score": "sigmoid",
             "bias_rate": 0.001}  # fmt: skip
    return _nemotron_h(
        shape, layers, experts=Experts(**(usual | experts)), mamba_num_heads=mamba_num_heads,
        seq_len=262_144,
    )  # fmt: skip


PRESETS = {
    "nemotron-nano-9b-v2": row(
        "8.89 B: NVIDIA Nemotron Nano 9B v2 (https://arxiv.org/abs/2508.14444)", _nemotron_h,
        (4480, 15_680, 56, 40, 8), layers=NANO, mamba_head_dim=80),
    "nemotron-3-nano-30b-a3b": row(
        "31.6 B, 3.58 B active: NVIDIA Nemotron 3 Nano (https://arxiv.org/abs/2512.20848)",
        _nemotron3, (2688, 1856, 52, 32, 2), NANO_3, 64,
        num_experts=128, experts_per_token=6, scale=2.5),
    "nemotron-3-super-120b-a12b": row(
        "121 B, 12.8 B active: NVIDIA Nemotron 3 Super "
        "(https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16)",
        _nemotron3, (4096, 2688, 88, 32, 2), SUPER_3, 128,
        num_experts=512, experts_per_token=22, scale=5.0, latent_dim=1024),
}  # fmt: skip
