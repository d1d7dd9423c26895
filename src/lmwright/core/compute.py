"""Compute: how a model is evaluated, as opposed to what it is.

Results of a layer are known by the names that `core.weight.dot` and the attention kernels give
them; a policy of rematerialization (`REMATS`) keeps some for the backward pass and recomputes the
rest. The stack applies it, and the planner asks it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from lmwright.config.registry import Registry
from lmwright.config.run import ContextAttention, HeadGradient, OffloadName, RematName

Block = Callable[..., Any]
Kernels = Literal["reference", "cpu", "gpu", "early gpu", "tpu", "early tpu"]

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}

MATMUL = "dot"
WIDE_MATMUL = "dot to mlp"  # the largest of a block, and cheap to compute again
GATE = "gate"  # as wide as they are
ATTENTION = "attention"  # the output of a kernel and the log of its softmax sum
HEADS = "heads"  # queries, keys and values as a kernel reads them
BLOCK_INPUT = "block input"  # the residual stream
OPERAND = "operand"  # what products read: a norm's result, gated activations
CAST = "cast weight"  # as products read it

HOST_MEMORY = "pinned_host"  # JAX's name of the host's memory that devices read

LANES = 128  # of a TPU's vector registers: sizes of its kernels are multiples of it
EARLY = ("TPU v2", "TPU v3")  # their kernels cannot multiply bfloat16
# no bfloat16
EARLY_GPUS = ("Tesla", "Quadro", "TITAN", "GTX", "RTX 2060", "RTX 2070", "RTX 2080", "T1000")

FORMATS = Registry("lmwright.core", {"int12": "saves.INT12", "int8": "saves.INT8"})


@dataclass(frozen=True)
class Remat:
    """One policy: the names of the results that are kept."""

    kept: frozenset[str]
    """Names of results kept on the device."""
    everything: bool = False
    """Keeps all results, named or not."""
    offloaded: frozenset[str] = frozenset()
    """Names of results kept in the memory of the host."""
    format: Any = None
    """Format of `core.saves` in which block inputs are kept; as they are if None."""

    def keeps(self, name: str) -> bool:
        """True if the backward pass reads the result of this name rather than recomputing it."""
        return self.everything or name in self.kept | self.offloaded

    def apply(self, block: Block, *, prevent_cse: bool = False, place: int = 1) -> Block:
        """`block` whose backward pass recomputes what is not kept; its input is argument number
        `place`. Outside of a loop, `prevent_cse` keeps the compiler from reusing the forward
        pass's results."""
        if self.everything:
            return block
        if self.format is not None:
            return self.format.around(self, block, place, prevent_cse)
        policies = jax.checkpoint_policies
        policy = policies.save_only_these_names(*sorted(self.kept))
        if self.keeps(ATTENTION):
            policy = policies.save_from_both_policies(policy, _is_attention_of_cudnn)
        if self.offloaded:
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=sorted(self.kept),
                names_which_can_be_offloaded=sorted(self.offloaded),
                offload_src="device", offload_dst=HOST_MEMORY,
            )  # fmt: skip
        return jax.checkpoint(block, policy=policy, prevent_cse=prevent_cse)


def _is_attention_of_cudnn(primitive: Any, *_: Any, **params: Any) -> bool:
    """True for the results of cuDNN's attention, which JAX has no name for."""
    return primitive.name == "dot_product_attention_fwd_wrapper"


REMATS: dict[RematName, Remat] = {
    "none": Remat(frozenset(), everything=True),
    "dots": Remat(frozenset({MATMUL, WIDE_MATMUL, GATE, HEADS, ATTENTION})),
    "gate": Remat(frozenset({MATMUL, WIDE_MATMUL, HEADS, ATTENTION})),
    "mlp": Remat(frozenset({MATMUL, HEADS, ATTENTION})),
    "block": Remat(frozenset()),
}
"""Policies of rematerialization, in the order of the memory that they take, the most first."""


def unrolled(remat: Remat, platform: str, num_devices: int) -> Remat:
    """The policy for layers without a loop, which never keep results that have no name: to compute
    them again takes less than to keep them. Several devices would keep whole weights."""
    if not remat.everything:
        return remat
    kept = REMATS["dots"].kept
    if platform == "gpu":
        kept |= {OPERAND, CAST} if num_devices < 2 else {OPERAND}
    return replace(REMATS["dots"], kept=kept)


OFFLOADS: dict[OffloadName, frozenset[str]] = {
    "none": frozenset(),
    "block_inputs": frozenset({BLOCK_INPUT}),
    "attention": frozenset({BLOCK_INPUT, HEADS, ATTENTION}),
    "products": frozenset({BLOCK_INPUT, MATMUL, WIDE_MATMUL, GATE, HEADS, ATTENTION}),
}


def remat_of(remat: RematName, offload: OffloadName = "none", inputs: str = "exact") -> Remat:
    """The policy that keeps what `remat` names on the device, but what `offload` names on the
    host, and block inputs as `inputs` says."""
    policy, offloaded, form = REMATS[remat], OFFLOADS[offload], FORMATS.get(inputs)
    return replace(policy, kept=policy.kept - offloaded, offloaded=offloaded, format=form)


def platform_of(kernels: str) -> str:
    """The platform that a set of kernels is for; "reference" for those of none."""
    return kernels.rpartition(" ")[2]


@dataclass(frozen=True)
class Compute:
    """Static choices of one compiled program: activation dtype, what the backward pass
    recomputes, reads from the host or in fewer bits, whether layers are unrolled, the set of
    kernels, whether each row is one document, tokens of a row whose logits or wide activations
    exist at once, how attention sees rows that are cut over devices, and the pieces in which rows
    pass through a pipeline's stages."""

    precision: str = "fp32"
    remat: RematName = "none"
    offload: OffloadName = "none"
    block_inputs: str = "exact"
    unroll: bool = False
    kernels: Kernels = "reference"
    one_document: bool = False
    loss_chunk_tokens: int = 1024
    mlp_chunk_tokens: int | None = None
    head_gradient: HeadGradient = "by_chunk"
    context_attention: ContextAttention = "ring"
    num_microbatches: int = 1

    @property
    def policy(self) -> Remat:
        """The policy of rematerialization."""
        return remat_of(self.remat, self.offload, self.block_inputs)

    @property
    def platform(self) -> str:
        """The platform that the kernels are for; "reference" for those of none."""
        return platform_of(self.kernels)

    @property
    def early(self) -> bool:
        """True for the kernels of a platform's early devices."""
        return self.kernels.startswith("early ")

    @property
    def dtype(self) -> jnp.dtype:
        return DTYPES[self.precision]
