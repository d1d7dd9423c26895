"""Causal attention for TPUs: JAX's splash attention, on each device's own rows and heads.

    q [B, T, N, H], k v [B, T, K, H] --shard_map: batch, heads--> one Pallas kernel per row

Scores never leave the chip's vector memory, forward or backward; blocks above the diagonal
are skipped. The kernel is `jax.experimental.pallas.ops.tpu.splash_attention`; it keeps the
output and the log of the softmax sum, named ATTENTION, for the backward pass.
"""

from functools import partial

import jax
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from podsmith.core.sharding import ACTIVATIONS, partition
from podsmith.core.stack import ATTENTION
from podsmith.nn import attention

LANES = 128  # blocks are multiples of it
BLOCKS = (1024, 512, 256, 128)


def fits(seq_len: int) -> bool:
    """Whether rows of this length divide into the kernel's blocks."""
    return seq_len % LANES == 0


def causal_attention(
    q: Array, k: Array, v: Array, segment_ids: Array, scale: float, *, interpret: bool = False
) -> Array:
    """As `nn.attention.causal_attention`, which also takes rows that are no multiple of 128.

    `interpret` runs the kernel step by step on any platform, for tests.
    """
    if not fits(q.shape[1]):
        return attention.causal_attention(q, k, v, segment_ids, scale)
    local = partial(_local, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        spec = lambda axes: partition(tuple(axes.split()), ACTIVATIONS)  # noqa: E731
        heads, kv_heads = spec("batch seq heads head_dim"), spec("batch seq kv_heads head_dim")
        specs = heads, kv_heads, kv_heads, spec("batch seq")
        local = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
    return local(q * scale, k, v, segment_ids)


def _local(q: Array, k: Array, v: Array, segment_ids: Array, *, interpret: bool) -> Array:
    _, t, n, h = q.shape
    kernel = _kernel(t, n, h, interpret)

    def row(q: Array, k: Array, v: Array, ids: Array) -> Array:
        by_heads = (a.swapaxes(0, 1) for a in (q, k, v))  # [N, T, H]
        out = kernel(*by_heads, segment_ids=splash.SegmentIds(ids, ids))
        return out.swapaxes(0, 1)

    return jax.vmap(row)(q, k, v, segment_ids)


def _kernel(seq_len: int, num_heads: int, head_dim: int, interpret: bool):
    fits_vmem = lambda size: size * head_dim <= BLOCKS[0] * LANES  # noqa: E731
    block = next(size for size in BLOCKS if seq_len % size == 0 and fits_vmem(size))
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=min(block, 512),
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=min(block, 512),
        block_q_dq=block,
        block_kv_dq=block,
    )
    return splash.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((seq_len, seq_len))] * num_heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENTION,
        interpret=interpret,
    )
