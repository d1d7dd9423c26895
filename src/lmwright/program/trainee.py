"""Trainees: what a run trains, each with its own weights, optimizer, data and length.

    frozen weights ----------------+
                                   +--bind--> the weights that the objective sees
    weights of a trainee --parts---+

Full training has one trainee, the model, and nothing frozen. Adapters are trainees beside a
frozen base (`program.lora_training`). The step, the state and the loop know no other difference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

from jax import Array
from jax.sharding import Mesh

from lmwright.config.registry import Registry
from lmwright.config.run import Run
from lmwright.core.param import Param, Tree, init_weights, walk
from lmwright.core.sharding import weight_shardings

MODEL = "model"  # the trainee of a run that trains all weights


@dataclass(frozen=True, eq=False, kw_only=True)
class Trainee:
    """Weights that one optimizer trains on one set of prepared data."""

    name: str
    spec: Tree
    """Weights of the trainee as Params."""
    optim: Any
    data: str
    """Folder of the prepared data."""
    rows: int
    """Rows of each step."""
    steps: int
    head_flops: int = 0
    """FLOPs of a token for the gradient of a head that is trained beside adapters."""
    dropout: float = 0.0
    patience: int | None = None
    """Evaluations without a better held-out loss until it stops."""
    init_from: str | None = None
    """Folder of the weights that it starts from; fresh ones if None."""


@dataclass(frozen=True)
class Frozen:
    """The weights that are not trained, on the devices, and what tells them from others."""

    weights: Tree
    path: str = ""
    """Path they came from; empty for weights made from the run's seed."""
    hash: str = ""
    read: Callable[[], Tree] | None = None
    """Rereads the original weights from disk as float32 host arrays; None for a run's own."""
    whole: Tree = field(default_factory=dict)
    """Weights beside them that trainees start with in place of fresh ones, on the host."""
    teacher: str = ""
    """Hash of a teacher among the weights; empty without one."""


@dataclass(frozen=True)
class Held:
    """A weight of a run as its devices hold it during training."""

    path: str
    param: Param
    bytes: float = 4.0
    """Bytes of one element, scales included."""
    trained: bool = True
    share: float = 1.0
    """Fraction of the rows that meet it."""
    adds_to: str = ""
    """Path of the weight whose product this one's is added to: of an adapter's factor."""


T = TypeVar("T", bound=Trainee)


@dataclass(frozen=True)
class Training(Generic[T]):
    """Trainees, and how they join the frozen weights. These methods are those of a run without
    frozen weights."""

    run: Run
    flops_per_weight: ClassVar[int] = 6
    """FLOPs that a token costs per matmul weight of the model, forward and backward."""
    freezes: ClassVar[bool] = False
    """True where there are frozen weights."""

    @property
    def trainees(self) -> tuple[T, ...]:
        """The trainees, in the order of the run."""
        raise NotImplementedError

    @property
    def listed(self) -> str:
        """Dotted path of the list of trainees in the run file, each of which may be added or
        removed; empty if there is no such list."""
        return ""

    def held(self) -> list[Held]:
        """Every weight, trained and frozen, as devices hold it."""
        return [Held(path, param) for path, param in walk(spec_of(self.run))]

    def refuse(self, mesh: Mesh, active: Sequence[T]) -> None:
        """Raises UserError where these trainees cannot train on the mesh."""

    def abstract_frozen(self, mesh: Mesh) -> Tree:
        """The frozen weights as ShapeDtypeStructs with shardings."""
        return {}

    def make_frozen(self, key: Array) -> Tree:
        """Frozen weights from a key; traceable."""
        return {}

    def shardings(self, trainee: T, mesh: Mesh) -> Tree:
        """Shardings of a trainee's weights. Raises UserError where one does not divide."""
        return weight_shardings(trainee.spec, mesh)

    def init(self, trainee: T, frozen: Tree, key: Array) -> Tree:
        """A trainee's fresh weights; traceable."""
        return init_weights(trainee.spec, key)

    def parts(self, trainee: T, weights: Tree) -> Any:
        """A trainee's weights as `bind` takes them; traceable."""
        return weights

    def stack(self, parts: Sequence[Any], order: Sequence[int]) -> Any:
        """Parts of several trainees with a leading axis, one entry for each of `order`."""
        raise NotImplementedError("a run that trains all weights has one trainee")

    def bind(self, frozen: Tree, parts: Any, key: Array | None = None, dropout: Any = None) -> Tree:
        """The model's weights as the objective sees them. With a key, `dropout` is applied."""
        return parts

    def scale_updates(self, updates: Tree) -> Tree:
        """The optimizer's updates as they are applied."""
        return updates

    def merged(self, trainee: T, frozen: Tree, weights: Tree) -> Tree:
        """float32 weights of the model with a trainee in it."""
        return weights

    def codes(self, trainee: T, frozen: Tree, weights: Tree) -> dict[str, tuple[Array, Array]]:
        """Integers and scales of the weights that are rounded, by path; their products are those
        of `merged`."""
        return {}


@dataclass(frozen=True)
class FullTraining(Training[Trainee]):
    """All weights of the model are trained."""

    @cached_property
    def trainees(self) -> tuple[Trainee, ...]:
        """The model."""
        run = self.run
        return (
            Trainee(
                name=MODEL,
                spec=spec_of(run),
                optim=run.optim,
                data=run.data.dir,
                rows=run.train.global_batch_size,
                steps=num_steps(run),
            ),
        )


def spec_of(run: Run) -> Tree:
    """All weights of a run as Params."""
    return run.objective.spec(run.model)


def num_steps(run: Run) -> int:
    """The optimizer steps of a run; None, against its type, until its epochs are counted by
    `program.length`."""
    return run.train.steps  # type: ignore[return-value]


TRAININGS = Registry(
    "lmwright.program",
    {
        "full": "trainee.FullTraining", "lora": "lora_training.LoraTraining",
        "qat": "qat_training.QatTraining", "lora in qat": "qat_training.LowRankQatTraining",
        "float8": "float8_training.Float8Training",
        "distill": "distill_training.DistillTraining",
    },
)  # fmt: skip


def training_of(run: Run) -> Training:
    """The trainees of a run; the one place that decides them. Raises UserError for adapters that
    do not fit the run."""
    full = "float8" if run.train.precision == "fp8" else "full"
    kinds = (full, "lora") if run.qat is None else ("qat", "lora in qat")
    training = TRAININGS[kinds[run.lora is not None]](run)
    return TRAININGS["distill"](run, training) if run.objective.has_teacher else training
