"""Parameter counts by part, read off the arrows: no formula that could disagree with a model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmwright.core.param import Param, count_params, walk
from lmwright.errors import UserError
from lmwright.models.reasoning import PREFIX
from lmwright.models.validate import validated

PARTS = ("embedding", "attention", "mlp", "experts", "router", "norms", "biases", "head")


@dataclass(frozen=True)
class PartCount:
    """Weights of one part: in one layer, and altogether. `layers` is 1 outside the layers."""

    part: str
    per_layer: int
    layers: int
    inside: bool = True
    """Whether it is a part of layers."""

    @property
    def total(self) -> int:
        return self.per_layer * self.layers


def part_of(param: Param) -> str:
    """The part a weight belongs to, by what its axes are called."""
    if not param.is_matrix:
        return "biases" if param.fill == 0 else "norms"
    if "vocab" in param.inputs:
        return "embedding"
    if "vocab" in param.outputs:
        return "head"
    if "experts" in param.batch + param.outputs:
        return "experts" if "experts" in param.batch else "router"
    axes = param.inputs + param.outputs
    return "attention" if {"heads", "kv_heads"} & set(axes) else "mlp"


def count_by_part(model: Any) -> list[PartCount]:
    """Counts in the order of PARTS, weights inside and outside the layers apart, and those of
    layers in which the part is of another size; their totals sum to the model's count."""
    stacks: dict[tuple[str, str], int] = {}
    depth = {"": 1}
    for path, param in walk(model.spec()):
        inside = param.batch[:1] == ("layers",)
        stack = path.rpartition(".")[0] if inside else ""
        depth[stack] = param.shape[0] if inside else 1
        key = (part_of(param), stack)
        stacks[key] = stacks.get(key, 0) + param.size // depth[stack]
    layers: dict[tuple[str, bool, int], int] = {}
    for (part, stack), size in stacks.items():
        key = (part, stack != "", size)
        layers[key] = layers.get(key, 0) + depth[stack]
    order = sorted(layers, key=lambda key: (PARTS.index(key[0]), not key[1], -layers[key]))
    return [
        PartCount(part, size, layers[part, inside, size], inside) for part, inside, size in order
    ]


def active_share(model: Any, path: str, param: Param) -> float:
    """How much of a weight each token meets: all of it, but of experts those it is sent to."""
    if "experts" not in param.batch:
        return 1.0
    reasoning = path.rpartition(".")[2].startswith(PREFIX)
    how = model.reasoning.experts if reasoning else model.experts
    return how.experts_per_token / how.num_experts


def count_active(model: Any) -> int:
    """Weights that a token meets, embedding and head included."""
    spec = walk(model.spec())
    return round(sum(param.size * active_share(model, path, param) for path, param in spec))


def params_report(name: str, model: Any) -> str:
    """The sum as a text table, with the tied and the untied total."""
    rows = [("part", "each layer", "layers", "together")]
    counts = count_by_part(model)
    for count in counts:
        part, inside = count.part, count.inside
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
    return "\n".join([title, "", lines[0], rule, *lines[1 : 1 - ends], rule, *lines[1 - ends :]])


def _shape(model: Any) -> str:
    wide = [f"mlp {model.mlp_dim}"] if hasattr(model, "mlp_dim") else []
    if (experts := getattr(model, "experts", None)) is not None:
        wide.append(f"{experts.experts_per_token} of {experts.num_experts} x {experts.mlp_dim}")
    return (
        f"{model.kind}, {model.num_layers} layers, embed {model.embed_dim}, {', '.join(wide)} "
        f"({model.mlp}), {model.num_heads} query and {model.num_kv_heads} kv heads of "
        f"{model.head_dim}, vocab {model.vocab_size}"
    )


def find_model(name: str, overrides: Sequence[str] = ()) -> Any:
    """The model of a preset, a run file, a run directory, a Hugging Face folder, a GGUF file or
    a hub name, with `model.field=value` overrides; no weights are read. Raises UserError where
    there is none of that name."""
    path = Path(name)
    of_a_run = path.suffix == ".toml" or (path / "run.toml").exists()
    if not of_a_run and (path.exists() or path.suffix == ".gguf" or "://" in name):
        from lmwright.formats.header import model_at

        return with_overrides(model_at(name), overrides, "the model")
    if of_a_run:
        from lmwright.config.load import load_run

        return load_run(path / "run.toml" if path.is_dir() else path, overrides).model
    return _preset(name, overrides)


def _preset(name: str, overrides: Sequence[str]) -> Any:
    from lmwright import presets
    from lmwright.config.errors import nearest

    known = presets.of_section("model")
    if name not in known:
        cure = nearest(name, list(known), what="there are")
        raise UserError(f"{name}: neither a preset nor a file or folder of a model; {cure}")
    return with_overrides(known[name](), overrides, "a preset")


def with_overrides(model: Any, overrides: Sequence[str], what: str) -> Any:
    """A model with words like `model.rope_scaling.factor=4` on top; `model.` may be left out.
    Raises UserError for a field that `what` does not have or a value that does not fit."""
    from lmwright.config.errors import nearest
    from lmwright.config.fields import field_types, to_plain, with_unset
    from lmwright.config.text import parse_override

    plain = to_plain(model)
    parsed = [(*parse_override(text), text) for text in overrides]
    for keys, value, text in sorted(parsed, key=lambda item: item[0][-1] != "kind"):
        first, *inner = keys[1:] if keys[0] == "model" and keys[1:] else keys
        names = list(field_types(type(model)))
        if first not in names:
            cure = nearest(str(first), names, what="the model's fields are")
            raise UserError(f"{text}: {what} has no such field; {cure}")
        if not inner:
            plain[first] = value
            continue
        table = plain.get(first) if isinstance(plain.get(first), dict) else {}
        if inner == ["kind"] and table.get("kind") != value:
            table = {}  # another kind starts anew
        plain[first] = _put(table, inner, value)
    return validated(type(model), with_unset(type(model), plain), "model.")


def _put(table: dict[str, Any], keys: list[Any], value: Any) -> dict[str, Any]:
    """The table with one value put in, at any depth."""
    key, *inner = keys
    if inner:
        value = _put(table.get(key) if isinstance(table.get(key), dict) else {}, inner, value)
    return {**table, key: value}


def params_command(name: str, overrides: Sequence[str] = ()) -> None:
    """Prints the count of whatever `find_model` finds by that name, by part."""
    print(params_report(name, find_model(name, overrides)))
