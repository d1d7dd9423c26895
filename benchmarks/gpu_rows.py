"""Rows of `train_gpu.py`: models, batches, contestants and goals, in order of importance."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from train_cpu import SHAPES

MODELS = {
    "135m": {name: size for name, size in SHAPES["135m"].items() if name != "seq_len"},
    "1b": dict(
        vocab_size=128_256, embed_dim=2048, mlp_dim=8192, num_layers=16, num_heads=32,
        num_kv_heads=8, head_dim=64,
    ),
    "tiny": dict(
        vocab_size=512, embed_dim=64, mlp_dim=128, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=16,
    ),
}  # fmt: skip
RANK, ALPHA = 16, 32  # of LoRA, on all matrices of the layers
PROMPT_TOKENS = 64
WAITS = "waits"  # file in a worker's folder while it waits for its turn

Records = Mapping[str, Mapping[str, Any]]
"""The last record of each contestant of a row."""


@dataclass(frozen=True)
class Goal:
    """What a row is to show. `of` says what is measured: our speed as a multiple of the best of the
    others (best), of one document a row (rows), as a fraction of the card's peak (mfu), our memory
    as a multiple of torch.compile's (memory), or whether it runs at all (fits)."""

    of: str
    limit: float

    def measured(self, records: Records) -> float | None:
        """The number that the goal is about; None where a record is missing."""
        return {
            "best": _times_best, "rows": _times_rows, "mfu": _mfu, "memory": _times_memory,
            "fits": _fits,
        }[self.of](records)  # fmt: skip

    def met(self, number: float) -> bool:
        """True if the number reaches the goal; memory is to stay below it."""
        return number < self.limit if self.of == "memory" else number >= self.limit

    @property
    def text(self) -> str:
        """Words of the goal."""
        return {
            "best": f"at least {self.limit:g} x the best of the others",
            "rows": f"at least {self.limit:g} x the speed of one document a row",
            "mfu": f"at least {self.limit:.0%} of the card's peak",
            "memory": "less memory than torch.compile",
            "fits": "runs on one card",
        }[self.of]


MEMORY = Goal("memory", 1.0)
TRAINING = ("lmwright", "torch-compile", "torch-eager", "liger-eager")
PACKED = ("lmwright-packed", "lmwright-rows", "torch-mask", "torch-flex")


@dataclass(frozen=True)
class Row:
    """A batch of a model, and who computes it."""

    model: str
    rows: int
    seq_len: int
    """Tokens of a row; of a prompt and what follows where it generates."""
    contestants: tuple[str, ...] = TRAINING
    goals: tuple[Goal, ...] = ()
    lora: bool = False
    generates: bool = False
    documents: int = 1
    """Documents of a row, for the contestants that pack."""

    @property
    def sizes(self) -> dict[str, int]:
        """The model's dimensions."""
        return MODELS[self.model]

    @property
    def tokens(self) -> int:
        """Tokens of a step, or new ones of a batch of texts."""
        return self.rows * (self.seq_len - PROMPT_TOKENS if self.generates else self.seq_len)

    def tiny(self) -> "Row":
        """The same with shapes that a CPU computes in seconds."""
        rows, seq_len = min(self.rows, 2), 80 if self.generates else 64 * (1 + self.seq_len // 8192)
        changes = {"rows": rows, "seq_len": seq_len, "documents": min(self.documents, 4)}
        return Row(**(vars(self) | {"model": "tiny"} | changes))


LORA = dict(lora=True, contestants=("lmwright", "peft-compile", "peft-eager", "unsloth-eager"))
TEXTS = dict(generates=True, contestants=("lmwright", "transformers-static"))
ROWS = {
    "135m-8x2k": Row("135m", 8, 2048, goals=(Goal("best", 1.4), MEMORY)),
    "1b-4x2k": Row("1b", 4, 2048, goals=(Goal("best", 1.25), MEMORY)),
    "lora-4x2k": Row("1b", 4, 2048, goals=(Goal("best", 1.2), MEMORY), **LORA),
    "135m-2x8k": Row("135m", 2, 8192, goals=(Goal("best", 1.85), MEMORY)),
    "1b-8x2k": Row(
        "1b", 8, 2048, TRAINING[:2], goals=(Goal("mfu", 0.52), Goal("best", 1.25), MEMORY)
    ),
    "packed-8k": Row("135m", 2, 8192, PACKED, (Goal("rows", 1.0), MEMORY), documents=14),
    "packed-2k": Row("135m", 8, 2048, PACKED, (Goal("rows", 0.95), MEMORY), documents=3),
    "generate-1": Row("135m", 1, 320, goals=(Goal("best", 1.0), MEMORY), **TEXTS),
    "generate-8": Row("135m", 8, 320, goals=(Goal("best", 1.0), MEMORY), **TEXTS),
    "lora-1x32k": Row("1b", 1, 32_768, ("lmwright",), (Goal("fits", 1.0),), lora=True),
}  # fmt: skip


def speed(record: Mapping[str, Any] | None) -> float | None:
    """Median tokens a second of a record; None where there is none, or it tells of a failure."""
    rounds = (record or {}).get("tokens_per_s")
    return statistics.median(rounds) if rounds else None


def ours(records: Records) -> Mapping[str, Any] | None:
    """Our record of a row; the packed one where there are two."""
    return records.get("lmwright") or records.get("lmwright-packed")


def _ratio(number: float | None, other: float | None) -> float | None:
    return number / other if number and other else None


def _times_best(records: Records) -> float | None:
    others = [speed(r) for name, r in records.items() if not name.startswith("lmwright")]
    return _ratio(speed(ours(records)), max(filter(None, others), default=None))


def _times_rows(records: Records) -> float | None:
    return _ratio(speed(records.get("lmwright-packed")), speed(records.get("lmwright-rows")))


def _times_memory(records: Records) -> float | None:
    compiled = ("torch-compile", "peft-compile", "torch-mask", "transformers-static")
    theirs = next((records[name] for name in compiled if name in records), {})
    return _ratio((ours(records) or {}).get("peak_bytes"), theirs.get("peak_bytes"))


def _mfu(records: Records) -> float | None:
    return (ours(records) or {}).get("mfu")


def _fits(records: Records) -> float | None:
    record = ours(records)
    return None if record is None else float("error" not in record)
