"""Experts: seconds that routing takes beside products, from the shapes of the rows that travel.

    x [n, D] --take--> rows [M, D] --products--> [M, F] --product--> [M, D] --back, sum--> [n, D]

M = n k choices of a device's n tokens. Each `Pass` below is one instruction of the compiled
program, which reads and writes arrays of rows as `nn/moe.py`, `nn/exchange.py` and `core/ragged.py`
say. In rounds over `expert` most of them go over all places, which are more than the choices; with
a capacity, over all slots. Sorting is not counted, nor does the compiler say what it takes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lmwright.hardware.chips import CHIPS
from lmwright.nn.exchange import TILE, UNEVEN
from lmwright.planner.analytic.layout import WEIGHT_BYTES, Layout
from lmwright.planner.analytic.machine import Machine
from lmwright.planner.analytic.products import product_s, products
from lmwright.planner.analytic.stock import Weight
from lmwright.planner.compiler.links import all_to_all_s

STARTED = 2.0
"""Arrays of rows that an elementwise instruction takes on a TPU beside those it reads and writes,
by the compiler's cycles (`benchmarks/rows_schedule.py`). Of rows that only move it knows none."""
CYCLES = 1.25
"""Seconds by those cycles, at the nominal clock, over the seconds of their bytes."""
SUMMED_PER_CYCLE = 7.5
"""Sums of up to `SUBLANES` choices, by element, that a TensorCore makes in a cycle, by the same."""
SUBLANES = 8
WEIGHT_GATHERS = 2  # of an expert's weights: for the forward pass and for the backward pass
BEHIND = 0.5
"""Share of an exchange that is hidden where other work could hide all of it, as `compiler.cost`
assumes."""


class Pass(NamedTuple):
    """One instruction over rows, in arrays that it reads and writes."""

    reads: float
    writes: float
    inside: bool = False
    """True for rows of the width of an expert, not of the residual stream."""
    moves: bool = False
    """True if it only moves rows."""
    sums: bool = False
    """True if it adds up the choices of a token, whatever it reads and writes."""


ORDER = Pass(1, 1, moves=True)  # rows in another order
FILL = Pass(0, 1, moves=True)  # zeros
TURN = Pass(1, 1)  # from the shape in which TPUs send rows
PACK = Pass(1, 1, moves=True)  # to it
SUM = Pass(1, 0, sums=True)
ARRIVE, LEAVE = (FILL, TURN, ORDER), (ORDER, PACK)


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts of a stack of layers, on one device."""

    layout: Layout
    into: tuple[Weight, ...]
    """Weights of the products into the experts, two if they are gated."""
    down: Weight

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (*self.into, self.down)

    @property
    def per_token(self) -> float:
        """Experts of a token."""
        return self.down.per_token

    @property
    def choices(self) -> float:
        """Choices of the tokens of a microbatch."""
        return self.layout.tokens * self.per_token

    @property
    def layers(self) -> float:
        """Layers of a device that have it."""
        return self.down.layers / self.layout.stages

    @property
    def ways(self) -> int:
        """Devices that its experts are cut over."""
        return self.layout.sizes["expert"]

    @property
    def slots(self) -> int:
        """Rows that one device sends to another in a round (`nn.exchange.Way`)."""
        step = max(1, TILE // self.ways)
        return math.ceil(self.choices / (2 * self.ways * step)) * step

    @property
    def rounds(self) -> int:
        """Rounds that a plan reckons with."""
        return math.ceil(UNEVEN * self.choices / self.ways / self.slots)

    @property
    def places(self) -> float:
        """Rows that all rounds have room for, by choice."""
        return self.rounds * self.ways * self.slots / self.choices


def mixtures(layout: Layout) -> Iterator[Mixture]:
    """The mixtures of a model, one for each stack of layers that has one."""
    routed = {w.path: w for w in layout.stock.model_weights if w.is_routed}
    for path, down in routed.items():
        if down.param.inputs == ("mlp",):
            into = (routed.get(path.removesuffix("down") + name) for name in ("gate", "up"))
            yield Mixture(layout, tuple(filter(None, into)), down)


def routing_s(layout: Layout, machine: Machine) -> float:
    """Seconds of a microbatch in which rows and the weights of experts pass through memory."""
    return sum(m.layers * _rows_s(m, machine) + _weights_s(m, machine) for m in mixtures(layout))


def _rows_s(m: Mixture, machine: Machine) -> float:
    """Seconds of the passes over rows in one layer."""
    return sum(times * pass_s(m, each, machine) for times, each in passes(m))


def pass_s(m: Mixture, each: Pass, machine: Machine) -> float:
    """Seconds of a pass over the rows of all choices."""
    layout, on_tpu = m.layout, machine.platform == "tpu"
    width = m.down.fan_in / layout.sizes["tensor"] if each.inside else m.down.fan_out
    if each.sums and on_tpu:
        rates = CHIPS[machine.kind].rates
        rate = SUMMED_PER_CYCLE * rates.clock_hz * rates.cores * rates.cycles_share
        return layout.tokens * width * math.ceil(m.per_token / SUBLANES) / rate
    size = width * m.choices * layout.activation_bytes
    if each.moves or not on_tpu:
        return (each.reads + each.writes) * size / machine.memory_bytes_per_s
    return (each.reads + each.writes + STARTED) * size / elementwise_bytes_per_s(machine)


def elementwise_bytes_per_s(machine: Machine) -> float:
    """Rate of memory at which elementwise instructions pass over arrays."""
    if machine.platform != "tpu":
        return machine.memory_bytes_per_s
    return machine.memory_bytes_per_s * CHIPS[machine.kind].rates.cycles_share / CYCLES


Passes = list[tuple[float, Pass]]
"""Passes, each with the rows that it goes over for each choice."""


def passes(m: Mixture) -> Iterator[tuple[float, Pass]]:
    """The passes over rows of one layer."""
    if m.layout.in_rounds(m.down):
        forward, backward = _in_rounds(m)
    elif m.layout.capacity_factor(m.down) is not None:
        forward, backward = _in_slots(m)
    else:
        forward, backward = _alone(m)
    for _ in range(1 + m.layout.extra_passes):
        yield from forward
    yield from backward


def _alone(m: Mixture) -> tuple[Passes, Passes]:
    """Passes forward and backward where all rows stay on their device."""
    wide = len(m.into)
    take, inner = Pass(1 / m.per_token, 1, moves=True), Pass(wide, 1, inside=True)
    forward = [take, inner, ORDER, SUM]
    backward = [
        take,  # the gradients of the results
        Pass(1 + wide, 0, inside=True),  # the gradients of the shares
        Pass(1 + wide, wide, inside=True),
        Pass(wide, 1),
        ORDER,
        SUM,
        inner,
    ]
    if m.layout.remat.everything:  # rows go to the stack of all layers and back
        backward += [Pass(1, 1), Pass(1, 1)]
    else:
        kept = [w for w in m.into if m.layout.remat.keeps(m.layout.kept_name(w))]
        backward += [take, *[Pass(1, 1, inside=True)] * len(kept)]
    return [(1.0, each) for each in forward], [(1.0, each) for each in backward]


def _shared(m: Mixture) -> list[Pass]:
    """Passes that make the gradients of the shares and of the results, from that of their sums."""
    gradient = WEIGHT_BYTES / m.layout.activation_bytes / m.per_token  # float32
    return [Pass(1 + gradient, 0), Pass(gradient, 1)]


def _in_slots(m: Mixture) -> tuple[Passes, Passes]:
    """Passes forward and backward where experts have slots; what is inside is done by products."""
    slots = m.layout.slots(m.down)
    turns = 4 if m.ways > 1 else 2  # with each all-to-all from and to the order of its result
    across = [(slots, TURN)] * turns
    forward = [(1.0, Pass(1 / m.per_token, slots, moves=True)), *across]
    forward += [(1.0, Pass(slots, 1, moves=True))]
    backward = [*((1.0, each) for each in _shared(m)), (1.0, Pass(1, slots, moves=True))]
    backward += [*across, (1.0, Pass(slots, 1, moves=True)), (1.0, SUM)]
    if not m.layout.remat.everything:
        backward += forward
    return [*forward, (1.0, SUM)], backward


def _in_rounds(m: Mixture) -> tuple[Passes, Passes]:
    """Passes forward and backward where rows go over `expert`: in the rounds, and around them."""
    wide = len(m.into)
    take, end = Pass(1 / m.per_token, 1, moves=True), (TURN, ORDER, SUM)
    forward = [*ARRIVE, Pass(wide, 1, inside=True), *LEAVE]
    backward = [
        *ARRIVE,
        *ARRIVE,  # the gradients of the results
        Pass(1 + wide, 1, inside=True),  # and the gradients of the shares
        Pass(1 + wide, wide, inside=True),
        Pass(wide, 1),
        *LEAVE,
    ]
    around = [take, FILL, *end], [take, take, FILL, *end]
    both = zip((forward, backward), around, strict=True)
    first, last = (
        [*((m.places, each) for each in inside), *((1.0, each) for each in outside)]
        for inside, outside in both
    )
    return first, last


def _weights_s(m: Mixture, machine: Machine) -> float:
    """Seconds of the passes over the weights of all layers and over their gradients."""
    layout, moved = m.layout, 0.0
    more = 2 + STARTED * (machine.platform == "tpu")
    for w in m.weights:
        held, gathered = w.param.size / layout.product_ways(w), layout.gathered_ways(w)
        kept = layout.remat.everything
        if gathered > 1:
            gathers = 1 if kept else WEIGHT_GATHERS
            moved += gathers * more * layout.activation_bytes * held / gathered
        if not w.trained and w.bytes < layout.activation_bytes:  # integers, widened where they are
            widened = w.bytes + (more - 1) * layout.activation_bytes
            moved += (2 - layout.work.forward_only + layout.extra_passes) * widened * held
        if kept and machine.num_devices > 1:  # put into the stack of all layers, and taken again
            moved += 2 * more * layout.activation_bytes * held
        if not w.trained or layout.work.forward_only:
            continue
        if layout.in_rounds(w):  # and are sums over rounds
            moved += m.rounds * 3 * WEIGHT_BYTES * held
    return moved / elementwise_bytes_per_s(machine)


def exchange_s(layout: Layout, machine: Machine) -> tuple[float, float]:
    """Seconds in which rows go to their experts and come back, forward and backward, for one
    microbatch: all of them, and those that products hide.

    In rounds, the backward pass sends rows once more; with a capacity it sends all of them again,
    unless everything is kept. The gradients of the results travel while what is inside the experts
    is computed again, those of the rows while those of the weights are.
    """
    whole = hidden = 0.0
    if layout.sizes["expert"] == 1:
        return 0.0, 0.0
    for m in mixtures(layout):
        way = m.layers * _way_s(m, machine)
        again = 0 if layout.remat.everything else 2
        whole += way * (5 if layout.in_rounds(m.down) else 4 + again)
        whole += way * 2 * layout.extra_passes
        if layout.work.forward_only:
            continue
        once = {w.path: product_s(layout, w, machine) / products(layout, w) for w in m.weights}
        inner = Pass(len(m.into), 1, inside=True)
        passed = sum(pass_s(m, one, machine) for one in (TURN, ORDER, inner))
        computed = m.layers * m.places * passed + sum(once[w.path] for w in m.into)
        of_weights = sum(once[w.path] for w in m.weights if w.trained)
        hidden += BEHIND * (min(way, computed) + min(way, of_weights))
    return whole, hidden


def _way_s(m: Mixture, machine: Machine) -> float:
    """Seconds in which the rows of one layer go one way."""
    rows = m.choices * m.layout.slots(m.down)
    sent = rows * m.down.fan_out * m.layout.activation_bytes
    if machine.where is not None:
        return all_to_all_s(sent, m.ways, machine.where, machine.link_bytes_per_s)
    within = m.ways <= machine.group_size
    rate = machine.link_bytes_per_s * machine.links(m.ways)
    return sent * (m.ways - 1) / m.ways / (rate if within else machine.network_bytes_per_s)
