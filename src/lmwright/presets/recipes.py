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
        "train": {"steps": 200, "global_batch_size": 16, "precision": "fp32"},
        "eval": {"every_steps": 100, "max_rows": 128},
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
        "train": {"precision": "bf16", "remat": "auto_block"},
        "eval": {"every_steps": 500},
        "checkpoint": {"save_every_steps": 500},
    }


def pretrain_xlstm() -> dict[str, Any]:
    """Causal pretraining of xLSTM with the rate of the 7B (https://arxiv.org/abs/2503.13427),
    4e-4; 1.3B had 7e-4, the smallest 1e-3. It falls exponentially to a tenth and then linearly to
    zero, there in 500,000 steps of 4.2 M tokens. The model, the data and the length are the run
    file's."""
    run = pretrain()
    run["objective"] = {"kind": "clm"}
    run["optim"] |= {
        "learning_rate": 4e-4, "clip_norm": 0.5,
        "schedule": {
            "kind": "exponential", "warmup_steps": 3000, "floor_fraction": 0.1,
            "cooldown_steps": 2000,
        },
    }  # fmt: skip
    return run


def pretrain_bitnet() -> dict[str, Any]:
    """Causal pretraining with ternary weights: a higher rate than usual that falls in two stages,
    and no weight decay in the second (https://arxiv.org/abs/2504.12285)."""
    return pretrain() | {
        "objective": {"kind": "clm"},
        "optim": {
            "kind": "adamw", "learning_rate": 1.5e-3, "beta2": 0.95, "weight_decay": 0.1,
            "weight_decay_until": 0.5, "clip_norm": 1.0,
            "schedule": {"kind": "two-stage", "warmup_steps": 375},
        },
    }  # fmt: skip


def _masked(**pack: str) -> dict[str, Any]:
    """Settings that all pretraining on masked tokens has, documents packed whole unless `pack` says
    otherwise; a tokenizer that is trained has the mask token."""
    return {
        "data": {
            "holdout_fraction": 0.005,
            "tokenizer": {"special_tokens": ["<|endoftext|>", "<|mask|>"]},
            "pack": pack or {"method": "best-fit"},
        },
        "train": {"precision": "bf16", "remat": "auto_block"},
        "eval": {"every_steps": 500},
        "checkpoint": {"save_every_steps": 500},
    }


def pretrain_encoder() -> dict[str, Any]:
    """Masked pretraining as EuroBERT's (https://arxiv.org/abs/2503.05500): half of the tokens are
    hidden; a tokenizer that is trained has the mask token. The model, the data and the length are
    the run file's, and at the end the decay of a WSD schedule."""
    return _masked() | {
        "objective": {"kind": "mlm", "mask_ratio": 0.5},
        "optim": {
            "kind": "adamw", "learning_rate": 1e-4, "beta2": 0.95, "eps": 1e-5,
            "weight_decay": 0.1, "clip_norm": 1.0,
            "schedule": {"kind": "wsd", "warmup_steps": 2000, "decay_steps": 5000},
        },
    }  # fmt: skip


def anneal_encoder() -> dict[str, Any]:
    """EuroBERT's second phase, from the end of the first (`train.init_from`): a tenth of the tokens
    is hidden, rows of 8,192 tokens with another theta, a rate that falls to zero; theirs were about
    200 B tokens after 4.8 T."""
    run = pretrain_encoder()
    run["model"] = {"seq_len": 8192, "rope_theta": 250_000.0}
    run["objective"] |= {"mask_ratio": 0.1}
    run["optim"] |= {"schedule": {"kind": "linear"}}
    return run


def pretrain_modernbert() -> dict[str, Any]:
    """Masked pretraining as ModernBERT's first phase (https://arxiv.org/abs/2412.13663), rows of
    1,024 tokens and a constant rate: theirs were 360,000 steps of 4,608 rows, fewer rows in the
    first 50 B tokens, which is left out here. The model, the data and the length are the run
    file's; the rate is that of the base size, `large` had 5e-4 and then 5e-5."""
    return _masked() | {
        "model": {"seq_len": 1024, "rope_theta": 10_000.0, "init_cut": 2.0},
        "objective": {
            "kind": "mlm", "mask_ratio": 0.3, "random_share": 0.1, "kept_share": 0.1,
            "eval_mask_ratio": 0.15,
        },
        "optim": {
            "kind": "stable-adamw", "learning_rate": 8e-4, "beta2": 0.98, "eps": 1e-6,
            "weight_decay": 1e-5, "clip_norm": None,
            "schedule": {"kind": "constant", "warmup_steps": 640},
        },
    }  # fmt: skip


def extend_modernbert() -> dict[str, Any]:
    """ModernBERT's second phase, from the end of the first (`train.init_from`): rows of 8,192
    tokens, another theta of global layers, a lower rate; theirs were 250 B tokens."""
    run = pretrain_modernbert()
    run["model"] = {"seq_len": 8192, "rope_theta": 160_000.0}
    run["optim"] |= {"learning_rate": 3e-4, "schedule": {"kind": "constant"}}
    return run


def decay_modernbert() -> dict[str, Any]:
    """ModernBERT's third phase, from the end of the second (`train.init_from`): one minus the root,
    from its rate to zero; theirs were 50 B tokens, 10,600 steps of 576 rows."""
    run = extend_modernbert()
    run["optim"]["schedule"] = {"kind": "wsd", "decay_steps": 10_600, "shape": "sqrt"}
    run["train"]["steps"] = 10_600
    return run


def pretrain_deberta() -> dict[str, Any]:
    """Detection of replaced tokens with the settings of Microsoft's code for DeBERTa-v3 base and
    large (https://github.com/microsoft/DeBERTa): batches of 256 rows of 512 tokens, Adam at 1e-4
    (3e-4 for xsmall), a linear decay. Its paper (https://arxiv.org/abs/2111.09543) has larger
    batches. The model, the data and the length are the run file's."""
    return _masked() | {
        "objective": {"kind": "rtd", "mask_ratio": 0.15, "detector_weight": 10.0},
        "optim": {
            "kind": "adamw", "learning_rate": 1e-4, "beta2": 0.999, "eps": 1e-6,
            "weight_decay": 0.01, "clip_norm": 1.0,
            "schedule": {"kind": "linear", "warmup_steps": 10_000},
        },
    }  # fmt: skip


def pretrain_diffusion() -> dict[str, Any]:
    """Masked diffusion as LLaDA's (https://arxiv.org/abs/2502.09992): AdamW, a WSD schedule at
    4e-4; a tokenizer that is trained has the mask token. Rows are one text for the model, so that
    it learns where texts end. The model, the data and the length are the run file's."""
    return _masked(method="chunk", attention="row") | {
        "objective": {"kind": "diffusion", "short_rows": 0.01},
        "optim": {
            "kind": "adamw", "learning_rate": 4e-4, "beta2": 0.95, "weight_decay": 0.1,
            "clip_norm": 1.0,
            "schedule": {"kind": "wsd", "warmup_steps": 2000, "decay_steps": 5000},
        },
    }  # fmt: skip


def finetune_classifier() -> dict[str, Any]:
    """Fine-tuning of an encoder on texts with a class, with ModernBERT's settings for GLUE
    (https://arxiv.org/abs/2412.13663); the model comes from train.init_from, the classes, the data
    and the length are the run file's."""
    return {
        "objective": {"kind": "classify"},
        "optim": {
            "kind": "adamw", "learning_rate": 5e-5, "beta2": 0.98, "eps": 1e-6,
            "weight_decay": 1e-5, "clip_norm": 1.0, "schedule": {"kind": "linear"},
        },
        "data": {"holdout_fraction": 0.1, "pack": {"method": "best-fit"}},
        "train": {"precision": "bf16"},
        "eval": {"max_rows": None},
    }  # fmt: skip


def finetune_multilabel() -> dict[str, Any]:
    """Fine-tuning of an encoder on texts with any number of classes, with the settings of
    `finetune-classifier`."""
    return finetune_classifier() | {"objective": {"kind": "multilabel"}}


def finetune_regression() -> dict[str, Any]:
    """Fine-tuning of an encoder on texts with a number, or on pairs of them, as a reranker is, with
    the settings of `finetune-classifier`."""
    return finetune_classifier() | {"objective": {"kind": "regress"}}


def finetune_tagger() -> dict[str, Any]:
    """Fine-tuning of an encoder on tagged words, with the settings of `finetune-classifier`; the
    tags are the run file's."""
    return finetune_classifier() | {"objective": {"kind": "tag"}}


def finetune_answers() -> dict[str, Any]:
    """Fine-tuning of an encoder on questions whose answers stand in a context, in windows of 384
    tokens that share 128 as in transformers' example for SQuAD, with the settings of
    `finetune-classifier`; the model comes from train.init_from, the data are the run file's."""
    return finetune_classifier() | {"objective": {"kind": "answer"}}


def finetune_embedder() -> dict[str, Any]:
    """Fine-tuning of an encoder on texts that belong together, with the rate, the optimizer and the
    loss of sentence-transformers' training overview
    (https://sbert.net/docs/sentence_transformer/training_overview.html), whose warm-up is a tenth
    of the steps; the model comes from train.init_from, the data and the length are the run file's.
    """
    return {
        "objective": {"kind": "embed"},
        "optim": {
            "kind": "adamw", "learning_rate": 2e-5, "weight_decay": 0.0, "beta2": 0.999,
            "clip_norm": 1.0, "schedule": {"kind": "linear", "warmup_steps": 100},
        },
        "data": {"holdout_fraction": 0.05, "pack": {"method": "best-fit"}},
        "train": {"precision": "bf16"},
        "eval": {"first": "start"},
    }  # fmt: skip


def finetune_similarity() -> dict[str, Any]:
    """Fine-tuning of an encoder on pairs of texts with a number, with the settings of
    `finetune-embedder`."""
    return finetune_embedder() | {"objective": {"kind": "similarity"}}


def sft() -> dict[str, Any]:
    """Full fine-tuning on completions by common practice; the model comes from
    train.init_from, the data and the length are the run file's."""
    return {
        "objective": {"kind": "sft"},
        "optim": {
            "kind": "adamw",
            "learning_rate": 2e-5,
            "beta2": 0.999,
            "weight_decay": 0.0,
            "clip_norm": 1.0,
            "schedule": {"kind": "linear"},
        },
        "data": {"holdout_fraction": 0.02, "pack": {"method": "best-fit"}},
        "train": {"precision": "bf16", "remat": "auto_block"},
        "eval": {"first": "start", "prompt_format": "chat"},
    }


def kisoku_3b_alpaca() -> dict[str, Any]:
    """kisoku-3b on Alpaca: 20,000 steps at 2e-5 of 12 rows of 2,048 tokens on each of 16 chips
    (v4-32); rates as Stanford Alpaca's."""
    run = sft()
    run["model"] = {"preset": "kisoku-3b", "seq_len": 2048}
    run["optim"]["schedule"] = {"kind": "cosine", "warmup_steps": 600, "floor_fraction": 0.0}
    run["data"]["chat"] = {"template": "alpaca"}
    run["train"] |= {"steps": 20_000, "global_batch_size": 12 * 16}
    run["eval"] |= {"every_steps": 1000}
    run["checkpoint"] = {"save_every_steps": 2000}
    return run
