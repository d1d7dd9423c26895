"""Causal attention for TPUs, on each device's own rows and heads: `tpu_row_attention` where rows
fit it, `tpu_long_attention` beyond, JAX's splash attention on v2 and v3.

    q [B, T, N, H], k v [B, T, K, H] --shard_map: batch, heads--> one Pallas kernel per row

Scores never leave the chip's vector memory, forward or backward; blocks that the mask hides
are skipped. The kernel is `jax.experimental.pallas.ops.tpu.splash_attention`; it keeps the
output and the log of the softmax sum, named ATTENTION, for the backward pass. It reads q, k
and v with the sequence in the vector lanes: heads of 64 or 96 would leave lanes empty.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from lmwright.core.compute import ATTENTION, LANES
from lmwright.core.sharding import by_shard
from lmwright.kernels import select, tpu_row_attention
from lmwright.nn import attention
from lmwright.nn.attention import Scoring

TILE = 16  # sublanes in bfloat16; our own kernels take heads that fill them
FUSED_LEN = 4096  # tokens; the fused backward keeps one partial dq for each block of keys


def fits(seq_len: int, early: bool = False) -> bool:
    """True if rows of this length divide into the kernel's blocks; v2 and v3 have no room for
    longer rows."""
    return seq_len % LANES == 0 and not (early and seq_len > FUSED_LEN)


def causal_attention(
    q: Array, k: Array, v: Array, segment_ids: Array, scoring: Scoring,
    *, early: bool = False, interpret: bool = False,
) -> Array:  # fmt: skip
    """As `nn.attention.causal_attention`, which also takes rows that are no multiple of 128.

    `early` is for v2 and v3, whose kernels cannot multiply bfloat16 and have half the vector
    memory. `interpret` runs the kernel step by step on any platform, for tests.
    """
    if not fits(q.shape[1], early):
        return attention.causal_attention(q, k, v, segment_ids, scoring)

    def local(q: Array, k: Array, v: Array, ids: Array) -> Array:
        if not early and tpu_row_attention.fits(q.shape[1], q.shape[3], q.dtype.itemsize):
            return tpu_row_attention.causal_attention(q, k, v, ids, scoring, interpret=interpret)
        if not early and q.shape[3] % TILE == 0:
            attend = select.KERNELS["tpu long attention"]
            return attend(q, k, v, ids, scoring, interpret=interpret)
        return splash_attention(q, k, v, ids, ids, scoring, early=early, interpret=interpret)

    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and mesh.size > 1:
        local = by_shard(local)
    return local(q, k, v, segment_ids)


def splash_attention(
    q: Array, k: Array, v: Array, q_ids: Array, k_ids: Array, scoring: Scoring,
    *, early: bool, interpret: bool,
) -> Array:  # fmt: skip
    """Queries [B, T, N, H] at the end of keys and values [B, S, K, H]."""
    dtype, (_, t, n, h), s = q.dtype, q.shape, k.shape[1]
    q, window = q * scoring.scale, scoring.window
    if early:
        q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    seen = masks.CausalMask((t, s), s - t)
    if window is not None and window < s:
        seen = masks.LocalMask((t, s), (window - 1, 0), s - t)
    kernel = splash.make_splash_mha(
        masks.MultiHeadMask([seen] * n),
        block_sizes=block_sizes(t, h, early, num_keys=s),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=scoring.soft_cap,
        residual_checkpoint_name=ATTENTION,
        interpret=interpret,
    )

    def row(q: Array, k: Array, v: Array, q_ids: Array, k_ids: Array) -> Array:
        by_heads = (a.swapaxes(0, 1) for a in (q, k, v))  # [N, T, H]
        out = kernel(*by_heads, segment_ids=splash.SegmentIds(q_ids, k_ids))
        return out.swapaxes(0, 1)

    return jax.vmap(row)(q, k, v, q_ids, k_ids).astype(dtype)


def block_sizes(
    seq_len: int, head_dim: int, early: bool = False, *, num_keys: int | None = None
) -> splash.BlockSizes:
    """Blocks for rows of `seq_len` tokens, at the end of `num_keys` if those are more: large ones
    that the generations still compile."""
    share = -(-head_dim // LANES) * (4 if early else 1)  # of a block in vector memory
    most, keys = max(1024 // share // LANES, 1) * LANES, num_keys or seq_len

    def block(length: int) -> int:
        return next(size for size in range(most, 0, -LANES) if length % size == 0)

    fused = keys <= FUSED_LEN
    minor = splash.QKVLayout.SEQ_MINOR
    return splash.BlockSizes(
        block_q=block(seq_len),
        block_kv=block(keys),
        block_kv_compute=_divisor(block(keys), 512),
        block_q_dkv=block(seq_len),
        block_kv_dkv=block(keys),
        block_kv_dkv_compute=_divisor(block(keys), 512),
        block_q_dq=None if fused else block(seq_len),
        block_kv_dq=None if fused else block(keys),
        use_fused_bwd_kernel=fused,
        q_layout=minor,
        k_layout=minor,
        v_layout=minor,
    )


def _divisor(block: int, most: int) -> int:
    return next(size for size in range(most, 0, -LANES) if block % size == 0)
