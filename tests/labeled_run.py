"""A run over labeled texts, some of them longer than a row, whose data is prepared."""

import json
from pathlib import Path

from lmwright.config.run import Data, Pack, Run, Source, Tokenizer, Train
from lmwright.data.prepare import prepare
from lmwright.objectives.classify import Classify
from lmwright.optim import KINDS

LABELS = ("cat", "dog", "neither of both")
SEQ_LEN = 40
SIZES = {
    "vocab_size": 320, "embed_dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 4, "seq_len": SEQ_LEN,
}  # fmt: skip
TEXTS = [
    f"the {('cat', 'dog', 'cow')[i % 3]} {i} sat" + f" on {i * i} mats" * (i % 9) for i in range(60)
]


def labeled_run(root: Path, model, **objective) -> Run:
    """A run that classifies `TEXTS`, in `root`; nothing is trained."""
    lines = [json.dumps({"text": t, "label": i % 3}) + "\n" for i, t in enumerate(TEXTS)]
    (root / "texts.jsonl").write_text("".join(lines))
    run = Run(
        name="classes",
        dir=str(root / "run"),
        model=model,
        objective=Classify(labels=LABELS, **objective),
        optim=KINDS["adamw"](learning_rate=0.01),
        data=Data(
            dir=str(root / "data"),
            workers=1,
            sources=(Source(path=str(root / "texts.jsonl"), rows="labeled"),),
            tokenizer=Tokenizer(vocab_size=290, special_tokens=("<|endoftext|>", "<|mask|>")),
            pack=Pack(method="best-fit"),
        ),
        train=Train(steps=4, global_batch_size=2, precision="fp32"),
    )
    prepare(run.data, SEQ_LEN, labels=LABELS)
    return run
