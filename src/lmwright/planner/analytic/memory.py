"""Memory: what one device holds during a step, estimated without a compiler.

    state          weights, optimizer, moving average: exact, from the shardings
    cast           the weights in the precision of the products, where that is another; frozen
                   ones of attention in another layout
    gradients      of the weights; with several microbatches also their sum
    saved          what the backward pass keeps of the forward pass, layer by layer; what
                   `train.offload` puts on the host is counted apart, and what
                   `train.block_inputs` keeps in fewer bits with these
    temporaries    of the fuller of two moments: a chunk of logits with its gradient, when the
                   head's is the only gradient yet, or one layer's backward pass

Layers that are unrolled, as on GPUs, free what they saved one after the other while gradients come,
and cast their weights when they need them.

How many arrays are alive at once in the two moments is what the TPU compiler was seen to need
(`benchmarks/plan_quick.py`); it changes with the compiler.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from lmwright.core.compute import ATTENTION, BLOCK_INPUT, HEADS, MATMUL
from lmwright.kernels import gpu_attention
from lmwright.kernels.online_softmax import QUERIES
from lmwright.planner.analytic.kept_experts import kept_of_experts
from lmwright.planner.analytic.layout import WEIGHT_BYTES, Layout
from lmwright.planner.analytic.stock import Weight
from lmwright.planner.analytic.unrolled import beside_products
from lmwright.planner.units import memory_size

BEFORE_NORM = " before its norm"
LOGITS_ALIVE = 1  # float32 logits, beside their gradient for the products
CAPPED_ALIVE = 2  # and with a soft cap
BIASED_ALIVE = 0.5  # and with a bias: by the compiler one, or none in models of 256 to 384 dims
HEAD_ALIVE = 1  # the head's gradient in float32, beside that and the head for the products
GATHERED_ALIVE = 2  # a layer's weights, or their gradients, in the products' precision
WIDE_ALIVE = 4  # arrays of an mlp's width in its backward pass
ADAPTED_ALIVE = 2  # and with adapters, whose terms are added to those of the base
ROWS_ALIVE = 8  # of the rows that experts exchange, all choices of a device's tokens
ROWS_ALIVE_TPU = 5.5
WIDENED_ALIVE = 0.5  # of an expert's matrices: gathered integers, and a part of them in the wide
ROUND_ALIVE = 3  # of an expert's width, of the rows of one round
WIDE_KEPT = 3  # of them in attention's backward pass
STREAM_ALIVE = 12  # arrays of the residual stream's width in a layer without attention
MLP_STREAMS = 6  # and beside an mlp, with attention
MIXED_ALIVE = 4, 6, 5  # of the stream's, all queries' and all keys', where attention's kernel ends
SUMMED_ALIVE = 7, 4, 3  # and where the gradients of queries, keys and values are added up
ROTATIONS_ALIVE = 4  # float32 cosines and sines of half a head
WHOLE_ALIVE = 5  # of the stream put together, where tensor parallelism cuts its rows
HOST_ALIVE = 1  # a layer's results on their way to or from the host, beside those in use
SCORES_ALIVE = 3  # float32 [B, N, t, T] of t queries where attention has no kernel


@dataclass(frozen=True)
class Memory:
    """Bytes of one device at the peak of a step."""

    weights: float
    optimizer: float
    cast: float
    gradients: float
    saved: float
    temporaries: float
    host: float = 0.0
    """Bytes in the memory of the host, which is not part of the peak."""

    @property
    def state(self) -> float:
        """Bytes of the state before the first step."""
        return self.weights + self.optimizer

    @property
    def peak(self) -> float:
        return self.state + self.cast + self.gradients + self.saved + self.temporaries

    def parts(self) -> dict[str, float]:
        """Bytes by purpose, adding up to the peak."""
        return {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "weights once more, cast": self.cast,
            "gradients": self.gradients,
            "saved activations": self.saved,
            "temporaries": self.temporaries,
        }


def memory(layouts: Sequence[Layout], limit: float | None = None) -> Memory:
    """The peak of a step of a plan's models, which run one after the other. What layers of a
    pattern need from the host is fetched early, as far as a limit in bytes leaves room."""
    peak = _memory(layouts, ahead=True)
    if limit is None or peak.peak <= limit:
        return peak
    least = _memory(layouts, ahead=False)
    room = max(0, math.floor(limit - least.peak))
    return replace(least, temporaries=least.temporaries + room)


def _memory(layouts: Sequence[Layout], ahead: bool) -> Memory:
    each = [_memory_of(layout, ahead) for layout in layouts]
    sums = {f.name: sum(getattr(part, f.name) for part in each) for f in fields(Memory)}
    return Memory(**sums | {"temporaries": max(part.temporaries for part in each)})


def _memory_of(layout: Layout, ahead: bool) -> Memory:
    held, optimizer = layout.held, layout.optimizer_bytes
    trained = held["trained"] * WEIGHT_BYTES
    if layout.run.train.ema_decay is not None:
        optimizer += trained
    size = layout.activation_bytes
    cast = (held["cast"] + held["turned"]) * size if size != WEIGHT_BYTES else 0.0
    if layout.work.forward_only:
        saved, temporaries = forward_bytes(layout)
        return Memory(held["bytes"], 0.0, cast, 0.0, saved, temporaries)
    sums = trained if layout.run.train.num_microbatches > 1 else 0.0
    saved, loss, layer = saved_bytes(layout), loss_bytes(layout), layer_bytes(layout, ahead)
    moments = (saved, head_bytes(layout), loss), (saved, trained, layer)
    if layout.is_unrolled:  # one layer after the other casts its weights and frees what it saved
        cast = 0.0
        moments = *moments[:1], (saved, head_bytes(layout), layer), (0.0, trained, layer)
    saved, gradients, temporaries = max(moments, key=sum)
    return Memory(
        weights=held["bytes"],
        optimizer=optimizer,
        cast=cast,
        gradients=sums + gradients,
        saved=saved,
        host=saved_bytes(layout, on_host=True) + layout.host_optimizer_bytes,
        temporaries=temporaries,
    )


def teacher_lines(layouts: Sequence[Layout]) -> list[str]:
    """The line of a report about the weights of models that only run forward; none without."""
    held = sum(layout.held["bytes"] for layout in layouts if layout.work.forward_only)
    return [f"  {memory_size(held, width=8)}  of the weights are the teacher's"] if held else []


@dataclass(frozen=True)
class Saved:
    """A result of the forward pass that the backward pass reads: what one layer keeps of it."""

    name: str
    bytes: float
    on_host: bool = False


def saved_results(layout: Layout) -> list[Saved]:
    """Results of one microbatch that a mean layer keeps for the backward pass, by `train.remat`
    and `train.offload`."""
    return layout.once(_saved_results)


def _saved_results(layout: Layout) -> list[Saved]:
    remat, stream = layout.remat, layout.stream_bytes
    inside = [w for w in layout.stock.matrices if not (w.adds_to or layout.in_rounds(w))]
    attention = Saved("attention", attention_bytes(layout), ATTENTION in remat.offloaded)
    if remat.everything:
        # in and out of two norms and two additions, in both precisions where they differ
        around = stream * (4 + 4 * WEIGHT_BYTES / layout.activation_bytes)
        outputs = [w for w in inside if w.param.outputs != ("embed",)]
        mixing = layout.work.mixing_kept / layout.work.num_layers
        wide = (w for w in inside if w.is_wide and not layout.keeps_signs(w))
        return [
            attention,
            Saved("residual stream and norms", around),
            *(Saved(w.path, layout.kept_bytes(w)) for w in outputs),
            Saved("attention, turned around for the next product", attention_bytes(layout)),
            Saved("mlp", max((layout.output_bytes(w) for w in wide), default=0.0)),
            Saved("scores", score_bytes(layout) if layout.kernels == "reference" else 0.0),
            Saved("mixing", layout.tokens * mixing * layout.activation_bytes),
            *itertools.starmap(Saved, kept_of_experts(layout)),
        ]
    named = [w for w in inside if is_needed(layout, w) and remat.keeps(layout.kept_name(w))]
    products = [
        Saved(w.path, layout.kept_bytes(w), layout.kept_name(w) in remat.offloaded) for w in named
    ]
    before = [w for w in named if w.product_name == HEADS and layout.is_normed(w)]
    products += [  # beside what the kernel reads
        Saved(f"{w.path}{BEFORE_NORM}", plain_bytes(layout, w), MATMUL in remat.offloaded)
        for w in before
        if remat.keeps(MATMUL)
    ]
    inputs = Saved("block input", block_input_bytes(layout), BLOCK_INPUT in remat.offloaded)
    more = [Saved(name, size) for name, size in beside_products(layout).items()]
    return [inputs, *([attention] if keeps_attention(layout) else []), *products, *more]


def block_input_bytes(layout: Layout) -> float:
    """Bytes of one block's input as `train.block_inputs` keeps it."""
    values, format = layout.stream_bytes / layout.activation_bytes, layout.remat.format
    bits = 8 * layout.activation_bytes
    if format is not None:
        bits = format.bits(layout.seq_len, layout.work.embed_dim)
    return values * bits / 8


def saved_bytes(layout: Layout, *, on_host: bool = False) -> float:
    """Bytes saved for the backward pass on the device, or on the host; with pipeline stages,
    those of all their ticks."""
    saved = sum(result.bytes for result in saved_results(layout) if result.on_host == on_host)
    return layout.layers * saved * layout.ticks


def is_needed(layout: Layout, weight: Weight) -> bool:
    """True if the backward pass of a layer reads the product of a matmul. The last one of a block
    is added to the stream, and not needed again unless it is normed before; chunks do that
    within. What experts give to slots is read for the gradients of their shares."""
    if "mlp" not in weight.param.inputs:
        return True
    if weight.is_routed:
        return layout.capacity_factor(weight) is not None
    within = layout.has_chunks and layout.sizes["tensor"] == 1
    return layout.is_normed(weight) and not within


def is_recomputed(layout: Layout, weight: Weight) -> bool:
    """True if the backward pass recomputes a layer's matmul."""
    kept = layout.remat.keeps(layout.kept_name(weight)) and not layout.in_rounds(weight)
    if layout.has_chunks and "mlp" in weight.param.inputs:  # a chunk keeps nothing
        return layout.is_normed(weight)
    if layout.is_normed(weight):  # queries and keys as the kernel reads them are not enough
        kept = kept and layout.remat.keeps(MATMUL)
    return is_needed(layout, weight) and not kept


def plain_bytes(layout: Layout, weight: Weight) -> float:
    """Bytes of a mean layer's queries or keys before a kernel pads them."""
    size = weight.param.shape[-1]
    return layout.output_bytes(weight) * layout.share(weight) * size / layout.kernel_width(size)


def keeps_attention(layout: Layout) -> bool:
    """True if attention's own result is saved: rematerialization knows it by the name that the
    kernels give it."""
    remat = layout.remat
    return remat.everything or (remat.keeps(ATTENTION) and layout.kernels != "reference")


def attention_bytes(layout: Layout) -> float:
    """Bytes that attention saves of its forward pass: its output and, for each query and head,
    the float32 log of its sum."""
    m = layout.attention
    if m is None:
        return 0.0
    width = layout.kernel_width(m.head_dim) * layout.activation_bytes + 4
    return layout.tokens * m.num_heads * width / layout.ways("batch", "seq", "heads")


def score_bytes(layout: Layout) -> float:
    """Bytes of the float32 scores of one layer, where attention computes them in a device's
    memory."""
    m = layout.attention
    if m is None or layout.kernels not in ("reference", "gpu", "early gpu"):
        return 0.0
    fits = gpu_attention.fits(layout.seq_len, m.head_dim, layout.activation_bytes)
    if layout.kernels == "gpu" and fits and layout.has_kernel:  # which a ring does not have
        return 0.0
    heads = m.num_heads / layout.ways("batch", "seq", "heads")
    return layout.tokens * layout.seq_len * heads * 4


def scores_share(layout: Layout) -> float:
    """Fraction of all scores that attention computes: the reference computes masked ones, too."""
    m = layout.attention
    if m is None or layout.kernels == "reference":
        return 1.0
    return m.keys(layout.seq_len) / (layout.seq_len * len(m.windows))


def scores_alive(layout: Layout) -> float:
    """Bytes of scores that exist at once: all of a layer, or those of a few queries."""
    share = 1.0 if layout.kernels == "reference" else min(1.0, QUERIES / layout.seq_len)
    return SCORES_ALIVE * share * score_bytes(layout)


def _head(layout: Layout) -> Weight:
    """The table that logits are made with."""
    parts = {w.part: w for w in layout.stock.tables}
    return parts.get("head", parts["embedding"])


def head_bytes(layout: Layout) -> float:
    """Bytes of the head's gradient, sharded as weights are on average."""
    head = _head(layout)
    share = head.param.size / layout.stock.elements
    return layout.held["all"] * WEIGHT_BYTES * share if head.trained else 0.0


def predicted_share(layout: Layout) -> float:
    """Fraction of a row's tokens that the head runs over: all of them, or the masked ones alone."""
    return max(w.active for w in layout.stock.tables if w.part in ("head", "embedding"))


def loss_bytes(layout: Layout) -> float:
    """Bytes of a chunk of logits and what goes with it: the logits themselves, or the head's
    gradient made from theirs."""
    m, train, size = layout.work, layout.run.train, layout.activation_bytes
    ways = layout.ways("batch", "seq", "vocab")
    share = min(layout.chunk / layout.seq_len, predicted_share(layout))
    # a pipeline's microbatches come to the loss together
    together = train.num_microbatches if layout.stages > 1 else 1
    logits = together * layout.tokens * share * m.vocab_size / ways
    table = _head(layout)
    head = m.vocab_size * m.embed_dim / ways
    streams = 2 * together * layout.stream_bytes
    if not table.trained:
        gathered = head * size if layout.gathered_ways(table) > 1 else 0.0
        return LOGITS_ALIVE * logits * WEIGHT_BYTES + logits * size + gathered + streams
    capped = CAPPED_ALIVE if m.soft_capped else 0
    biased = BIASED_ALIVE if "decoder_bias" in m.spec else 0
    first = (LOGITS_ALIVE + capped + biased) * logits * WEIGHT_BYTES + (logits + head) * size
    if train.head_gradient == "once":  # which is there in every chunk, and has no copies
        return first + head * WEIGHT_BYTES + streams
    then = HEAD_ALIVE * head * WEIGHT_BYTES + (logits + 2 * head) * size
    return max(first, then) + streams


def forward_bytes(layout: Layout) -> tuple[float, float]:
    """Bytes of a model that only runs forward: its last residual stream and a chunk of its logits,
    beside the other model's, and one layer."""
    share = layout.chunk / layout.seq_len
    logits = layout.tokens * share * layout.work.vocab_size / layout.ways("batch", "seq", "vocab")
    return layout.stream_bytes + logits * WEIGHT_BYTES, layer_bytes(layout) / 2


def layer_bytes(layout: Layout, ahead: bool = True) -> float:
    """Bytes of one layer's backward pass: its gathered weights, their gradient before it is
    sharded, activations and their gradients, and what is fetched for it, or `ahead` for all layers
    of a pattern."""
    num_layers = layout.work.num_layers  # the mean of all layers
    gathered = 0.0
    for w in layout.stock.matrices:
        alive = GATHERED_ALIVE if w.trained else GATHERED_ALIVE - 1  # without its gradient
        if w.bytes < layout.activation_bytes and layout.gathered_ways(w) > 1 and w.is_expert:
            alive += WIDENED_ALIVE
        gathered += alive * w.param.size / num_layers / layout.product_ways(w)
    pieces = layout.ways("batch", "stream") // layout.ways("batch", "seq")
    fetched = sum(result.bytes for result in saved_results(layout) if result.on_host)
    return (
        gathered * layout.activation_bytes
        + max(mlp_bytes(layout), attending_bytes(layout))
        + (WHOLE_ALIVE * layout.stream_bytes * pieces if pieces > 1 else 0)
        + scores_alive(layout)
        + HOST_ALIVE * fetched * (num_places(layout) if ahead else 1)
    )


def mlp_bytes(layout: Layout) -> float:
    """Bytes of activations in the backward pass of an mlp, or of a chunk of it."""
    chunk = min(1.0, (layout.run.train.mlp_chunk_tokens or layout.seq_len) / layout.seq_len)
    wide = [w for w in layout.stock.matrices if w.is_wide]
    sent = layout.in_rounds
    largest = max(  # experts to which tokens are sent are not taken in chunks
        (layout.output_bytes(w) * (1 if w.is_expert else chunk) for w in wide if not sent(w)),
        default=0.0,
    )
    alive = ROWS_ALIVE_TPU if "tpu" in layout.kernels else ROWS_ALIVE
    half = ROUND_ALIVE / 2  # a round has room for half of all choices
    widths = ((w.per_token, alive * w.fan_in + half * w.fan_out) for w in wide if sent(w))
    rows = max((choices * width for choices, width in widths), default=0.0)
    rows *= layout.tokens * layout.activation_bytes
    adapted = any(w.adds_to for w in wide)
    streams = MLP_STREAMS if layout.attention else STREAM_ALIVE
    mlp = (WIDE_ALIVE + ADAPTED_ALIVE * adapted) * largest
    return max(mlp, rows) + streams * layout.stream_bytes


def attending_bytes(layout: Layout) -> float:
    """Bytes of activations in the backward pass of attention. The compiler computes gradients of
    the mlp's weights when it likes, so their inputs are counted as well, except with chunks."""
    m, size = layout.attention, layout.activation_bytes
    if m is None:
        return 0.0
    wide = [w for w in layout.stock.matrices if w.is_wide]
    there = [w for w in wide if not layout.in_rounds(w) and (w.is_expert or not layout.has_chunks)]
    kept = max(map(layout.output_bytes, there), default=0.0)
    kept *= WIDE_KEPT + ADAPTED_ALIVE * any(w.adds_to for w in wide)
    width = layout.tokens * layout.kernel_width(m.head_dim) * size
    queries = width * m.num_heads / layout.ways("batch", "seq", "heads")
    keys = width * m.num_kv_heads / layout.ways("batch", "seq", "kv_heads")
    arrays = max(
        streams * layout.stream_bytes + of_queries * queries + of_keys * keys
        for streams, of_queries, of_keys in (MIXED_ALIVE, SUMMED_ALIVE)
    )
    rotations = ROTATIONS_ALIVE * layout.tokens * m.head_dim / 2 * WEIGHT_BYTES
    return kept + arrays + rotations


def num_places(layout: Layout) -> int:
    """Number of layers that a scan takes at once: places in the longest pattern of kinds."""
    parts = (w.path.split(".") for w in layout.stock.model_weights if w.stacked)
    places = {(span, place) for span, place, *_ in parts if place.isdigit()}
    return max(Counter(span for span, _ in places).values(), default=1)
