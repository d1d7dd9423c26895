"""A run over labeled texts, some of them longer than a row, whose data is prepared."""

import json
from pathlib import Path

from lmwright.config.run import Data, Pack, Run, Source, Tokenizer, Train
from lmwright.data.prepare import labels_of, prepare
from lmwright.objectives.classify import Classify
from lmwright.objectives.regress import Regress
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


NUMBERS = [round(0.25 * (i * 7 % 60) - 3, 2) for i in range(60)]
PAIRS = [(text, TEXTS[(i * 11 + 5) % 60]) for i, text in enumerate(TEXTS)]


def labeled_run(root: Path, model, *, numbers=False, **objective) -> Run:
    """A run that classifies `TEXTS`, or gives `NUMBERS` to `PAIRS`, in `root`; nothing is trained,
    and the last ten are held out."""
    rows = [{"text": t, "label": i % 3} for i, t in enumerate(TEXTS)]
    if numbers:
        rows = [
            {"text": a, "text_pair": b, "label": n}
            for (a, b), n in zip(PAIRS, NUMBERS, strict=True)
        ]
    learns = Regress(**objective) if numbers else Classify(labels=LABELS, **objective)
    return prepared_run(root, model, learns, rows, rows="labeled")


def prepared_run(root: Path, model, objective, lines, **source) -> Run:
    """A run over these lines in `root`, of which the last ten are held out; nothing is trained."""
    sources = []
    for name, use, part in (("texts", "train", lines[:-10]), ("held", "eval", lines[-10:])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part))
        sources.append(Source(path=str(root / f"{name}.jsonl"), use=use, **source))
    run = Run(
        name="classes",
        dir=str(root / "run"),
        model=model,
        objective=objective,
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
    prepare(run.data, SEQ_LEN, labels=labels_of(run), windows=objective.windows)
    return run
