"""Parameter counts by part, read off the arrows: no formula that could disagree with a model."""

from dataclasses import dataclass, replace
from typing import Any

import jax

from lmwright.core.compute import Compute
from lmwright.core.param import Param, count_params, walk
from lmwright.models.cached import new_cache
from lmwright.models.decoder import active_share

PARTS = ("embedding", "attention", "mlp", "experts", "router", "norms", "biases", "head")


@dataclass(frozen=True)
class PartCount:
    """Weights of one part: in one layer, and altogether. `layers` is 1 outside the layers."""

    part: str
    per_layer: int
    layers: int
    inside: bool = True
    """True for a part of the layers."""

    @property
    def total(self) -> int:
        return self.per_layer * self.layers


def part_of(param: Param) -> str:
    """The part a weight belongs to, by what its axes are called."""
    if "blocks" in param.axes:  # block-diagonal products, and convolutions
        return "attention"
    if not param.is_matrix:
        return "biases" if param.fill == 0 else "norms"
    if "vocab" in param.inputs:
        return "embedding"
    if "vocab" in param.outputs:
        return "head"
    if {"experts", "gates"} & set(param.batch + param.outputs):
        return "experts" if "experts" in param.batch else "router"
    axes = param.inputs + param.outputs
    return "attention" if {"heads", "kv_heads", "distances", "rank"} & set(axes) else "mlp"


def is_layer_matrix(param: Param) -> bool:
    """True for the matrices that [qat] rounds: those of attention, mlps and experts; embeddings,
    head and routers stay floats."""
    inside = param.is_matrix and "layers" in param.batch
    return inside and part_of(param) in ("attention", "mlp", "experts")


def count_by_part(model: Any) -> list[PartCount]:
    """Counts in the order of PARTS, weights inside and outside the layers apart, and those of
    layers in which the part is of another size; their totals sum to the model's count."""
    stacks: dict[tuple[str, str], int] = {}
    depth = {"": 1}
    for path, param in walk(model.spec()):
        inside = param.batch[:1] == ("layers",)
        stack = path.rpartition(".")[0] if inside else ""
        depth[stack] = param.shape[0] if inside else 1
        place = (part_of(param), stack)
        stacks[place] = stacks.get(place, 0) + param.size // depth[stack]
    layers: dict[tuple[str, bool, int], int] = {}
    for (part, stack), size in stacks.items():
        key = (part, stack != "", size)
        layers[key] = layers.get(key, 0) + depth[stack]
    order = sorted(layers, key=lambda key: (PARTS.index(key[0]), not key[1], -layers[key]))
    return [
        PartCount(part, size, layers[part, inside, size], inside) for part, inside, size in order
    ]


def count_active(model: Any) -> int:
    """Number of weights that a token meets, embedding and head included."""
    spec = walk(model.spec())
    return round(sum(param.size * active_share(model, path, param) for path, param in spec))


def params_report(name: str, model: Any) -> str:
    """The counts as a text table, with the tied and the untied total."""
    rows = [("part", "each layer", "layers", "together")]
    counts = count_by_part(model)
    for count in counts:
        part, inside = count.part, count.inside
        part = model.mixer if part == "attention" else part
        if part in ("norms", "biases") and not inside:
            part += " (last)"
        rows.append(
            (
                part,
                f"{count.per_layer:,}" if inside else "",
                f"x {count.layers}" if inside else "",
                f"{count.total:,}",
            )
        )
    for head in ("tied", "untied"):
        total = count_params(replace(model, head=head).spec())
        here = "  <- this model" if model.head == head else ""
        rows.append((f"total, {head}", "", "", f"{total:,}{here}"))
    if (active := count_active(model)) != count_params(model.spec()):
        rows.append(("active for a token", "", "", f"{active:,}"))
    widths = [max(len(row[i].partition("  <-")[0]) for row in rows) for i in range(4)]
    lines = [
        f"{part:<{widths[0]}}  {each:>{widths[1]}}  {layers:>{widths[2]}}  "
        f"{number:>{widths[3]}}{arrow}{note}".rstrip()
        for part, each, layers, last in rows
        for number, arrow, note in [last.partition("  <-")]
    ]
    rule = "-" * len(lines[0])
    title = f"{name}: {_shape(model)}"
    ends = len(rows) - len(counts)
    table = [title, "", lines[0], rule, *lines[1 : 1 - ends], rule, *lines[1 - ends :]]
    return "\n".join([*table, *cache_lines(model)])


def cache_bytes(model: Any, length: int, precision: str = "bf16") -> int:
    """Bytes that `generate` carries from token to token for one row of `length` tokens: keys and
    values, or a memory of constant size."""
    cache = jax.eval_shape(lambda: new_cache(model, 1, length, Compute(precision)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache["layers"]))


def cache_lines(model: Any) -> list[str]:
    """Lines about the kv cache, and that of as many kv heads as query heads (MHA) or one (MQA), or
    about a state of constant size; none for a model that looks both ways and carries nothing."""
    if model.both_ways:
        return []
    constant = cache_bytes(model, 0)
    if constant == cache_bytes(model, model.seq_len):
        size = f"{constant:,} bytes, {constant / 2**20:,.1f} MiB"
        return ["", f"state of a row of any length: {size}"]
    heads = {"this model": model.num_kv_heads}
    if not model.own_keys:
        heads |= {"MHA": model.num_heads, "MQA": 1}
    sizes = {
        name: cache_bytes(replace(model, num_kv_heads=count), model.seq_len)
        for name, count in heads.items()
    }
    rows = ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in sizes.items())
    token = (sizes["this model"] - constant) // model.seq_len
    beside = f" and {constant:,} for a row" if constant else ""
    return [
        "",
        f"kv cache in bf16: {token:,} bytes for a token{beside}; for a row of {model.seq_len:,}: "
        f"{rows}",
    ]


def _shape(model: Any) -> str:
    wide = [f"mlp {model.mlp_dim}"] if hasattr(model, "mlp_dim") else []
    if experts := model.mixtures.get("router"):
        wide.append(f"{experts.experts_per_token} of {experts.num_experts} x {experts.mlp_dim}")
    ffn = f"{', '.join(wide)} ({model.mlp}), " if wide and model.mlp else ""
    return (
        f"{model.kind}, {model.num_layers} layers, embed {model.embed_dim}, {ffn}"
        f"{model.heads_text}, vocab {model.vocab_size}"
    )
