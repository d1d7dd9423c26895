"""Training whose matrices of attention and mlps multiply in 8-bit floats (`core.float8`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax import Array
from jax.sharding import Mesh

from lmwright.core.leaves import Float8
from lmwright.core.param import Param, Tree, nest, walk
from lmwright.errors import UserError
from lmwright.models.counts import is_layer_matrix, part_of
from lmwright.program.trainee import FullTraining, Trainee, spec_of

LEAST = (8, 9)  # compute capability: Ada, then Hopper and Blackwell
MULTIPLE = 16  # of both sides of a matrix, which cuBLAS asks for


def is_narrow(param: Param) -> bool:
    """True for weights that multiply in 8 bits: not those of experts, the head and embeddings."""
    if not is_layer_matrix(param) or part_of(param) == "experts":
        return False
    return all(size % MULTIPLE == 0 for size in param.matrix_shape)


def refuse_devices(platform: str, kind: str, capability: tuple[int, ...] = ()) -> None:
    """Raises UserError for devices that do not multiply 8-bit floats; CPUs stand in for those that
    do. `capability` is the compute capability of a GPU."""
    if platform == "cpu" or (platform == "gpu" and capability >= LEAST):
        return
    raise UserError(
        f"train.precision: {kind} does not multiply 'fp8', which GPUs do from Ada and Hopper on; "
        "use 'bf16'"
    )


@dataclass(frozen=True)
class Float8Training(FullTraining):
    """All weights are trained in float32; matrices of the layers multiply in 8 bits."""

    @cached_property
    def _narrow(self) -> frozenset[str]:
        """Paths of the weights that multiply in 8 bits. Raises UserError where there are none."""
        params = dict(walk(spec_of(self.run)))
        narrow = frozenset(path for path, param in params.items() if is_narrow(param))
        if any(param.ternary for param in params.values()) or not narrow:
            raise UserError(
                f"train.precision: the {self.run.model.kind!r} model has no matrices for 'fp8'; "
                "use 'bf16'"
            )
        return narrow

    @cached_property
    def trainees(self) -> tuple[Trainee, ...]:
        """The model."""
        _ = self._narrow  # refuses before anything is made
        return super().trainees

    def refuse(self, mesh: Mesh, active: Sequence[Trainee]) -> None:
        """Raises UserError where the devices do not multiply 8-bit floats."""
        if isinstance(mesh, Mesh):  # on paper the machine is asked, not its mesh
            device = mesh.devices.flat[0]
            capability = tuple(map(int, getattr(device, "compute_capability", "0.0").split(".")))
            refuse_devices(device.platform, device.device_kind, capability)

    def bind(self, frozen: Tree, parts: Any, key: Array | None = None, dropout: Any = None) -> Tree:
        """The weights with leaves that multiply in 8 bits."""
        return nest((p, Float8(a) if p in self._narrow else a) for p, a in walk(parts))
