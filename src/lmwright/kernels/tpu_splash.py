"""Attention by JAX's splash kernel, for v2, v3 and heads that do not fill tiles.

The kernel is `jax.experimental.pallas.ops.tpu.splash_attention`; it keeps the output and the log
of the softmax sum, named ATTENTION, for the backward pass. It reads q, k and v with the sequence
in the vector lanes: heads of 64 or 96 would leave lanes empty.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from lmwright.core.compute import ATTENTION, LANES
from lmwright.kernels.tpu_attention import FUSED_LEN
from lmwright.nn.attention import Scoring

BOTH_WAYS = "both_ways"  # scope of kernels that look ahead, which `kernel_cost` reads


def splash_attention(
    q: Array, k: Array, v: Array, q_ids: Array, k_ids: Array, scoring: Scoring,
    *, early: bool, interpret: bool, after: int | None = 0,
) -> Array:  # fmt: skip
    """Attention of T queries [B, T, N, H] aligned with the last T of S keys and values [B, S, K,
    H]. A query sees keys of its own segment: up to `scoring.window` back, itself included, and
    `after` forward (None: no limit). `early` and `interpret` as in
    `tpu_attention.causal_attention`."""
    dtype, (_, t, n, h), s = q.dtype, q.shape, k.shape[1]
    q, window = q * scoring.scale, scoring.window
    if early:
        q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
    before = None if window is None or window >= s else window - 1
    seen = masks.FullMask((t, s)) if after is None else masks.CausalMask((t, s), s - t)
    if before is not None or after:
        seen = masks.LocalMask((t, s), (before, after), s - t)
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

    rows = jax.vmap(row)
    if after != 0:
        rows = jax.named_scope(BOTH_WAYS)(rows)
    return rows(q, k, v, q_ids, k_ids).astype(dtype)


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
        block_kv_compute=_divisor(block(keys)),
        block_q_dkv=block(seq_len),
        block_kv_dkv=block(keys),
        block_kv_dkv_compute=_divisor(block(keys)),
        block_q_dq=None if fused else block(seq_len),
        block_kv_dq=None if fused else block(keys),
        use_fused_bwd_kernel=fused,
        q_layout=minor,
        k_layout=minor,
        v_layout=minor,
    )


def _divisor(block: int) -> int:
    """Largest divisor of a block in whole lanes, 512 at most."""
    return next(size for size in range(512, 0, -LANES) if block % size == 0)
