"""Windows of attention in Hugging Face's config.json: `layer_types` and what preceded it."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lmwright.errors import UserError
from lmwright.models.decoder import LayerReach
from lmwright.models.hf.pairs import Derived, Json, refuse_number

Kind = TypeVar("Kind", bound=str)
EVERY = "sliding_window_pattern"
TYPES: dict[LayerReach, str] = {"local": "sliding_attention", "global": "full_attention"}


def pattern_of(kinds: Sequence[Kind]) -> list[Kind]:
    """The shortest pattern that, over and over, gives the kind of each layer."""
    lengths = range(1, len(kinds) + 1)
    fits = lambda n: all(each == kinds[i % n] for i, each in enumerate(kinds))  # noqa: E731
    return list(kinds[: next(n for n in lengths if fits(n))])


def reach_of(layer_types: Any, num_layers: int, where: str) -> list[LayerReach]:
    """The reach of each layer. Raises UserError where a type is unknown or one is missing."""
    return kinds_of(layer_types, TYPES, num_layers, where)


def kinds_of(
    layer_types: Any, types: Mapping[Kind, str], num_layers: int, where: str
) -> list[Kind]:
    """The kind of each layer by `layer_types`, whose words are `types`. Raises UserError where a
    type is unknown or one is missing."""
    names = {theirs: ours for ours, theirs in types.items()}
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise UserError(f"{where}: layer_types does not name the type of {num_layers} layers")
    if unknown := sorted(set(layer_types) - set(names)):
        raise UserError(
            f"{where}: layer_types holds {', '.join(map(repr, unknown))}; supported are "
            f"{', '.join(names)}"
        )
    return [names[each] for each in layer_types]


def reach_said(config: Any, every: int, num_layers: int, where: str) -> list[LayerReach]:
    """The reach of each layer by `layer_types`; without any, the last of each `every` is global.
    Raises UserError as `reach_of` does."""
    return kinds_said(config, TYPES, every, num_layers, where)


def reach_of_every(config: Any, num_layers: int, where: str) -> list[LayerReach]:
    """The reach of each layer by `layer_types`, or by the number before it, whose multiples are
    global. Raises UserError where neither says it."""
    every = config.get(EVERY, 4)
    if config.get("layer_types") is None:
        refuse_period(EVERY, every, where)
    return reach_said(config, every, num_layers, where)


def kinds_said(
    config: Any, types: Mapping[Kind, str], every: int, num_layers: int, where: str
) -> list[Kind]:
    """The kind of each layer by `layer_types`; without any, the last of each `every` is of the
    second of two `types`. Raises UserError as `kinds_of` does."""
    if config.get("layer_types") is not None:
        return kinds_of(config["layer_types"], types, num_layers, where)
    usual, last = types
    return [usual if (i + 1) % every else last for i in range(num_layers)]


def refuse_period(key: str, every: Any, where: str) -> None:
    """Raises UserError where `key`, which stands for `layer_types` that are missing, is no number
    of layers."""
    if not isinstance(every, int) or every < 1:
        raise UserError(
            f"{where}: {key} is {every!r}, and layer_types are missing; list the type of each "
            "layer there"
        )


def window_said(
    config: Mapping[str, Any], usual: int, reach: Sequence[LayerReach], where: str
) -> int | None:
    """The window of local layers, `usual` where config.json says none. Raises UserError where it
    says that there is none for layers that have one, which transformers does not compute."""
    window: int | None = config.get("sliding_window", usual)
    if window is None and "local" in reach:
        says = "layer_types has" if config.get("layer_types") else "without layer_types there is"
        raise UserError(
            f"{where}: sliding_window is null, but {says} sliding_attention; set it, or remove it "
            f"for {usual}"
        )
    return window


def first_global(usual: int) -> Derived:
    """Pair of the window, `usual` where config.json says none, and of the reach of each layer;
    where it says no `layer_types`, the first of every four is global."""

    def read(config: Json, fields: Json, where: str) -> Json:
        num_layers = fields["num_layers"]
        reach: list[LayerReach] = ["local" if i % 4 else "global" for i in range(num_layers)]
        if config.get("layer_types") is not None:
            reach = reach_of(config["layer_types"], num_layers, where)
        window = window_said(config, usual, reach, where) or usual
        return {"window": window, "layer_pattern": pattern_of(reach)}

    return Derived(read, lambda model, *_: window_config(model))


def always_window(config: Mapping[str, Any], usual: int, where: str) -> int:
    """The window of an architecture that always has one, `usual` where config.json says none.
    Raises UserError for null, which transformers' class does not take."""
    window = config.get("sliding_window", usual)
    if window is None:
        raise UserError(
            f"{where}: sliding_window is null, but its architecture always has one; set it, or "
            f"remove it for {usual}"
        )
    refuse_number("sliding_window", window, where, whole=True)
    return int(window)


def window_config(model: Any) -> dict[str, Any]:
    """The keys of config.json that say the window and the reach of each layer."""
    return {"sliding_window": model.window, "layer_types": [TYPES[kind] for kind in model.kinds]}


def reach_config(model: Any) -> dict[str, Any]:
    """These keys of a model whose kinds of layers are more than a reach."""
    reach: Sequence[LayerReach] = model.reaches
    return {"sliding_window": model.window, "layer_types": [TYPES[each] for each in reach]}


def window_fields(window: int | None, reach: Sequence[LayerReach]) -> dict[str, Any]:
    """`window` and `layer_pattern` for layers of this reach."""
    if window is None or "local" not in reach:
        return {"window": None}
    return {"window": window, "layer_pattern": pattern_of(reach)}
