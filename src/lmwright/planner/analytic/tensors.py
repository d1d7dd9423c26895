"""Tensors that the backward pass reads: saved on the device, kept on the host, or recomputed.

    Layout, policy of rematerialization --> [Tensor] --> table of `plan`, plan.json, plan.html

Sizes are of one device, without the padding of tiles. Names are those of the weights whose product
a tensor is, without their stack; layers of several kinds are added up.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from lmwright.core.compute import ATTENTION, HEADS
from lmwright.kernels.relu_signs import SIGNS
from lmwright.planner.analytic.layout import Layout
from lmwright.planner.analytic.memory import (
    BEFORE_NORM,
    Saved,
    attention_bytes,
    is_recomputed,
    keeps_attention,
    saved_results,
)
from lmwright.planner.analytic.stock import Weight
from lmwright.planner.units import memory_size

SAVED, OFFLOADED, RECOMPUTED = "saved", "on the host", "computed again"
SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One result of the forward pass, or moments."""

    name: str
    fate: str
    """`saved`, `on the host` or `computed again`."""
    shape: tuple[int, ...]
    """Shape in one layer and microbatch on one device; empty where several arrays are added up."""
    chip_bytes: float
    """Bytes alive at once on the device: of all layers, or of one on its way or computed again."""
    host_bytes: float
    times: int
    """Times that it is computed in a step: layers x microbatches."""
    needed_by: tuple[str, ...]
    """Operations that read it in the backward pass."""

    def line(self) -> str:
        """Row of the table."""
        dims = "x".join(map(str, self.shape))
        chip, host = (memory_size(size, width=8) for size in (self.chip_bytes, self.host_bytes))
        return (
            f"  {chip if self.chip_bytes else '-':>12}  {host if self.host_bytes else '-':>12}  "
            f"{self.times:>5}  {self.name}{f' [{dims}]' if dims else ''}, {self.fate}, "
            f"for {', '.join(self.needed_by)}"
        )


def tensors(layouts: Sequence[Layout]) -> list[Tensor]:
    """Every tensor of a plan's models, the largest first."""
    backward = (layout for layout in layouts if not layout.work.forward_only)
    every = [tensor for layout in backward for tensor in _tensors(layout)]
    some = [tensor for tensor in every if tensor.chip_bytes + tensor.host_bytes > 0]
    return sorted(some, key=lambda t: (-t.chip_bytes - t.host_bytes, t.name))


def tensor_lines(every: Sequence[Tensor]) -> list[str]:
    """The table of the largest; nothing where nothing is kept for a backward pass."""
    if not every:
        return []
    head = (
        "tensors that the backward pass reads "
        "(bytes on chip, bytes on host, times computed per step)"
    )
    more = f"  and {len(every) - SHOWN} smaller (--json)" if len(every) > SHOWN else ""
    return [head, *(tensor.line() for tensor in every[:SHOWN]), *([more] if more else []), ""]


def tensors_json(every: Sequence[Tensor]) -> list[dict]:
    """The entry in plan.json."""
    return [asdict(tensor) for tensor in every]


def _tensors(layout: Layout) -> Iterator[Tensor]:
    weights = {w.path: w for w in layout.stock.model_weights}
    yield from _joined(
        _saved(layout, saved, weights.get(saved.name.removesuffix(BEFORE_NORM)))
        for saved in saved_results(layout)
    )
    yield from _joined(_recomputed(layout))
    moments = layout.host_optimizer_bytes
    if moments:
        yield Tensor(
            name="moments",
            fate=OFFLOADED,
            shape=(),
            chip_bytes=0.0,
            host_bytes=moments,
            times=1,
            needed_by=("the optimizer",),
        )


def _times(layout: Layout, share: float = 1.0) -> int:
    return round(share * layout.layers * layout.run.train.num_microbatches)


def _saved(layout: Layout, saved: Saved, weight: Weight | None) -> Tensor:
    """A result that is kept; of a mean layer, so that all layers have it that many times."""
    share = layout.share(weight) if weight else 1.0
    whole = layout.layers * saved.bytes * layout.ticks
    one_layer = saved.bytes / share
    signs = weight is not None and layout.keeps_signs(weight)
    return Tensor(
        name=_short(saved.name),
        fate=OFFLOADED if saved.on_host else SAVED,
        shape=_shape(layout, saved, weight, 1 / SIGNS if signs else 1.0),
        chip_bytes=one_layer if saved.on_host else whole,
        host_bytes=whole if saved.on_host else 0.0,
        times=_times(layout, share),
        needed_by=_readers(layout, saved, weight),
    )


def _recomputed(layout: Layout) -> Iterator[Tensor]:
    """Products and attention that the backward pass computes again, one layer at a time."""
    train = layout.run.train
    chunk = min(1.0, (train.mlp_chunk_tokens or layout.seq_len) / layout.seq_len)
    for w in _products(layout):
        if is_recomputed(layout, w):
            of_mlp = w.is_wide or "mlp" in w.param.inputs
            part = chunk if of_mlp and not w.is_expert else 1.0
            result = Saved(w.path, part * layout.output_bytes(w))
            yield Tensor(
                name=_short(w.path),
                fate=RECOMPUTED,
                shape=_shape(layout, result, w, part),
                chip_bytes=result.bytes,
                host_bytes=0.0,
                times=round(_times(layout, layout.share(w)) / part),
                needed_by=_readers(layout, result, w),
            )
    if layout.attention is not None and not keeps_attention(layout):
        result = Saved(ATTENTION, attention_bytes(layout))
        yield Tensor(
            name=ATTENTION,
            fate=RECOMPUTED,
            shape=_shape(layout, result, None),
            chip_bytes=result.bytes,
            host_bytes=0.0,
            times=_times(layout),
            needed_by=_readers(layout, result, None),
        )


def _products(layout: Layout) -> list[Weight]:
    return [w for w in layout.stock.model_weights if w.stacked and w.param.is_matrix]


def _short(path: str) -> str:
    """A weight's own name, without its stack and place in it."""
    return path.rpartition(".")[2]


def _joined(every: Iterable[Tensor]) -> Iterator[Tensor]:
    """Tensors of the same name and shape as one: those of layers of several kinds."""
    sums: dict[tuple, Tensor] = {}
    for t in every:
        key = t.name, t.fate, t.shape
        if key not in sums:
            sums[key] = t
            continue
        old, apart = sums[key], t.fate == SAVED  # other layers' own are not there at once
        sums[key] = replace(
            old,
            chip_bytes=old.chip_bytes + t.chip_bytes if apart else old.chip_bytes,
            host_bytes=old.host_bytes + t.host_bytes,
            times=old.times + t.times,
            needed_by=tuple(dict.fromkeys(old.needed_by + t.needed_by)),
        )
    yield from sums.values()


def _shape(
    layout: Layout, saved: Saved, weight: Weight | None, part: float = 1.0
) -> tuple[int, ...]:
    """Rows, tokens and widths on one device; of a product as its arrow says."""
    rows, ways = round(layout.rows), layout.ways("batch", "seq")
    tokens = round(layout.seq_len / ways)
    if weight is None:
        if saved.name == ATTENTION and layout.attention is not None:
            heads = layout.attention.num_heads // layout.ways("batch", "seq", "heads")
            return rows, tokens, heads, layout.attention.head_dim
        if saved.name == "block input":
            return rows, round(layout.seq_len / layout.ways("batch", "stream")), _width(layout)
        return ()
    outputs = weight.param.outputs
    if weight.is_expert:  # of the experts that a token is sent to
        return rows, tokens, round(weight.per_token * weight.fan_out)
    if outputs == ("embed",):
        return rows, round(part * layout.seq_len / layout.ways("batch", "stream")), _width(layout)
    sizes = weight.param.shape[len(weight.param.shape) - len(outputs) :]
    cut = (size // layout.ways("batch", "seq", *outputs[: i + 1]) for i, size in enumerate(sizes))
    return rows, round(part * tokens), *cut


def _width(layout: Layout) -> int:
    return layout.work.embed_dim


def _readers(layout: Layout, saved: Saved, weight: Weight | None) -> tuple[str, ...]:
    """Readers of a result in the backward pass, by the arrows: the products that take it in, for
    the gradients of their weights, and what lies between."""
    inside = _products(layout)
    if weight is None:
        if saved.name == ATTENTION:
            after = [w for w in inside if "head_dim" in w.param.inputs]
            return ("attention", *_names(after))
        if saved.name == "block input":
            again = [w for w in inside if is_recomputed(layout, w)]
            attends = layout.attention is not None and not keeps_attention(layout)
            return ("norms", *_names(again), *(("attention",) if attends else ()))
        return ("gradients of the block",)
    if saved.name.endswith(BEFORE_NORM):
        return ("norms",)
    if weight.product_name == HEADS:
        return ("attention",)
    outputs = weight.param.outputs
    after = [w for w in inside if w.param.inputs and w.param.inputs[-1] == outputs[-1]]
    if "mlp" in weight.param.inputs:
        return ("routing",) if weight.is_routed else ("norms",)
    if outputs == ("embed",):  # added to the stream: what comes after it in the block
        wide = [w for w in inside if w.is_wide]
        return ("norms", *_names(wide))
    if layout.keeps_signs(weight):
        return ("activation",)
    between = ("activation",) if weight.is_wide else ()
    return (*_names(after), *between) or ("routing",)


def _names(weights: Iterable[Weight]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_short(w.path) for w in weights))
