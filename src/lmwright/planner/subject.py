"""Subject: the run that `lmwright plan` is asked about: a run file, or a model alone.

run.toml, run directory            --load_run--> Run
preset, Hugging Face folder, GGUF  --find_model--> recipe `pretrain`, `pretrain-encoder` or
                                   `pretrain-diffusion`, its own row length, the largest power of
                                   two of rows a chip that fits
                                   --> Run, notes
"""

import math
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from lmwright.config.fields import to_plain
from lmwright.config.run import Run, seq_len_of
from lmwright.config.text import parse_override
from lmwright.core.contract import Model
from lmwright.core.param import count_params
from lmwright.errors import UserError
from lmwright.formats.open import find_model, is_run, load_noted, load_run
from lmwright.guard.temporary import temporary_folder
from lmwright.planner.analytic.machine import Machine, parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.presets import pretraining_of
from lmwright.program.trainee import spec_of

TOKENS_PER_PARAMETER = 20  # https://arxiv.org/abs/2203.15556
LEAST_STEPS = 1000  # so that the recipe's warm-up is a part of them
MOST_ROWS = 2**12  # a chip
HOST_ROWS = 8  # of a CPU, whose memory is not known
COMPARED_TOKENS = 2**22  # in a step, where machines are compared
BATCH, STEPS, EPOCHS = (("train", n) for n in ("global_batch_size", "steps", "epochs"))
MICROBATCHES = ("train", "num_microbatches")
DEPTH, RECIPE, VOCABULARY = ("depth",), ("recipe",), ("model", "vocab_size")


def subject(name: str, overrides: Sequence[str], on: str) -> tuple[Run, list[str]]:
    """The run that a name and overrides describe for a machine (or `any`), and what had to be
    chosen for it, as lines. Raises UserError where there is none of that name."""
    path = Path(name)
    lies_there = path.is_file() and path.suffix != ".gguf"
    if lies_there or is_run(name):
        return load_noted(name, overrides)
    model = find_model(name)
    machine = None if on.strip().lower() == "any" else parse_machine(on)
    return _Alone(name, model, tuple(overrides)).on(machine)


class _Alone:
    """A model without a run, and what the command line says of the run."""

    def __init__(self, name: str, model: Model, overrides: tuple[str, ...]):
        self.name, self.model, self.overrides = name, model, overrides
        self.given = dict(map(parse_override, overrides))
        if DEPTH in self.given:
            raise UserError(f"depth and {name} both choose the model; keep one")
        self.recipe = self.given.get(RECIPE) or pretraining_of(model)
        self.vocab_size = self.given.get(VOCABULARY, model.vocab_size)
        pieces = self.given.get(MICROBATCHES, 1)
        self.all_pieces = pieces if isinstance(pieces, int) and pieces > 0 else 1
        self.pieces = self.all_pieces // (self.all_pieces & -self.all_pieces)
        """The odd part of the number of microbatches, which divides the rows of a chip."""
        place = Path(name.rstrip("/").rpartition("://")[2])
        self.short = place.name.removesuffix(".gguf") or "model"

    def on(self, machine: Machine | None) -> tuple[Run, list[str]]:
        """The run on a machine; for a comparison of several where it is None."""
        batch, why = self._batch(machine)
        run = self._run(batch, LEAST_STEPS)
        if not self.given.keys() & {STEPS, EPOCHS}:
            tokens = run.train.global_batch_size * seq_len_of(run)
            wanted = math.ceil(TOKENS_PER_PARAMETER * count_params(spec_of(run)) / tokens)
            run = self._run(batch, max(LEAST_STEPS, wanted))
        return run, [self._note(run, why)]

    def _batch(self, machine: Machine | None) -> tuple[int, str]:
        """Rows of a step, and why so many."""
        if BATCH in self.given:
            return 1, ""
        first = self._run(self.all_pieces, LEAST_STEPS)
        if machine is None:
            rows = 2 ** max(4, round(math.log2(COMPARED_TOKENS / seq_len_of(first))))
            return rows, f"{rows:,} rows a step (about 4 M tokens, the same on every machine)"
        if machine.usable_bytes is None:
            return HOST_ROWS, f"{HOST_ROWS} rows a step (the memory of the host is not known)"
        rows, fits = self._most_rows(machine)
        every = rows * machine.num_chips
        power = "power of two" if self.pieces == 1 else f"{self.pieces} x 2^n"
        why = f"the largest {power} that fits, by --quick" if fits else "which do not fit"
        plural = "s" if rows > 1 else ""
        return every, f"{rows} row{plural} a {machine.unit}, {every:,} in all ({why})"

    def _most_rows(self, machine: Machine) -> tuple[int, bool]:
        """The largest power of two of rows a chip that fits, or the smallest that can be laid
        out where none does."""
        smallest, best, refusal = None, None, None
        rows = self.pieces
        while rows <= MOST_ROWS:
            try:
                quick = Quick.of(self._run(rows * machine.num_chips, LEAST_STEPS), machine)
            except UserError as error:
                refusal = error
                if smallest is not None:
                    break
            else:
                smallest = smallest or rows
                if not quick.fits:
                    break
                best = rows
            rows *= 2
        if smallest is None:
            raise refusal
        return (smallest, False) if best is None else (best, True)

    def _run(self, batch: int, steps: int) -> Run:
        values = {
            "name": self.short,
            "dir": f"runs/{self.short}",
            "recipe": self.recipe,
            "model": to_plain(self.model),
            "data": {
                "dir": f"data/{self.short}",
                "sources": [{"path": "text"}],
                "tokenizer": {"vocab_size": self.vocab_size},
            },
            "train": {"global_batch_size": batch},
        }
        if EPOCHS not in self.given:
            values["train"]["steps"] = steps
        with temporary_folder() as folder:
            path = Path(folder, "run.toml")
            path.write_text(tomli_w.dumps(values))
            return load_run(path, self.overrides)

    def _note(self, run: Run, why: str) -> str:
        chosen = [f"recipe {self.recipe}"]
        own = "the model's own length" if run.data.pack.seq_len is None else "as said"
        chosen.append(f"rows of {seq_len_of(run):,} tokens ({own})")
        chosen += [why] if why else []
        if not self.given.keys() & {STEPS, EPOCHS}:
            tokens = run.train.steps * run.train.global_batch_size * seq_len_of(run)
            share = tokens / count_params(spec_of(run))
            chosen.append(f"{run.train.steps:,} steps ({share:.3g} tokens a parameter)")
        return f"{self.name}: a model without a run file, so {', '.join(chosen)}; a.b=c changes any"
