"""Masked-token steps of encoders beside transformers + torch, on this CPU.

    python benchmarks/encoders_cpu.py                     # both shapes, all contestants
    python benchmarks/encoders_cpu.py --shape 17m --quick # a few minutes

ModernBERT in the sizes of Ettin; 30 % of the tokens are predicted, the same by torch.
lmwright packs the documents, whose lengths are `DOCUMENTS`. torch gets them padded to the longest
(`padded`), or packed beside a mask of whole rows (`packed`), and runs the head over the predicted
tokens alone (`sparse_prediction`). Speeds count real tokens. Run as `contestants.py` says.
"""

from typing import Any

import numpy as np
from contestants import Step, compete, lmwright_steps, torch_steps

SHAPES = {
    "17m": dict(vocab_size=50368, embed_dim=256, mlp_dim=384, num_layers=7, num_heads=4),
    "68m": dict(vocab_size=50368, embed_dim=512, mlp_dim=768, num_layers=19, num_heads=8),
}
ROWS = {"17m": 8, "68m": 4}
SEQ_LEN = 512
DOCUMENTS = (512, 320, 192, 256, 128, 128, 384, 128)  # packed into rows of 512 without padding
RATIO, MASK = 0.3, 50284
TORCH = [
    f"torch-{mode}-{rows}-{precision}"
    for precision in ("fp32", "bf16")
    for mode in ("eager", "compile")
    for rows in ("padded", "packed")
]
CONTESTANTS = ("lmwright-fp32", "lmwright-bf16", *TORCH)


def rows_of(shape: str) -> dict[str, np.ndarray]:
    """Packed rows [B, T] of documents."""
    rng, rows = np.random.default_rng(0), ROWS[shape]
    lengths = [length for _ in range(rows) for length in DOCUMENTS]
    ids, places = np.zeros((rows, SEQ_LEN), np.int32), np.zeros((rows, SEQ_LEN), np.int32)
    row = at = number = 0
    while row < rows:
        length = lengths.pop(0)
        number += 1
        ids[row, at : at + length] = number
        places[row, at : at + length] = np.arange(length)
        at += length
        if at == SEQ_LEN:
            row, at, number = row + 1, 0, 0
    tokens = rng.integers(0, 50000, ids.shape, dtype=np.int32)
    weight = np.ones(ids.shape, np.float32)
    return {
        "tokens": tokens, "segment_ids": ids, "positions": places, "loss_weight": weight
    }  # fmt: skip


def lmwright_step(shape: str, precision: str) -> Step:
    """A step of masked pretraining."""
    from lmwright.config.run import Data, Run, Train
    from lmwright.models import KINDS as MODELS
    from lmwright.objectives.mlm import Mlm
    from lmwright.optim import KINDS

    size = SHAPES[shape]
    heads = size["num_heads"]
    run = Run(
        name="benchmark",
        dir="unused",
        model=MODELS["modernbert"](
            **size, num_kv_heads=heads, head_dim=size["embed_dim"] // heads, seq_len=SEQ_LEN
        ),
        objective=Mlm(mask_ratio=RATIO, mask_token_id=MASK),
        optim=KINDS["adamw"](learning_rate=1e-4, clip_norm=1.0),
        data=Data(dir="unused"),
        train=Train(steps=10_000, global_batch_size=ROWS[shape], precision=precision),
    )
    return lmwright_steps(run, **rows_of(shape))


def torch_step(shape: str, mode: str, form: str, precision: str) -> Step:
    """The same in torch."""
    import torch
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    size = SHAPES[shape]
    torch.manual_seed(0)
    config = ModernBertConfig(
        vocab_size=size["vocab_size"], hidden_size=size["embed_dim"],
        intermediate_size=size["mlp_dim"], num_hidden_layers=size["num_layers"],
        num_attention_heads=size["num_heads"], max_position_embeddings=SEQ_LEN,
        attn_implementation="sdpa", sparse_prediction=True, reference_compile=False,
    )  # fmt: skip
    inputs = torch.utils._pytree.tree_map(torch.from_numpy, torch_inputs(shape, form))
    model = ModernBertForMaskedLM(config)
    return torch_steps(model, mode, precision, inputs, lr=1e-4, weight_decay=0.1)


def torch_inputs(shape: str, form: str) -> dict[str, Any]:
    """Arguments of the model for the documents of `rows_of`, 30 % of the tokens of each row
    masked."""
    rows = rows_of(shape)
    tokens, ids = rows["tokens"].astype(np.int64), rows["segment_ids"]
    hidden = np.argsort(np.random.default_rng(1).random(ids.shape), axis=1) < RATIO * SEQ_LEN
    labels = np.where(hidden, tokens, -100)
    seen = np.where(hidden, MASK, tokens)
    if form == "packed":
        same = ids[:, None, :, None] == ids[:, None, None, :]  # [B, 1, T, T]
        near = np.abs(np.subtract.outer(np.arange(SEQ_LEN), np.arange(SEQ_LEN))) <= 64
        return {
            "input_ids": seen, "labels": labels, "position_ids": rows["positions"].astype(np.int64),
            "attention_mask": {"full_attention": same, "sliding_attention": same & near},
        }  # fmt: skip
    pieces = [
        (r, np.flatnonzero(ids[r] == number))
        for r in range(len(ids))
        for number in range(1, ids[r].max() + 1)
    ]
    width = max(len(at) for _, at in pieces)
    padded = {
        "input_ids": np.zeros((len(pieces), width), np.int64),
        "labels": np.full((len(pieces), width), -100),
        "attention_mask": np.zeros((len(pieces), width), np.int64),
    }
    for i, (r, at) in enumerate(pieces):
        padded["input_ids"][i, : len(at)] = seen[r, at]
        padded["labels"][i, : len(at)] = labels[r, at]
        padded["attention_mask"][i, : len(at)] = 1
    return padded


if __name__ == "__main__":
    compete(
        __doc__.split("\n")[0], {shape: (3, rows * SEQ_LEN) for shape, rows in ROWS.items()},
        CONTESTANTS, [n for n in CONTESTANTS if n.endswith("fp32")],
        lmwright=lmwright_step, torch=torch_step,
    )  # fmt: skip
