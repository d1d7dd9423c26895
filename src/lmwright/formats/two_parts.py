"""Both models of a run of replaced tokens at its start, out of weights that others trained.

    train.init_from -----------+--> encoder, head over tokens --------------> discriminator
                               +--> its first layers, head over the vocabulary --+
    objective.generator_from ------ instead, if set -----------------------------+--> generator

The discriminator's own table is the difference of the two, so it computes what it did before. A
head that neither place has starts fresh. The head over tokens is `mask_predictions` in Microsoft's
checkpoints, which may lie beside `lm_predictions`; names without `deberta.` are read, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lmwright.core.param import Tree, init_weights, nest, walk
from lmwright.errors import UserError
from lmwright.formats.hf_stream import from_hf, on_devices
from lmwright.formats.open import RUN, Origin
from lmwright.formats.safetensors import TensorFiles
from lmwright.formats.text_tensors import TextTensors
from lmwright.formats.weights import load_run_weights, refuse_difference
from lmwright.models.detector import HEAD, TABLE, Detector
from lmwright.models.hf.detector import POSITIONS as POSITION_TABLE
from lmwright.models.mask_decoder import POSITIONS, MaskDecoder
from lmwright.models.over import OverEncoder, encoder_of
from lmwright.models.text_part import TextPart
from lmwright.objectives.rtd import DISCRIMINATOR, GENERATOR
from lmwright.program.plan import Plan

FORM = TextPart(
    "DebertaV2",
    {
        "cls.predictions.transform.": "lm_predictions.lm_head.",
        "cls.predictions.bias": "lm_predictions.lm_head.bias",
        "embeddings.": "deberta.embeddings.",  # of an encoder that was saved alone
        "encoder.": "deberta.encoder.",
    },
    {
        "cls.predictions.decoder.": "copy of the embedding in the head",
        "lm_predictions.lm_head.decoder.": "copy of the embedding in the head",
        **dict.fromkeys(("pooler.", "classifier.", "qa_outputs."), "head of another use"),
        **dict.fromkeys(
            (f"{body}embeddings.position_ids" for body in ("", "deberta.")), "numbers of positions"
        ),
    },
)
"""Location of the weights in a folder of DebertaV2, whatever its class."""


@dataclass(frozen=True)
class Some(OverEncoder):
    """An encoder with the heads, over its vocabulary and over tokens, that are there, and the
    positions of a mask decoder."""

    called: ClassVar[str] = "a part"

    names: frozenset[str]

    @property
    def hf(self) -> Any:
        """The detector's table of names, which has those of both heads, and positions."""
        table = Detector(self.encoder).hf
        table.weights = {**table.weights, **MaskDecoder(self.encoder).hf.weights}
        return table

    def spec(self) -> Tree:
        """The weights that are there."""
        both = MaskDecoder(self.encoder).spec() | Detector(self.encoder).spec()
        return {name: tree for name, tree in both.items() if name in self.names}


def two_parts(
    plan: Plan, origin: Origin, generator: Origin | None = None
) -> tuple[Tree, list[str], str]:
    """The weights of both models on the plan's devices, names of those that start fresh, and where
    the generator is from. Raises UserError for weights that are not of this run's models."""
    parts = read_parts(plan, origin)
    layers = plan.run.objective.generator(plan.run.model).num_layers
    if generator is not None:
        weights = read_parts(plan, generator)[GENERATOR]
        depth, source = _depth(weights), f"generator of {generator.path}"
        if POSITIONS in weights and plan.run.objective.mask_decoder == "none":
            source += " without its positions, as objective.mask_decoder = 'none'"
        if depth != layers:
            raise UserError(
                f"{generator.path} has {depth} layers and the "
                f"generator {layers}; set objective.generator_layers = {depth}"
            )
        parts[GENERATOR] = weights
    else:
        depth = _depth(parts[GENERATOR])
        source = f"the generator has the first {layers} of {depth} layers"
        if depth == layers and parts[GENERATOR] is not parts[DISCRIMINATOR]:
            source = "generator of the same run"
        if depth < layers:
            raise UserError(
                f"{origin.path} has a generator of {depth} layers, fewer than {layers}; set "
                f"objective.generator_layers = {depth}"
            )
    spec = plan.spec
    fresh = [
        f"{part}.{name}"
        for part, trees in spec.items()
        for name in trees
        if name not in parts[part]
    ]
    build = jax.jit(partial(_joined, spec, fresh, layers), out_shardings=plan.shardings)
    return build(parts, jax.random.key(plan.run.seed)), fresh, source


def read_parts(plan: Plan, place: Origin) -> dict[str, Tree]:
    """Weights of a place for each of the two models, on the plan's devices: the same for both, but
    from a run that trained both. Raises UserError where it is no model of this shape."""
    model = place.model
    encoder = encoder_of(model)
    if encoder.kind != plan.run.model.kind:
        raise UserError(
            f"{place.path}: holds a {encoder.kind!r} model, and this run trains a "
            f"{plan.run.model.kind!r}; start from one of that kind"
        )
    shardings = {**plan.shardings[GENERATOR], **plan.shardings[DISCRIMINATOR]}
    if place.kind == RUN:
        parts = _of_run(place, dict(walk(shardings)))
    else:
        tree = _of_folder(place, encoder, shardings)
        parts = {DISCRIMINATOR: tree, GENERATOR: tree}
    for part, tree in parts.items():
        _refuse_other(place, tree, plan.spec[part])
    return parts


def _of_run(place: Origin, shardings: Mapping[str, Any]) -> dict[str, Tree]:
    run, w = load_run_weights(place.path, place.step)
    names = (DISCRIMINATOR, GENERATOR) if run.objective.parts else ("",)
    trees = []
    for name in names:
        objective = run.objective.part(name) if name else run.objective
        kept = walk(objective.exported(run.model, w)[1])
        trees.append(nest((path, on_devices(jax.device_get(a), shardings[path]))
                          for path, a in kept if path in shardings))  # fmt: skip
    return {DISCRIMINATOR: trees[0], GENERATOR: trees[-1]}


def _of_folder(place: Origin, encoder: Any, shardings: Tree) -> Tree:
    where = str(place.path)
    tensors = TextTensors(TensorFiles(place.path), FORM, where)
    every, over = set(encoder.spec()), set(encoder.head_weights(encoder.spec())) - {TABLE}
    there = lambda prefix: any(name.startswith(prefix) for name in tensors)  # noqa: E731
    names = every if there("lm_predictions.") else every - over
    names |= {HEAD} if there("mask_predictions.") else set()
    names |= {POSITIONS} if POSITION_TABLE in tensors else set()
    model = Some(encoder, frozenset(names))
    where_to = {name: shardings.get(name, shardings["relative"]) for name in names}
    return from_hf(model, tensors, where, dtype=jnp.float32, shardings=where_to)


def _refuse_other(place: Origin, tree: Tree, spec: Tree) -> None:
    """UserError where weights of the same name have other shapes, but for the number of layers."""
    common = [name for name in spec if name in tree]
    refuse_difference(place, _shapes(spec, common), _shapes(tree, common))


def _shapes(tree: Tree, names: list[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of the named weights by path, without the axis of layers."""
    leaves = walk({name: tree[name] for name in names})
    return {path: leaf.shape[stacked(path) :] for path, leaf in leaves}


def stacked(path: str) -> int:
    """1 for a weight that has the layers on its first axis, 0 for others."""
    return int(path.startswith("layers."))


def _depth(tree: Tree) -> int:
    return next(leaf.shape[0] for path, leaf in walk(tree) if stacked(path))


def _joined(spec: Tree, fresh: list[str], layers: int, own: Tree, key: jax.Array) -> Tree:
    """The weights of both models in one tree; traceable."""
    new = init_weights(spec, key)
    w = {
        part: {name: new[part][name] if f"{part}.{name}" in fresh else own[part][name]
               for name in trees}
        for part, trees in spec.items()
    }  # fmt: skip
    of_generator = w[GENERATOR]
    w[GENERATOR] = nest(
        (path, leaf[:layers] if stacked(path) else leaf) for path, leaf in walk(of_generator)
    )
    beside = w[DISCRIMINATOR][TABLE] - of_generator[TABLE]
    w[DISCRIMINATOR] = w[DISCRIMINATOR] | {TABLE: beside}
    return w
