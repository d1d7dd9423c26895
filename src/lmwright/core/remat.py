"""Remat: which results of a layer are kept for its backward pass; the rest is computed again.

Results are known by the names that `core.weight.dot` and the attention kernels give them. The
stack applies a policy, and the planner asks it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax

MATMUL = "dot"
WIDE_MATMUL = "dot to mlp"  # the largest of a block, and cheap to compute again
GATE = "gate"  # as wide as they are
ATTENTION = "attention"  # the output of a kernel and the log of its softmax sum

RematName = Literal["none", "dots", "gate", "mlp", "block"]


@dataclass(frozen=True)
class Remat:
    """One policy: the names of the results that are kept."""

    kept: frozenset[str]
    everything: bool = False
    """Keeps all results, named or not."""

    def keeps(self, name: str) -> bool:
        """True if the backward pass reads the result of this name rather than recomputing it."""
        return self.everything or name in self.kept

    def apply(self, block: Callable[..., Any], *, prevent_cse: bool = False) -> Callable[..., Any]:
        """`block` whose backward pass recomputes what is not kept. Outside of a loop,
        `prevent_cse` keeps the compiler from reusing the forward pass's results."""
        if self.everything:
            return block
        policies = jax.checkpoint_policies
        policy = policies.nothing_saveable
        if self.kept:
            policy = policies.save_only_these_names(*sorted(self.kept))
        return jax.checkpoint(block, policy=policy, prevent_cse=prevent_cse)


REMATS: dict[RematName, Remat] = {
    "none": Remat(frozenset(), everything=True),
    "dots": Remat(frozenset({MATMUL, WIDE_MATMUL, GATE, ATTENTION})),
    "gate": Remat(frozenset({MATMUL, WIDE_MATMUL, ATTENTION})),
    "mlp": Remat(frozenset({MATMUL, ATTENTION})),
    "block": Remat(frozenset()),
}
"""From what takes most memory to what takes least."""
