"""Recipes: everything about a run but its name, its folders and its text.

A function returns a part of a run as nested dicts; a run file that names it says the rest,
and may change any of it.
"""

from typing import Any


def quickstart() -> dict[str, Any]:
    """A 5 M model that learns something in a few minutes on two cores."""
    return {
        "model": {"preset": "llama-5m"},
        "objective": {"kind": "clm"},
        "optim": {
            "kind": "adamw",
            "learning_rate": 2e-3,
            "schedule": {"kind": "cosine", "warmup_steps": 30},
        },
        "data": {
            "tokenizer": {"train": "bpe", "vocab_size": 8192},
            "pack": {"method": "chunk", "seq_len": 256},
        },
        "train": {"steps": 240, "global_batch_size": 16, "precision": "fp32"},
        "eval": {"every_steps": 80, "max_rows": 128},
        "checkpoint": {"save_every_steps": 50},
    }


def pretrain() -> dict[str, Any]:
    """Causal pretraining by common practice: AdamW, cosine with warm-up, z-loss; the model,
    the data and the length are the run file's."""
    return {
        "objective": {"kind": "clm", "z_loss": 1e-4},
        "optim": {
            "kind": "adamw",
            "learning_rate": 6e-4,
            "beta2": 0.95,
            "weight_decay": 0.1,
            "clip_norm": 1.0,
            "schedule": {"kind": "cosine", "warmup_steps": 500, "floor_fraction": 0.1},
        },
        "data": {
            "holdout_fraction": 0.005,
            "normalize": {"dedup": "exact"},
            "pack": {"method": "best-fit"},
        },
        "train": {"precision": "bf16", "remat": "block"},
        "eval": {"every_steps": 500},
        "checkpoint": {"save_every_steps": 500},
    }
