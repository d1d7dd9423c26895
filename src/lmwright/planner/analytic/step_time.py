"""Analytic: how long a step takes, estimated from the arrows, the mesh and the device's rates.

    matmul        FLOPs of the products, those computed again included, / (peak x efficiency)
    attention     causal FLOPs / (peak x efficiency), or the kernel's cycles where its schedule is
                  known; all scores where there is no kernel
    vector        bytes that norms, rotations, gates, logits and the optimizer pass over / rate
    routing       what is done to rows that are sent to experts, see `analytic.experts`
    gathers       bytes of gathered weights / links, hidden behind the products
    reductions    bytes of gradients and partial sums / links, mostly not hidden
    network       what crosses slices or nodes
    idle          pipeline stages that wait for their first microbatch or after their last

No compiler is asked, so what it merges, splits or moves is not seen. How often bytes are moved
and what stays hidden is what its schedules showed (`benchmarks/plan_quick.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, reduce
from itertools import product

from lmwright.config.run import Run
from lmwright.core.compute import ATTENTION, GATE
from lmwright.core.contract import Attention
from lmwright.core.weight import scatters
from lmwright.hardware.chips import CHIPS
from lmwright.kernels import tpu_spans
from lmwright.kernels.interval_attention import both_ways_within
from lmwright.kernels.tpu_attention import fits
from lmwright.kernels.tpu_row_attention import block_of
from lmwright.kernels.tpu_splash import block_sizes
from lmwright.nn.intervals import Reach, causal_reach
from lmwright.planner.analytic.context import context_bytes
from lmwright.planner.analytic.experts import exchange_s, routing_s
from lmwright.planner.analytic.layout import WEIGHT_BYTES, Layout
from lmwright.planner.analytic.machine import Machine
from lmwright.planner.analytic.memory import (
    keeps_attention,
    predicted_share,
    saved_bytes,
    score_bytes,
    scores_share,
)
from lmwright.planner.analytic.products import product_s, products
from lmwright.planner.analytic.stock import Weight, stocks_of
from lmwright.planner.analytic.timing import Timing
from lmwright.planner.analytic.unrolled import spared_bytes
from lmwright.planner.compiler.kernel_cost import (
    row_attention_cycles,
    splash_s,
    visited,
    whole_row_s,
    windowed,
)
from lmwright.planner.compiler.links import spanned
from lmwright.planner.compiler.long_attention import long_attention_s

# Times that each byte of a kind of array goes through memory in a step, forward and backward;
# RECOMPUTED is the share more where the forward pass of a layer runs twice.
STREAM_PASSES = 43.0
WIDE_PASSES = 4.0
HEAD_PASSES = 10.0
LOGITS_PASSES = 6.6
SCORE_PASSES = 8.0
OPTIMIZER_PASSES = 2.0  # the state is read and written
RECOMPUTED = 0.3

GATHERS = 2  # of each weight in a microbatch: for the forward pass and for the backward pass
GATHER_BYTES, REDUCE_BYTES = 2, 4  # of an element: weights travel as bfloat16
GATHERS_EXPOSED = 0.35
REDUCTIONS_EXPOSED = 0.9  # of gradients; partial sums of activations are waited for
BUSY = "matmul", "attention", "mixing", "vector", "routing"
HOST = "exposed host transfers"
LINKS, NETWORK = COLLECTIVES = "exposed collectives", "network"
HOST_EXPOSED = 0.6  # of activations; as the compiler schedules examples/gemma2-9b-32k.toml
NETWORK_EXPOSED = 0.5  # of what crosses slices or nodes


def timing(layouts: Sequence[Layout], machine: Machine) -> Timing:
    """The time of a step of a plan's models on the machine, one after the other."""
    return reduce(Timing.plus, (_timing_of(layout, machine) for layout in layouts))


def _timing_of(layout: Layout, machine: Machine) -> Timing:
    took = _timing(layout, machine)
    if not layout.work.forward_only:
        return took
    # what one more forward pass takes, and one of the two times that its weights are gathered
    forward = _timing(replace(layout, more_passes=1), machine).minus(took)
    return forward.plus(took.of(COLLECTIVES).times(1 / GATHERS))


def _timing(layout: Layout, machine: Machine) -> Timing:
    took = Timing()
    pieces = layout.run.train.num_microbatches
    for weight in layout.weights:
        seconds = pieces * product_s(layout, weight, machine)
        took.by_kind["matmul"] += seconds
        took.by_part[weight.part] += seconds
    attention = pieces * attention_s(layout, machine)
    took.by_kind["attention"] = attention
    took.by_part["attention"] += attention
    took.by_kind["mixing"] = pieces * mixing_s(layout, machine)
    took.by_kind["vector"] = vector_bytes(layout) / machine.vector_bytes_per_s
    took.by_kind["routing"] = pieces * routing_s(layout, machine)
    _host_transfers(took, layout, machine)
    _collectives(took, layout, machine)
    if layout.stages > 1:
        busy = sum(took.by_kind[kind] for kind in BUSY)
        took.by_kind["idle"] = busy * (layout.stages - 1) / pieces
    took.by_part = +took.by_part
    took.by_kind = +took.by_kind
    return took


def _host_transfers(took: Timing, layout: Layout, machine: Machine) -> None:
    """Adds transfers to the host and back: activations partly behind arithmetic, moments in a loop
    of their own."""
    kept = saved_bytes(layout, on_host=True) / machine.host_bytes_per_s
    if layout.stages == 1:
        kept *= layout.run.train.num_microbatches
    moments = layout.host_optimizer_bytes / machine.host_bytes_per_s
    took.by_kind[HOST] = 2 * (HOST_EXPOSED * kept + moments)
    took.host_bytes = 2 * (kept + moments) * machine.host_bytes_per_s
    took.hidden_s += 2 * (1 - HOST_EXPOSED) * kept


def mixing_s(layout: Layout, machine: Machine) -> float:
    """Seconds of a recurrence in all layers of a device, for one microbatch."""
    work, ways = layout.work, (3 + layout.extra_passes) / layout.stages / layout.sizes["tensor"]
    products = work.mixing_flops / (machine.flops * machine.attention_efficiency)
    return ways * layout.tokens * (products + work.mixing_bytes / machine.vector_bytes_per_s)


def attention_s(layout: Layout, machine: Machine) -> float:
    """Seconds of attention in all layers of a device, for one microbatch: products of
    queries and keys and of scores and values, two forward, seven backward."""
    m = layout.attention
    if m is None:
        return 0.0
    ways = layout.ways("batch", "seq", "heads")
    forward = (1 if keeps_attention(layout) else 2) + layout.extra_passes
    if layout.has_whole_rows:
        return _whole_rows_s(layout, machine, forward=forward)
    if layout.kernels == "tpu" and layout.has_kernel and fits(layout.seq_len):
        long = tpu_spans.fits(layout.seq_len, m.head_dim)
        return (_long_rows_s if long else _splash_s)(layout, machine, forward=forward)
    keys = layout.seq_len * len(m.windows) * scores_share(layout)
    per_token = 2 * keys / layout.stages * m.num_heads * m.head_dim / ways
    flops = (7 + 2 * forward) * per_token * layout.tokens
    if layout.has_kernel and machine.packed_share is not None:
        flops *= machine.packed_share
    return flops / (machine.flops * machine.attention_efficiency)


def _whole_rows_s(layout: Layout, machine: Machine, *, forward: int) -> float:
    """Seconds of attention by `kernels/tpu_row_attention.py`, with `forward` forward passes."""
    m, size, rates = layout.attention, block_of(layout.seq_len), CHIPS[machine.kind].rates
    ways = zip((forward, 1), row_attention_cycles(machine.kind, m.head_dim), strict=True)
    return _heads(layout) * sum(
        times * whole_row_s(rates, cycles, layout.seq_len, size, reach)
        for (times, cycles), reach in product(ways, _reaches(m))
    )


def _long_rows_s(layout: Layout, machine: Machine, *, forward: int) -> float:
    """Seconds of attention by `kernels/tpu_long_attention.py`, with `forward` forward passes."""
    m, rates, length = layout.attention, CHIPS[machine.kind].rates, layout.seq_len
    seconds = 0.0
    for reach in _reaches(m):
        sizes = _sizes_of(length, m.head_dim, layout.activation_bytes, reach)
        for way, times in enumerate((forward, 1)):
            cost = long_attention_s(machine.kind, rates, m.head_dim, sizes, reach, way)
            seconds += times * cost
    return _heads(layout) * seconds


_sizes_of = cache(tpu_spans.sizes_of)


def _reaches(m: Attention) -> list[Reach]:
    """The reach of the queries of each layer."""
    return [both_ways_within(w) if m.both_ways else causal_reach(w) for w in m.windows]


def _splash_s(layout: Layout, machine: Machine, *, forward: int) -> float:
    """Seconds of attention by JAX's splash kernel."""
    m, length = layout.attention, layout.seq_len
    sizes = block_sizes(length, m.head_dim)
    sides = {"fwd": (sizes.block_q, sizes.block_kv), "bwd": (sizes.block_kv_dkv, sizes.block_q_dkv)}
    if not sizes.use_fused_bwd_kernel:
        sides |= {"dkv": sides.pop("bwd"), "dq": (sizes.block_q_dq, sizes.block_kv_dq)}
    seconds = 0.0
    for way, (rows, columns) in sides.items():
        near = (windowed(length, rows, columns, window) for window in m.windows)
        most = [count and (1 + m.both_ways) * count for count in near]
        scores = sum(visited(length, rows, columns, n, not m.both_ways) for n in most)
        times = forward if way == "fwd" else 1
        scores *= times * _heads(layout)
        seconds += splash_s(CHIPS[machine.kind].rates, machine.kind, m.head_dim, way, scores)
    return seconds


def _heads(layout: Layout) -> float:
    """Rows of heads that a device attends within, in a layer, its share of a stage's."""
    tokens = layout.tokens * layout.attention.num_heads / layout.ways("batch", "seq", "heads")
    return tokens / layout.stages / layout.seq_len


def vector_bytes(layout: Layout) -> float:
    """Bytes that everything but products moves through a device's memory in a step."""
    pieces = layout.run.train.num_microbatches
    heads, wide, vocab = (layout.ways("batch", "seq", n) for n in ("heads", "mlp", "vocab"))
    element = layout.tokens * layout.activation_bytes
    per_layer = (
        STREAM_PASSES * layout.stream_bytes
        + WIDE_PASSES * element * layout.mlp_width / wide
        + HEAD_PASSES * element * _head_width(layout) / heads
        + SCORE_PASSES * score_bytes(layout) * scores_share(layout)
    )
    more = layout.extra_passes
    whole = layout.remat.everything or (layout.is_unrolled and GATE in layout.remat.kept)
    per_layer *= 1 + RECOMPUTED * (more + (not whole))
    per_layer -= spared_bytes(layout)
    logits = predicted_share(layout) * layout.tokens * layout.work.vocab_size / vocab
    logits *= LOGITS_PASSES * 4 * (1 + more / 3)
    held = layout.held["trained"]
    gradients = WEIGHT_BYTES * held * (2 + 3 * (pieces - 1))
    return (
        pieces * (layout.layers * per_layer + logits)
        + OPTIMIZER_PASSES * (layout.optimizer_bytes + WEIGHT_BYTES * held)
        + gradients
    )


def _head_width(layout: Layout) -> float:
    """Width of the queries, keys and values of a token."""
    m = layout.attention
    return (
        0.0 if m is None else (m.num_heads + 2 * m.num_kv_heads) * layout.kernel_width(m.head_dim)
    )


def _collectives(timing: Timing, layout: Layout, machine: Machine) -> None:
    """Adds what weights, gradients and activations cost on links and network."""
    gathers = reductions = crossing = 0.0
    pieces = layout.run.train.num_microbatches
    for weight in layout.weights:
        size = weight.param.size / layout.product_ways(weight)
        gathered, copies = layout.gathered_ways(weight), layout.copies(weight)
        times = pieces * uses(layout, weight)
        if weight.param.is_matrix and gathered > 1:
            seconds = times * size * (gathered - 1) / gathered / rate(machine, gathered)
            capacity = layout.capacity_factor(weight) if weight.is_routed else None
            kept = capacity is not None and layout.remat.everything  # from the forward pass
            gathers += (1 if kept else GATHERS) * min(GATHER_BYTES, weight.bytes) * seconds
            if not weight.trained:
                continue
            if is_scattered(layout, machine) and not weight.is_expert:
                gathers += GATHER_BYTES * seconds  # an all-to-all, behind arithmetic as they are
            else:
                both_ways = weight.is_expert and is_all_reduced(machine, gathered)
                reductions += REDUCE_BYTES * (1 + both_ways) * seconds
        if copies > 1 and weight.trained:
            moved = 2 * REDUCE_BYTES * times * size / gathered * (copies - 1) / copies
            near = max(1, copies // machine.num_groups)
            if machine.num_groups > 1:
                crossing += moved / near / machine.network_bytes_per_s
            if near > 1:
                reductions += moved / rate(machine, near)
    exchanged, behind = exchange_s(layout, machine)
    sums = pieces * (activation_sums_s(layout, machine) + exchanged)
    exposed = GATHERS_EXPOSED * gathers + REDUCTIONS_EXPOSED * reductions + sums - pieces * behind
    timing.by_kind[LINKS] = exposed
    timing.by_kind[NETWORK] = NETWORK_EXPOSED * crossing
    timing.hidden_s += gathers + reductions + sums + crossing - exposed - NETWORK_EXPOSED * crossing


def is_scattered(layout: Layout, machine: Machine) -> bool:
    """True if gradients go to their shards by `core.weight.scattered_gradient`."""
    if machine.platform != "tpu":
        return False
    return scatters(CHIPS[machine.kind].device_kind, layout.sizes, layout.ways("batch"))


def is_all_reduced(machine: Machine, ways: int) -> bool:
    """True if TPU compilers make an all-reduce of the sum of gradients whose shards `ways` devices
    hold: a reduce-scatter goes around a ring, which they find in a plane of the torus."""
    if machine.where is None:
        return False
    return len(spanned(ways // machine.where.family.devices_per_chip, machine.where) or ()) > 2


def uses(layout: Layout, weight: Weight) -> int:
    """Times that a microbatch gathers a weight and reduces its gradient: the head once for
    each chunk of logits, unless `train.head_gradient` says otherwise."""
    is_head = weight.part in ("embedding", "head") and products(layout, weight)
    if not is_head or layout.run.train.head_gradient == "once":
        return 1
    return -(-layout.seq_len // layout.chunk)


def activation_sums_s(layout: Layout, machine: Machine) -> float:
    """The residual stream that is gathered and scattered over `tensor`, and what attention
    exchanges over `context`, of one microbatch.

    A block gathers its input and scatters its result; on the way back it gathers its result's
    gradient and its input, for the weights' gradients, and scatters its input's gradient.
    """
    seconds = 0.0
    tensor, context = layout.sizes["tensor"], layout.sizes["context"]
    whole = layout.tokens * layout.work.embed_dim * layout.activation_bytes
    if tensor > 1:
        into = [
            w
            for w in layout.stock.model_weights
            if w.stacked and w.param.is_matrix and "embed" in w.param.outputs
        ]
        again = not layout.remat.keeps(ATTENTION)  # attention's result
        passes = 5 * sum(layout.share(w) for w in into) + again
        moved = whole * (tensor - 1) / tensor * passes
        seconds += layout.layers * moved / rate(machine, tensor)
    if context > 1:
        seconds += context_bytes(layout) / rate(machine, context)
    return seconds


def rate(machine: Machine, ways: int) -> float:
    """Bytes per second that a device receives from a group of this many devices."""
    if ways > machine.group_size:
        return machine.network_bytes_per_s
    return machine.links(ways) * machine.link_bytes_per_s


# Nine of ten rows of `benchmarks/published_tpu.toml` that nothing was fitted to lie within COMPILED
# of what `benchmarks/plan_accuracy.py` predicts of them, and within QUICK of what it does with
# `--quick`. All of them are dense decoders; where nothing was fitted, the interval is wider.
COMPILED = 0.20
QUICK = 0.20
FARTHER = 0.15
"""Added for experts, for adapters on a frozen base, and for a generation without a published run.
For two published Mixtral 8x7B runs on v6e (capacity 1.25, tokens dropped), `--quick` predicts 6 %
and 12 % more time than was measured (`docs/internals/plan-accuracy.md`)."""
ASSUMED = 0.75
"""Interval for cards of which no step was compared, and for CPUs, of which one run was."""
COMPARED = ("h100",)
PRODUCTS = 0.25
"""Interval for those: three steps of rows of one document are within 12 %
(`benchmarks/plan_gpu.py`)."""
PACKED = 0.5
"""Added for attention's share of a GPU's step where nothing is known of the documents: packed rows
then count as one each, and one with 14 took 0.6 of the time."""


def gpu_error_share(took: Timing, machine: Machine, run: Run) -> float:
    """Half the width of the interval around a step of the run on GPUs."""
    known = machine.packed_share is not None or run.data.pack.attention == "row"
    share = PRODUCTS + (0.0 if known else PACKED) * took.by_kind["attention"] / took.step_s
    return share if machine.kind in COMPARED else max(ASSUMED, share)


def error_share(kind: str, run: Run, *, compiled: bool) -> float:
    """Half the width of the interval around a step of the run on a machine of this kind: a TPU
    generation, or another of which nothing is known."""
    if kind not in CHIPS:
        return ASSUMED
    weights = [w for stock in stocks_of(run) for w in stock.weights]
    farther = not CHIPS[kind].calibrated or any(w.is_expert or not w.trained for w in weights)
    return (COMPILED if compiled else QUICK) + FARTHER * farther
