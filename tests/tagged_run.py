"""A run over tagged words, some of their texts longer than a row, whose data is prepared."""

import json
from pathlib import Path

from lmwright.config.run import Data, Pack, Run, Source, Tokenizer, Train
from lmwright.data.prepare import prepare
from lmwright.objectives.tag import Tag
from lmwright.optim import KINDS
from tests.labeled_run import SEQ_LEN

LABELS = ("O", "B-PET", "I-PET", "B-MAT")
PETS = ("cat", "d\u00f6g", "chow-chow")
ROWS = [
    {
        "tokens": ["the", "big", PETS[i % 3], f"{i},", *["on", "mats"] * (i % 9 * 2)],
        "tags": ["O", "B-PET", "I-PET", "O", *["O", "B-MAT"] * (i % 9 * 2)],
    }
    for i in range(60)
]  # fmt: skip


def tagged_run(root: Path, model, rows=ROWS, **source) -> Run:
    """A run over `ROWS` in `root`; nothing is trained, and the last ten are held out."""
    sources = []
    for name, use, part in (("texts", "train", rows[:-10]), ("held", "eval", rows[-10:])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        path = str(root / f"{name}.jsonl")
        sources.append(Source(path=path, rows="tagged", use=use, **source))
    run = Run(
        name="tags",
        dir=str(root / "run"),
        model=model,
        objective=Tag(labels=LABELS),
        optim=KINDS["adamw"](learning_rate=0.01),
        data=Data(
            dir=str(root / "data"),
            workers=1,
            sources=tuple(sources),
            tokenizer=Tokenizer(vocab_size=290, special_tokens=("<|endoftext|>", "<|mask|>")),
            pack=Pack(method="best-fit"),
        ),
        train=Train(steps=4, global_batch_size=2, precision="fp32"),
    )
    prepare(run.data, SEQ_LEN, labels=LABELS)
    return run
