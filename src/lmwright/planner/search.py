"""Search: the best way to run on a machine: analytic model first, compiler for the finalists.

    candidates --analytic--> ranked --best N--> compiler, one at a time --> table, overrides

Only what the compiler confirmed can be the best once it was asked. For GPUs it says no times, so it
is asked until one fits.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass, field, replace

from lmwright.config.run import Run
from lmwright.errors import UserError, first_line
from lmwright.hardware.chips import GIB
from lmwright.hardware.slices import Slice
from lmwright.planner import units
from lmwright.planner.advice import TIE_SHARE
from lmwright.planner.analytic.candidates import Candidate, candidates, overrides
from lmwright.planner.analytic.machine import Machine
from lmwright.planner.analytic.quick import MEMORY_ERROR_SHARE
from lmwright.planner.analytic.remat import settled
from lmwright.planner.compiler.compile import Compiled, compile_for, require_libtpu
from lmwright.planner.compiler.cost import Estimate
from lmwright.planner.compiler.gpu import require_cuda_compiler
from lmwright.planner.report import Report

SHOWN = 12  # rows of the table
COMPILE_TIMEOUT_S = 900.0
LONG_TIMEOUT_S = 1800.0  # of programs with transfers to the host or loops over chunks


@dataclass
class Entry:
    """A candidate, and the compiler's word on it where it was asked."""

    candidate: Candidate
    """The candidate; with the compiler's memory where that was asked about GPUs."""
    report: Report | None = None
    """The answer of a compiler that was asked about TPUs."""
    failure: str = ""
    """Reason why the compiler gave no answer."""

    @property
    def fits(self) -> bool:
        quick = self.candidate.quick
        return (self.report.fits if self.report else quick.fits) and not self.failure

    @property
    def asked(self) -> bool:
        """True if a compiler gave an answer."""
        return self.report is not None or self.candidate.quick.compiled is not None

    @property
    def over_bytes(self) -> float:
        if self.report is None:
            return self.candidate.quick.over_bytes
        return self.report.compiled.peak_bytes - self.report.limit_bytes

    @property
    def peak_bytes(self) -> float:
        quick = self.candidate.quick
        return self.report.compiled.peak_bytes if self.report else quick.peak_bytes

    @property
    def estimate(self) -> Estimate | None:
        """The compiler's estimate; None where it was not asked or compiled nothing."""
        return self.report.estimate if self.report else None

    @property
    def step_s(self) -> float:
        return self.estimate.step_s if self.estimate else self.candidate.quick.step_s

    @property
    def ranked_s(self) -> float:
        """Seconds of a step by which it is ranked: what trains differently must be better by more
        than a tie."""
        return self.step_s * (1 + TIE_SHARE if self.candidate.changes_training else 1)

    @property
    def by_kind(self) -> Counter:
        timing = self.candidate.quick.timing
        return Counter(self.estimate.by_kind) if self.estimate else timing.by_kind

    @property
    def by_part(self) -> dict[str, float]:
        """Seconds of each part of the model."""
        timing = self.candidate.quick.timing
        return self.estimate.parts if self.estimate else dict(timing.by_part)

    @property
    def by(self) -> str:
        return "compiler" if self.asked else "failed" if self.failure else "analytic"


def _compile(entry: Entry, where: Slice | Machine, number: str) -> Compiled | None:
    """The compiler's answer for a candidate; None where it gave none, which is noted."""
    run = entry.candidate.run
    print(f"compiling {number}: {entry.candidate.label}", file=sys.stderr, flush=True)
    try:
        return compile_for(run, where, timeout_s=timeout_s(run))
    except (UserError, RuntimeError) as error:
        entry.failure = first_line(error)
        return None


def timeout_s(run: Run) -> float:
    """Seconds that the compiler gets for one candidate."""
    train = run.train
    far = train.offload != "none" or run.optim.offload != "none"
    return LONG_TIMEOUT_S if far or train.mlp_chunk_tokens is not None else COMPILE_TIMEOUT_S


@dataclass
class Search:
    """All candidates of a run on a machine, and what is known of them so far."""

    run: Run
    machine: Machine
    entries: list[Entry] = field(default_factory=list)

    @classmethod
    def of(cls, run: Run, machine: Machine) -> "Search":
        """The candidates of a run. Raises UserError where no mesh can hold the run."""
        chosen = settled(run, machine).run
        ways = candidates(chosen, machine, optimizers=True)
        if not ways:
            raise UserError(
                f"--search: no mesh over {machine.num_devices} devices divides "
                f"train.global_batch_size = {run.train.global_batch_size} rows and the model's "
                f"heads, mlp and vocabulary; use another batch size or machine"
            )
        # on a GPU another mesh may be given another policy, so the words name that of the answer
        said = run if machine.platform == "gpu" else chosen
        return cls(said, machine, [Entry(candidate) for candidate in ways])

    def words(self, entry: Entry) -> tuple[str, ...]:
        """Overrides that turn the run into that of an entry, for the command line."""
        return overrides(self.run, entry.candidate.run)

    def ask(self, where: Slice | Machine, finalists: int) -> None:
        """Asks the machine's compiler about the best candidates, each in a process of its own."""
        if isinstance(where, Slice):
            self._ask_for_tpus(where, finalists)
        else:
            self._ask_for_gpus(where, finalists)

    def _ask_for_tpus(self, where: Slice, finalists: int) -> None:
        """Asks about as many again where the compiler confirms none of the finalists."""
        require_libtpu()
        chosen = [entry for entry in self.entries if entry.fits]
        finalists = min(finalists, len(chosen))
        for number, entry in enumerate(chosen[: 2 * finalists], 1):
            if number > finalists and any(e.report and e.fits for e in self.entries):
                break
            more = f"{number} of {finalists}" if number <= finalists else "another, as none fits"
            compiled = _compile(entry, where, more)
            if compiled is not None:
                entry.report = Report(entry.candidate.run, where, compiled)
                _ = entry.report.estimate

    def _ask_for_gpus(self, machine: Machine, finalists: int) -> None:
        """Asks for the memory of the fastest candidates, until one fits; also of those that are too
        large by no more than the estimate errs."""
        require_cuda_compiler()
        limit = machine.usable_bytes
        assert limit is not None
        most = (1 + MEMORY_ERROR_SHARE) * limit
        near = [e for e in self.entries if e.candidate.quick.memory.peak <= most]
        near.sort(key=lambda e: (e.ranked_s, e.candidate.quick.memory.peak))
        for number, entry in enumerate(near[:finalists], 1):
            compiled = _compile(entry, machine, f"{number}, at most {finalists}")
            if compiled is not None:
                quick = replace(entry.candidate.quick, compiled=compiled)
                entry.candidate = replace(entry.candidate, quick=quick)
                if entry.fits:
                    break

    def ranked(self) -> list[Entry]:
        """Entries, the best first; where the compiler was asked, what it confirmed goes before the
        rest."""
        asked = any(entry.asked for entry in self.entries)

        def key(entry: Entry) -> tuple:
            if not entry.fits:
                return 2, entry.over_bytes
            return int(asked and not entry.asked), entry.ranked_s

        return sorted(self.entries, key=key)

    def lines(self) -> list[str]:
        """The ranked table and the overrides of the best."""
        ranked = self.ranked()
        best, shown = ranked[0], ranked[:SHOWN]
        time, per_s = units.step_unit(max(entry.step_s for entry in shown))
        memory, unit_bytes = units.memory_unit(max(entry.peak_bytes for entry in shown))
        lines = [
            f"{self.run.name} on {self.machine.name}: {len(ranked)} configurations, "
            f"{self.run.train.global_batch_size} rows a step each",
            "",
            f"{'':>3} {'step ' + time:>7} {memory:>6}  {'by':<8}  mesh, remat, microbatches",
        ]
        for number, entry in enumerate(shown, 1):
            lines.append(
                f"{number:>3} {entry.step_s * per_s:7.3f} {entry.peak_bytes / unit_bytes:6.1f}  "
                f"{entry.by:<8}  {entry.candidate.label}: {self.reason(entry, best)}"
            )
        if any(entry.candidate.changes_training for entry in shown):
            lines.append("  * trains differently; offered, never chosen for a tie")
        if not best.fits:
            return [*lines, "", "nothing fits"]
        return [*lines, "", "to run the best:", "  " + " ".join(self.words(best))]

    def reason(self, entry: Entry, best: Entry) -> str:
        """Reason why an entry is not the best."""
        if entry.failure:
            return entry.failure
        if not entry.fits:
            return f"does not fit by {entry.over_bytes / GIB:.1f} GiB"
        if entry is best:
            return "best"
        if best.asked and not entry.asked:
            best_s, kinds = best.candidate.quick.step_s, best.candidate.quick.timing.by_kind
        else:
            best_s, kinds = best.step_s, best.by_kind
        slower = entry.step_s / best_s - 1
        if abs(slower) < TIE_SHARE:
            return "a tie"
        if slower < 0:
            return f"{-slower:.0%} faster, but only by the analytic model"
        worst = max(entry.by_kind, key=lambda kind: entry.by_kind[kind] - kinds[kind])
        more_s = entry.by_kind[worst] - kinds[worst]
        return f"{slower:.0%} slower: {worst} +{units.duration(more_s, entry.step_s)}"

    def to_json(self) -> str:
        """The ranked table as JSON, in seconds and bytes."""
        ranked = self.ranked()
        rows = [
            {
                "overrides": self.words(entry),
                "changes_training": entry.candidate.changes_training,
                "by": entry.by,
                "fits": entry.fits,
                "peak_bytes": entry.peak_bytes,
                "step_s": entry.step_s,
                "by_kind_s": dict(entry.by_kind),
                "reason": self.reason(entry, ranked[0]),
            }
            for entry in ranked
        ]
        return json.dumps({"slice": self.machine.name, "candidates": rows}, indent=1)
