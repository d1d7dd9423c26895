"""State spaces of Mamba-2 (https://arxiv.org/abs/2405.21060): a memory of one matrix a head, which
fades by a factor of each token and takes in what the token writes.

    S = e^g S + dt b x^T       y = S^T c

`ssd` computes a row in chunks: inside a chunk every token meets those before it by products of
matrices, and a memory goes from chunk to chunk. `step` is the recurrence above, for one token after
the other. Both start afresh at each document, and padding changes nothing.

    D_ts = e^(sum of g over s + 1 .. t)      within one document, else 0
    y_t  = sum over s <= t of D_ts dt_s (c_t.b_s) x_s + D_t0 S^T c_t

B batch, T time, G groups of heads that share c and b, N heads, R = N / G heads of a group, K and H
dims of a memory's rows and of a head, L tokens of a chunk.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from lmwright.nn.delta_rule import empty
from lmwright.nn.kept_inputs import keeps_inputs
from lmwright.nn.mlstm import beginnings, documents


def gates(dt: Array, log_rate: Array, bias: Array, ids: Array) -> tuple[Array, Array]:
    """Step dt and log decay g of each token, float32 [B, T, N], of what goes into the steps;
    padding, where `ids` [B, T] is 0, writes nothing and fades nothing. `log_rate` and `bias` are
    [N]."""
    dt, log_rate, bias = (a.astype(jnp.float32) for a in (dt, log_rate, bias))
    dt = jnp.where((ids > 0)[..., None], jax.nn.softplus(dt + bias), 0.0)
    return dt, -jnp.exp(log_rate) * dt


@keeps_inputs
def ssd(c: Array, b: Array, x: Array, dt: Array, g: Array, ids: Array, chunk_tokens: int) -> Array:
    """y [B, T, N, H] of c and b [B, T, G, K], x [B, T, N, H], and steps and log decays [B, T, N],
    within the segments `ids` [B, T], of which 0 is padding."""
    first = empty(x.shape[0], x.shape[2], b.shape[3], x.shape[3])
    return ssd_from(first, c, b, x, dt, g, ids, chunk_tokens=chunk_tokens)[0]


def ssd_from(
    memory: Array, c: Array, b: Array, x: Array, dt: Array, g: Array, ids: Array,
    *, chunk_tokens: int,
) -> tuple[Array, Array]:  # fmt: skip
    """`ssd` of tokens after those of a memory [B, N, K, H], and the memory after them."""
    length = x.shape[1]
    if length == 1:
        return step(memory, c, b, x, dt, g)
    size, groups = min(chunk_tokens, length), b.shape[2]
    docs = documents(ids)
    # the heads of a group are apart: [B, T, G, R, H or 1]
    grouped = [a.reshape(*a.shape[:2], groups, x.shape[2] // groups, -1) for a in (x, dt, g)]
    chunks = [_by_chunk(a, size) for a in (c, b, *grouped, beginnings(docs))]
    memory = memory.reshape(memory.shape[0], groups, -1, *memory.shape[2:])
    run = jax.checkpoint(_chunk, prevent_cse=False)
    last, y = lax.scan(run, memory, (*chunks, _by_chunk(docs, size, "edge")))
    y = jnp.moveaxis(y, (0, 4), (1, 2))  # [B, C, L, G, R, H]
    y = y.reshape(x.shape[0], -1, *x.shape[2:])[:, :length]
    return y.astype(x.dtype), last.reshape(x.shape[0], x.shape[2], *last.shape[3:])


def step(memory: Array, c: Array, b: Array, x: Array, dt: Array, g: Array) -> tuple[Array, Array]:
    """The recurrence for one token: arrays as in `ssd_from`, with T = 1."""
    heads = x.shape[2] // b.shape[2]
    c, b, wide, dt, g = (a[:, 0].astype(jnp.float32) for a in (c, b, x, dt, g))
    c, b = (jnp.repeat(a, heads, axis=1) for a in (c, b))
    written = b[..., :, None] * (dt[..., None] * wide)[..., None, :]
    memory = memory * jnp.exp(g)[..., None, None] + written
    y = jnp.einsum("bnk,bnkh->bnh", c, memory, preferred_element_type=jnp.float32)
    return y[:, None].astype(x.dtype), memory


def _by_chunk(a: Array, size: int, beyond: str = "constant") -> Array:
    """[C, B, ..., L, H] of [B, T, ..., H], or [C, B, L] of [B, T]; `beyond` the last token, as
    `jnp.pad` has it."""
    a = jnp.pad(a, ((0, 0), (0, -a.shape[1] % size), *((0, 0),) * (a.ndim - 2)), mode=beyond)
    a = jnp.moveaxis(a.reshape(len(a), -1, size, *a.shape[2:]), 1, 0)
    return a if a.ndim == 3 else jnp.moveaxis(a, 2, -2)


def _chunk(memory: Array, arrays: tuple[Array, ...]) -> tuple[Array, Array]:
    """The memory [B, G, R, K, H] after a chunk, and its float32 y [B, G, R, L, H]."""
    c, b, x, dt, g, begins, docs = arrays  # [B, G, L, K], [B, G, R, L, H or 1], [B, L]
    fresh = (jnp.cumsum(begins, axis=1) > 0)[:, None, None]  # [B, 1, 1, L]: a document began
    same = jnp.tril(docs[:, :, None] == docs[:, None, :])  # [B, L, L]
    exact = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    since = exact("bts,bgrs->bgrt", same.astype(jnp.float32), g[..., 0])
    apart = since[..., :, None] - since[..., None, :]
    # a token itself has no decay, nor its gradient
    before = jnp.tril(same, -1)[:, None, None]
    decay = jnp.exp(jnp.where(before, apart, -jnp.inf)) + jnp.eye(same.shape[-1])
    carried = jnp.where(fresh, 0.0, jnp.exp(since))[..., None]

    wide = partial(jnp.einsum, preferred_element_type=jnp.float32)
    written = (dt * x).astype(x.dtype)
    scores = (wide("bgtk,bgsk->bgts", c, b)[:, :, None] * decay).astype(x.dtype)
    read = carried * wide("bgtk,bgrkh->bgrth", c, memory.astype(c.dtype))
    y = wide("bgrts,bgrsh->bgrth", scores, written) + read
    left = (decay[..., -1, :, None] * dt * x).astype(x.dtype)
    return carried[..., -1:, :] * memory + wide("bgsk,bgrsh->bgrkh", b, left), y
