"""One dial: `depth = n` in a run file gives a model of n layers and what it takes to train it.

    width          64 a layer, heads of 128       (nanochat, github.com/karpathy/nanochat)
    mlp            8/3 of the width, gated        (https://arxiv.org/abs/2002.05202)
    kv heads       a quarter of the heads, half or all where that is no whole number
                                                 (https://arxiv.org/abs/2305.13245)
    tokens         20 for each parameter          (https://arxiv.org/abs/2203.15556)
    batch tokens   0.2920 C^0.3271                (https://arxiv.org/abs/2401.02954, eq. 1)
    learning rate  0.3118 C^-0.1250               (the same)

C are the FLOPs of the whole training without embedding and head, (72 n d^2 + 12 n d T) tokens,
as the paper that fitted the last two counts them.
"""

import math
from typing import Any

WIDTH_PER_LAYER = 64
HEAD_DIM = 128
TOKENS_PER_PARAM = 20
WARMUP_SHARE = 0.02  # of the steps


def dial(depth: int, vocab_size: int = 50304, seq_len: int = 2048) -> dict[str, Any]:
    """A part of a run, as recipes are: a model of `depth` layers, its learning rate, batch and
    steps for rows of `seq_len` tokens."""
    width = -(-depth * WIDTH_PER_LAYER // HEAD_DIM) * HEAD_DIM
    heads = width // HEAD_DIM
    kv_heads = heads // 4 if heads % 4 == 0 else heads // 2 if heads % 2 == 0 else heads
    mlp = math.ceil(width * 8 / 3 / 256) * 256
    layer = 2 * width * (heads + kv_heads) * HEAD_DIM + 3 * width * mlp
    params = depth * layer + vocab_size * width
    tokens = TOKENS_PER_PARAM * params
    flops = tokens * depth * (72 * width**2 + 12 * width * seq_len)
    rows = 2 ** max(0, round(math.log2(0.2920 * flops**0.3271 / seq_len)))
    steps = math.ceil(tokens / (rows * seq_len))
    return {
        "model": {
            "kind": "llama",
            "vocab_size": vocab_size,
            "embed_dim": width,
            "mlp_dim": mlp,
            "num_layers": depth,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": HEAD_DIM,
            "seq_len": seq_len,
        },
        "optim": {
            "kind": "adamw",
            "learning_rate": float(f"{0.3118 * flops**-0.1250:.3g}"),
            "schedule": {"kind": "cosine", "warmup_steps": math.ceil(WARMUP_SHARE * steps)},
        },
        "train": {"steps": steps, "global_batch_size": rows},
    }
