"""mLSTM (https://arxiv.org/abs/2405.04517): a memory of one matrix a head, written and read by
every token.

    m' = max(log f + m, i)      C' = f' C + i' k v^T      n' = f' n + i' k
    h  = C'^T q / (max(|n'^T q|, e^-m') + eps)            f' = e^(log f + m - m'), i' = e^(i - m')

`mlstm` computes a row in chunks (https://arxiv.org/abs/2503.14376): inside a chunk every token
meets those before it by products of matrices, and a memory goes from chunk to chunk. `step` is the
recurrence above, for one token after the other. Both start afresh at each document, and padding
changes nothing.

    D_ts = sum of log f over s + 1 .. t, plus i_s     within one document, else -inf
    r_t  = sum of log f since the chunk or the document began, plus m or 0
    M_t  = max(r_t, max_s D_ts), which is m after token t

B batch, T time, N heads, K and H dims of a key and of a value, L tokens of a chunk.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.nn.kept_inputs import keeps_inputs

EPS = 1e-6  # of the denominator, as in the papers' code


class Memory(NamedTuple):
    """State of the heads of rows after some token, float32."""

    matrix: Array  # C, [B, N, K, H]
    norm: Array  # n, [B, N, K]
    scale: Array  # m, [B, N]: the logarithm of what the other two are divided by


def empty(batch_size: int, num_heads: int, key_dim: int, head_dim: int) -> Memory:
    """The memory before the first token."""
    rows = batch_size, num_heads
    shapes = (*rows, key_dim, head_dim), (*rows, key_dim), rows
    return Memory(*(jnp.zeros(shape, jnp.float32) for shape in shapes))


@keeps_inputs
def mlstm(q: Array, k: Array, v: Array, i: Array, f: Array, ids: Array, chunk_tokens: int) -> Array:
    """h [B, T, N, H] of queries and keys [B, T, N, K], values [B, T, N, H] and what goes into the
    gates [B, T, N], within the segments `ids` [B, T], of which 0 is padding."""
    first = empty(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    return mlstm_from(first, q, k, v, i, f, ids, chunk_tokens=chunk_tokens)[0]


def mlstm_from(
    memory: Memory, q: Array, k: Array, v: Array, i: Array, f: Array, ids: Array,
    *, chunk_tokens: int,
) -> tuple[Array, Memory]:  # fmt: skip
    """`mlstm` of tokens after those of a memory, and the memory after them."""
    length = q.shape[1]
    if length == 1:
        return step(memory, q, k, v, i, f, ids)
    size = min(chunk_tokens, length)
    i, log_f = gates(i, f, ids)
    docs = documents(ids)
    begins = beginnings(docs)
    arrays = [_by_chunk(a, size) for a in (q * q.shape[-1] ** -0.5, k, v)]
    arrays += [_by_chunk(i, size, -jnp.inf), _by_chunk(log_f, size)]
    arrays += [_rows_by_chunk(docs, size, "edge"), _rows_by_chunk(begins, size, "constant")]
    memory, h = lax.scan(jax.checkpoint(_chunk, prevent_cse=False), memory, tuple(arrays))
    h = jnp.moveaxis(h, 0, 2)  # [B, N, chunks, L, H]
    h = h.reshape(*h.shape[:2], -1, h.shape[-1])[:, :, :length]
    return jnp.moveaxis(h, 1, 2).astype(v.dtype), memory


def step(
    memory: Memory, q: Array, k: Array, v: Array, i: Array, f: Array, ids: Array
) -> tuple[Array, Memory]:
    """The recurrence for one token: arrays as in `mlstm_from`, with T = 1."""
    i, log_f = (a[:, 0] for a in gates(i, f, ids))  # [B, N]
    q, k, v32 = (a[:, 0].astype(jnp.float32) for a in (q, k, v))
    scale = jnp.maximum(log_f + memory.scale, i)
    keep, write = jnp.exp(log_f + memory.scale - scale), jnp.exp(i - scale)
    k = k * write[..., None]
    matrix = keep[..., None, None] * memory.matrix + k[..., :, None] * v32[..., None, :]
    norm = keep[..., None] * memory.norm + k
    q = q * q.shape[-1] ** -0.5
    read = jnp.einsum("bnk,bnkh->bnh", q, matrix, preferred_element_type=jnp.float32)
    along = jnp.einsum("bnk,bnk->bn", q, norm, preferred_element_type=jnp.float32)
    h = read / _denominator(along, scale)[..., None]
    return h[:, None].astype(v.dtype), Memory(matrix, norm, scale)


def gates(i: Array, f: Array, ids: Array) -> tuple[Array, Array]:
    """Logarithms of the input and the forget gate, float32 [B, T, N]; padding writes nothing and
    forgets nothing."""
    real = (ids > 0)[..., None]
    i = jnp.where(real, i.astype(jnp.float32), -jnp.inf)
    return i, jnp.where(real, jax.nn.log_sigmoid(f.astype(jnp.float32)), 0.0)


def documents(ids: Array) -> Array:
    """int [B, T]: the document of each token, where padding belongs to the one before it."""
    return jnp.maximum(lax.cummax(ids, axis=1), 1)


def beginnings(docs: Array) -> Array:
    """bool [B, T]: where a document begins; not at the start of a row that goes on with the
    first one, whose memory is empty or that of the tokens before."""
    return jnp.concatenate([docs[:, :1] != 1, docs[:, 1:] != docs[:, :-1]], axis=1)


def _by_chunk(a: Array, size: int, fill: float = 0.0) -> Array:
    """[chunks, B, N, L, ...] of [B, T, N, ...]; `fill` is behind the last token."""
    a = jnp.pad(a, ((0, 0), (0, -a.shape[1] % size), *((0, 0),) * (a.ndim - 2)),
                constant_values=fill)  # fmt: skip
    a = a.reshape(a.shape[0], -1, size, *a.shape[2:])  # [B, chunks, L, N, ...]
    return jnp.transpose(a, (1, 0, 3, 2, *range(4, a.ndim)))


def _rows_by_chunk(a: Array, size: int, mode: str) -> Array:
    """[chunks, B, L] of [B, T]."""
    a = jnp.pad(a, ((0, 0), (0, -a.shape[1] % size)), mode=mode)
    return jnp.moveaxis(a.reshape(a.shape[0], -1, size), 1, 0)


def _chunk(memory: Memory, arrays: tuple[Array, ...]) -> tuple[Memory, Array]:
    """The memory after a chunk, and float32 h [B, N, L, H]."""
    q, k, v, i, log_f, docs, begins = arrays  # [B, N, L, ...]; the last two [B, L]
    fresh = jnp.cumsum(begins, axis=1)[:, None] > 0  # [B, 1, L]: since a document began
    together = jnp.tril(docs[:, :, None] == docs[:, None, :])[:, None]  # [B, 1, L, L]
    since = jnp.einsum(
        "bts,bns->bnt", together[:, 0].astype(jnp.float32), log_f, precision=lax.Precision.HIGHEST
    )
    start = since + jnp.where(fresh, 0.0, memory.scale[..., None])  # r
    decay = jnp.where(together, since[..., :, None] - since[..., None, :] + i[..., None, :],
                      -jnp.inf)  # fmt: skip
    scale = jnp.maximum(start, jnp.max(decay, axis=-1))  # M
    weights = jnp.exp(decay - scale[..., None])  # [B, N, L, L]
    carried = jnp.where(fresh, 0.0, jnp.exp(start - scale))

    wide = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = wide("bntk,bnsk->bnts", q, k) * weights
    read = wide("bntk,bnkh->bnth", q, memory.matrix.astype(q.dtype))
    along = wide("bntk,bnk->bnt", q, memory.norm.astype(q.dtype))
    h = wide("bnts,bnsh->bnth", scores.astype(v.dtype), v) + carried[..., None] * read
    h /= _denominator(jnp.sum(scores, axis=-1) + carried * along, scale)[..., None]

    last, keep = weights[..., -1, :, None], carried[..., -1]
    written = (k * last).astype(k.dtype)
    matrix = wide("bnsk,bnsh->bnkh", written, v) + keep[..., None, None] * memory.matrix
    norm = jnp.sum(k * last, axis=2) + keep[..., None] * memory.norm
    return Memory(matrix, norm, scale[..., -1]), h


def _denominator(along: Array, scale: Array) -> Array:
    return jnp.maximum(jnp.abs(along), jnp.exp(-scale)) + EPS
