"""Longest: the longest rows with which a run fits a machine, for each way to make room for them.

    as set, offloaded, in chunks, over context --estimate at 2^k--> longest --compiler--> table

A step has one row for each shard of the batch, in one piece: with fewer rows nothing is saved. The
compiler confirms an answer, and refuses twice its length; where it disagrees with the estimate,
the search goes on from there, up or down.
"""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lmwright.config.check import check_memory
from lmwright.config.run import Mesh, Run, Train
from lmwright.core.sharding import ACTIVATIONS, mesh_shape
from lmwright.errors import UserError, first_line
from lmwright.hardware.chips import GIB
from lmwright.hardware.slices import Slice
from lmwright.planner.analytic.candidates import CHUNK_TOKENS, overrides
from lmwright.planner.analytic.machine import Machine
from lmwright.planner.analytic.quick import MEMORY_ERROR_SHARE, Quick
from lmwright.planner.compiler.compile import compile_for
from lmwright.planner.report import Report
from lmwright.planner.search import timeout_s
from lmwright.planner.units import short_duration

LEAST_TOKENS = 2**9
MOST_TOKENS = 2**22
SIZE = ("global_batch_size", "num_microbatches")  # of `train`: follow from the mesh


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer for rows of one length."""

    tokens: int
    fits: bool
    by: str
    """`compiler` or `analytic`."""
    peak_bytes: float | None = None
    limit_bytes: float | None = None
    host_bytes: float = 0.0
    step_s: float | None = None
    why: str = ""
    """Reason why there is no figure."""

    @property
    def refusal(self) -> str:
        """Reason why rows of this length do not fit."""
        if self.why or self.peak_bytes is None or self.limit_bytes is None:
            return self.why
        if self.peak_bytes <= self.limit_bytes:
            return f"{self.host_bytes / GIB:.2f} GiB on the host"
        return f"{self.peak_bytes / GIB:.2f} of {self.limit_bytes / GIB:.2f} GiB"


@dataclass
class Option:
    """One way to make room for rows, and the verdicts on it by length."""

    given: Run
    machine: Machine
    train: Train
    optim: Any
    mesh: Mesh
    estimated: dict[int, Verdict] = field(default_factory=dict)
    compiled: dict[int, Verdict] = field(default_factory=dict)
    refusal: str = ""
    """Reason why a length cannot be laid out."""

    def run_at(self, tokens: int) -> Run:
        """The run with rows of so many tokens, as few as the mesh can take."""
        machine, train = self.machine, self.train
        sizes = _sizes(self.mesh, machine)
        pieces = train.num_microbatches if sizes["stage"] > 1 else 1
        rows = pieces * math.prod(sizes[axis] for axis in ACTIVATIONS["batch"])
        if self.given.lora is not None:  # adapters have as many rows each
            rows = math.lcm(rows, len(self.given.lora.listed))
        chunk = train.mlp_chunk_tokens
        train = replace(
            train,
            global_batch_size=rows,
            num_microbatches=pieces,
            mlp_chunk_tokens=chunk if chunk is not None and chunk < tokens else None,
        )
        run, model = self.given, self.given.model
        pack = replace(run.data.pack, seq_len=tokens)
        model = replace(model, seq_len=max(model.seq_len, tokens))
        data = replace(run.data, pack=pack)
        return replace(run, train=train, optim=self.optim, mesh=self.mesh, data=data, model=model)

    def words(self, tokens: int, skip: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Overrides over the run as it was given, without those of these fields of `train`."""
        words = overrides(self.given, self.run_at(tokens))
        left_out = tuple(f"train.{name}=" for name in skip)
        return tuple(word for word in words if not word.startswith(left_out))

    def length_words(self, tokens: int) -> tuple[str, ...]:
        """Overrides that set the row length."""
        longer = tokens > self.given.model.seq_len
        words = (f"model.seq_len={tokens}",) if longer else ()
        return (*words, f"data.pack.seq_len={tokens}", *self.words(tokens))

    def estimate(self) -> None:
        """Asks the analytic model at every power of two until one does not fit."""
        tokens = LEAST_TOKENS
        while tokens <= MOST_TOKENS:
            try:
                check_memory(self.run_at(tokens))
                quick = Quick.of(self.run_at(tokens), self.machine)
            except UserError as error:
                self.refusal = str(error)
            else:
                self.estimated[tokens] = _by_estimate(tokens, quick)
                if not quick.fits:
                    break
            tokens *= 2

    def confirm(self, where: Slice | Machine) -> None:
        """Asks the compiler at the estimate's answer, and on until it takes one length and refuses
        the next; for GPUs not about a length that is too long by more than the estimate errs."""
        sure = {} if isinstance(where, Slice) else self.surely_refused
        tokens = self.estimated_tokens or min(self.estimated)
        while tokens in self.estimated or LEAST_TOKENS <= tokens <= MOST_TOKENS:
            if tokens in self.compiled or tokens in sure:
                break
            verdict = self.compiled[tokens] = _by_compiler(self.run_at(tokens), where, tokens)
            tokens = 2 * tokens if verdict.fits else tokens // 2

    @property
    def surely_refused(self) -> dict[int, Verdict]:
        """Verdicts of the analytic model on lengths that do not fit although it may err."""
        return {
            tokens: verdict
            for tokens, verdict in self.estimated.items()
            if verdict.peak_bytes is not None
            and verdict.limit_bytes is not None
            and verdict.peak_bytes > (1 + MEMORY_ERROR_SHARE) * verdict.limit_bytes
        }

    @property
    def estimated_tokens(self) -> int | None:
        """The longest row by the analytic model; None where none fits."""
        return max((t for t, verdict in self.estimated.items() if verdict.fits), default=None)

    @property
    def verdicts(self) -> dict[int, Verdict]:
        """Verdicts of the compiler where it was asked, of the analytic model otherwise."""
        return self.compiled or self.estimated

    @property
    def tokens(self) -> int | None:
        """The longest row; None where none fits."""
        return max((t for t, verdict in self.verdicts.items() if verdict.fits), default=None)

    @property
    def refused(self) -> Verdict | None:
        """The verdict on the shortest row that does not fit."""
        known = self.surely_refused | self.verdicts
        no = [t for t, verdict in known.items() if not verdict.fits]
        return known[min(no)] if no else None


def _by_estimate(tokens: int, quick: Quick) -> Verdict:
    return Verdict(
        tokens=tokens,
        fits=quick.fits,
        by="analytic",
        peak_bytes=quick.memory.peak,
        limit_bytes=quick.limit_bytes,
        host_bytes=quick.memory.host,
        step_s=quick.step_s if quick.fits else None,
    )


def _by_compiler(run: Run, where: Slice | Machine, tokens: int) -> Verdict:
    print(f"compiling rows of {tokens:,} tokens", file=sys.stderr, flush=True)
    try:
        compiled = compile_for(run, where, timeout_s=timeout_s(run))
    except (UserError, RuntimeError) as error:
        why = f"no answer: {first_line(error)}"
        return Verdict(tokens=tokens, fits=False, by="compiler", why=why)
    if not isinstance(where, Slice):  # whose times are those of the analytic model
        quick = Quick.of(run, where, compiled)
        return replace(_by_estimate(tokens, quick), by="compiler", peak_bytes=quick.peak_bytes)
    report = Report(run, where, compiled)
    return Verdict(
        tokens=tokens,
        fits=report.fits,
        by="compiler",
        peak_bytes=report.compiled.peak_bytes,
        limit_bytes=report.limit_bytes,
        host_bytes=report.compiled.host_bytes,
        step_s=report.estimate.step_s if report.estimate else None,
    )


def options_of(run: Run, machine: Machine) -> Iterator[Option]:
    """Candidates in order: the run as it is, then with exact changes added one by one; then the
    same with rows split over all devices of a slice."""
    for mesh in (run.mesh, _over_context(run, machine)):
        if mesh is None:
            continue
        train, optim = run.train, run.optim
        yield Option(run, machine, train, optim, mesh)
        changes: list[dict[str, Any]] = [{"remat": "block"}]
        if train.offload == "none":
            changes.append({"offload": "block_inputs"})
        if train.offload != "products":  # which keeps what chunks would compute again
            changes.append({"mlp_chunk_tokens": train.mlp_chunk_tokens or CHUNK_TOKENS})
        for change in changes:
            new = replace(train, **change)
            if new != train:
                train = new
                yield Option(run, machine, train, optim, mesh)
        if optim.offload == "none":
            yield Option(run, machine, train, replace(optim, offload="moments"), mesh)


def _sizes(mesh: Mesh, machine: Machine) -> dict[str, int]:
    """Devices along each axis of the mesh; nodes of GPUs are no slices."""
    slices = machine.num_groups if machine.platform == "tpu" else 1
    return mesh_shape(mesh, machine.num_devices, slices)


def _over_context(run: Run, machine: Machine) -> Mesh | None:
    """The mesh that cuts rows over all devices that hold whole ones; None where that changes
    nothing."""
    slices, sizes = machine.num_groups, _sizes(run.mesh, machine)
    others = {axis: sizes[axis] for axis in ("expert", "tensor", "stage")}
    context = machine.num_devices // slices // math.prod(others.values())
    if context <= sizes["context"] or slices * context * math.prod(others.values()) != (
        machine.num_devices
    ):
        return None
    return Mesh(data=slices, fsdp=1, context=context, **others)


@dataclass
class Longest:
    """All options of a run on a machine."""

    run: Run
    machine: Machine
    options: list[Option]

    @classmethod
    def of(cls, run: Run, machine: Machine) -> "Longest":
        """All options, estimated. Raises UserError where the memory is not known, or no length can
        be laid out."""
        if machine.usable_bytes is None:
            raise UserError(
                f"--longest: the memory of {machine.name} is not known; name a TPU slice or GPUs"
            )
        if run.lora is not None and any(each.rows for each in run.lora.adapters):
            raise UserError(
                "--longest: takes as few rows as it can, and lora.adapters.rows says how many; "
                "leave rows out"
            )
        options = list(options_of(run, machine))
        for option in options:
            option.estimate()
        legal = [option for option in options if option.estimated]
        if not legal:
            raise UserError(options[0].refusal)
        return cls(run, machine, legal)

    def ask(self, where: Slice | Machine, finalists: int) -> None:
        """Asks the machine's compiler about the options with the longest rows, those that change
        least first: for TPUs after the run as set, for GPUs as long as one might have longer rows
        than those before it."""
        on_tpus = isinstance(where, Slice)
        first, rest = (self.options[:1], self.options[1:]) if on_tpus else ([], self.options)
        rest = sorted(rest, key=lambda option: -(option.estimated_tokens or 0))
        for option in [*first, *rest][:finalists]:
            done = max((o.tokens or 0 for o in self.options if o.compiled), default=-1)
            if not on_tpus and (option.estimated_tokens or 0) <= done:
                break
            print(f"asking the compiler: {self.label(option)}", file=sys.stderr, flush=True)
            option.confirm(where)

    @property
    def best(self) -> Option:
        """The option with the longest row; what the compiler confirmed goes before estimates."""
        return max(self.options, key=lambda o: (bool(o.compiled), o.tokens or 0))

    @property
    def fits(self) -> bool:
        return self.best.tokens is not None

    def label(self, option: Option) -> str:
        """The overrides of an option beside the length; a chunk is named for long rows only."""
        tokens = max(option.tokens or 0, 2 * CHUNK_TOKENS)
        return " ".join(option.words(tokens, skip=SIZE)) or "as set"

    def lines(self) -> list[str]:
        """The table, and the overrides of the longest."""
        lines = [
            f"{self.run.name} on {self.machine.name}: the longest rows that fit, by powers of two; "
            f"as few rows a step as the mesh takes",
            "",
            f"{'tokens':>9} {'rows':>5} {'GiB':>6} {'host':>6} {'a step':>8}  {'by':<8}",
        ]
        for option in self.options:
            lines += self._rows(option)
        best, tokens = self.best, self.best.tokens
        if tokens is None:
            return [*lines, "", "no row fits"]
        lines += ["", "to run the longest:", "  " + " ".join(best.length_words(tokens))]
        own = self.run.model.seq_len
        if tokens > own:
            lines.append(
                f"  beyond the {own:,} tokens of model.seq_len: the weights have seen no such "
                f"positions unless they are trained for them"
            )
        return lines

    def _rows(self, option: Option) -> list[str]:
        tokens, refused = option.tokens, option.refused
        if tokens is None:
            verdict = option.verdicts[min(option.verdicts)]
            line = f"{'-':>9} {'':>5} {'':>6} {'':>6} {'':>8}  {verdict.by:<8}"
            return [f"{line}  {self.label(option)}: {verdict.tokens:,}: {verdict.refusal}"]
        verdict = option.verdicts[tokens]
        step = short_duration(verdict.step_s) if verdict.step_s is not None else ""
        line = (
            f"{tokens:>9,} {option.run_at(tokens).train.global_batch_size:>5} "
            f"{verdict.peak_bytes / GIB:6.2f} {verdict.host_bytes / GIB:6.2f} {step:>8}  "
            f"{verdict.by:<8}  {self.label(option)}"
        )
        more = f"{refused.tokens:,}: {refused.refusal}" if refused else "no longer ones tried"
        return [f"{line}; {more}"]

    def to_json(self) -> str:
        """Every option with its verdicts, in tokens, bytes and seconds."""
        rows = [
            {
                "overrides": option.words(option.tokens or min(option.verdicts), skip=SIZE),
                "tokens": option.tokens,
                "rows": option.run_at(LEAST_TOKENS).train.global_batch_size,
                "by": option.verdicts[min(option.verdicts)].by,
                "estimated": [asdict(verdict) for verdict in option.estimated.values()],
                "compiled": [asdict(verdict) for verdict in option.compiled.values()],
            }
            for option in self.options
        ]
        best = self.best
        words = best.length_words(best.tokens) if best.tokens else ()
        return json.dumps(
            {"slice": self.machine.name, "options": rows, "overrides": words}, indent=1
        )
