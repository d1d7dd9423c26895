"""Stock: the weights of a model in a run, its optimizer's arrays and its work, on no mesh yet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from lmwright.config.run import Run, seq_len_of
from lmwright.core.compute import GATE, HEADS, MATMUL, WIDE_MATMUL
from lmwright.core.contract import Work
from lmwright.core.param import Param, walk
from lmwright.kernels.relu_signs import SIGNS
from lmwright.models.counts import part_of
from lmwright.optim.build import state_slots
from lmwright.program.trainee import Held, training_of


@dataclass(frozen=True)
class Weight:
    """One Param of a run, with its place in it."""

    path: str
    param: Param
    part: str
    """embedding, attention, mlp, norms, biases or head."""
    layers: int
    """Number of layers that have it; 1 outside the stack."""
    stacked: bool
    """True for one of a stack of layers."""
    fan_in: int
    fan_out: int
    active: float
    """Fraction of it that each token meets."""
    bytes: float
    """Bytes of one element on the devices."""
    trained: bool
    adds_to: str
    """Path of the weight whose product this one's is added to; empty for a model's own."""
    signs: bool = False
    """True if the signs of its product are enough for the backward pass (`kernels.relu_signs`)."""

    @cached_property
    def is_expert(self) -> bool:
        """True if this weight is one of several experts', which `expert` shards, so that it is not
        gathered over that axis."""
        return "experts" in self.param.batch

    @cached_property
    def is_routed(self) -> bool:
        """True for an expert that some tokens are sent to, and others are not."""
        return self.is_expert and self.active < 1

    @cached_property
    def per_token(self) -> float:
        """Products of one token with a matrix of a layer: with experts, those it is sent to."""
        return self.active * (self.param.size / self.layers / (self.fan_in * self.fan_out))

    @cached_property
    def is_wide(self) -> bool:
        """True if its product has the width of the mlp."""
        return self.param.outputs[-1:] == ("mlp",)

    @cached_property
    def product_name(self) -> str:
        """The name by which `core.compute` knows its product."""
        if self.is_wide:
            return GATE if self.path.endswith("gate") else WIDE_MATMUL
        return HEADS if self.param.outputs[-1:] == ("head_dim",) else MATMUL


@dataclass(frozen=True, eq=False)
class Stock:
    """The weights of a model in a run, its optimizer's arrays, and its work."""

    work: Work
    weights: tuple[Weight, ...]
    optimizer: tuple[tuple[tuple[str, ...], tuple[int, ...], int, bool], ...]
    """(axes, shape, bytes of an element, True if on the host) of each array."""

    @cached_property
    def model_weights(self) -> tuple[Weight, ...]:
        """The weights without the factors that adapters add."""
        return tuple(w for w in self.weights if not w.adds_to)

    @cached_property
    def matrices(self) -> tuple[Weight, ...]:
        """The matrices of layers."""
        return tuple(w for w in self.weights if w.stacked and w.param.is_matrix)

    @cached_property
    def tables(self) -> tuple[Weight, ...]:
        """The model's matrices beside those of layers."""
        return tuple(w for w in self.model_weights if w.param.is_matrix and not w.stacked)

    @cached_property
    def elements(self) -> int:
        return sum(w.param.size for w in self.weights)


@dataclass(frozen=True)
class _Key:
    """The fields of a run that its stock depends on."""

    text: str
    run: Run = field(compare=False)

    @classmethod
    def of(cls, run: Run) -> "_Key":
        batch = run.train.global_batch_size
        parts = run.model, run.objective, run.optim, run.lora, run.qat, batch, run.train.precision
        return cls(f"{parts!r} {seq_len_of(run)}", run)


def stocks_of(run: Run) -> tuple[Stock, ...]:
    """The stock of each model of the run's objective."""
    return _stocks(_Key.of(run))


@lru_cache(256)
def _stocks(key: _Key) -> tuple[Stock, ...]:
    run = key.run
    training = training_of(run)
    held, slots = training.held(), []
    for trainee in training.trainees:
        for name, slot in walk(state_slots(trainee.optim, trainee.spec)):
            path = name.partition(".")[2]  # of the weight; empty for the count of steps
            slots.append((path, slot.param, np.dtype(slot.dtype).itemsize, slot.on_host))
    stocks = []
    works = run.objective.works(run.model, seq_len_of(run))
    named = tuple(f"{name}." for name in works if name)
    for name, work in works.items():
        inside = f"{name}." if name else ""
        mine = [w for w in held if w.path.startswith(inside or named) == bool(inside)]
        arrays = [(p.axes, p.shape, *rest) for path, p, *rest in slots if path.startswith(inside)]
        weights = [_weight(work, held, held.path.removeprefix(inside)) for held in mine]
        stocks.append(Stock(work, tuple(_with_signs(run, weights)), tuple(arrays)))
    return tuple(stocks)


def _weight(work: Work, held: Held, path: str) -> Weight:
    param = held.param
    stacked = param.batch[:1] == ("layers",)
    fan_in, fan_out = param.matrix_shape if param.is_matrix else (0, 0)
    return Weight(
        path=path,
        param=param,
        part=part_of(param),
        layers=param.shape[0] if stacked else 1,
        stacked=stacked,
        fan_in=fan_in,
        fan_out=fan_out,
        active=held.share * work.active.get(held.adds_to or path, 1.0),
        bytes=held.bytes,
        trained=held.trained,
        adds_to=held.adds_to,
    )


def _with_signs(run: Run, weights: Sequence[Weight]) -> Iterator[Weight]:
    """`weights`, with the marks of those that lead to a ReLU before a frozen product. Among layers
    of several kinds a product does not see that its weight is frozen."""
    trained = {w.adds_to or w.path for w in weights if w.trained}
    normed = {w.path.rpartition(".")[0] for w in weights if w.path.endswith("mlp_sub_norm")}
    relu = getattr(run.model, "mlp", "") == "relu" and seq_len_of(run) % SIGNS == 0
    for w in weights:
        stack, _, name = w.path.rpartition(".")
        leads = relu and name == "up" and "." not in stack and not (w.is_expert or w.adds_to)
        yield replace(w, signs=leads and f"{stack}.down" not in trained and stack not in normed)
