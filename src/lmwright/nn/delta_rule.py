"""The gated delta rule (https://arxiv.org/abs/2412.06464): a memory of one matrix a head, in which
every token corrects what its key finds.

    S' = e^g S       found = S'^T k       S = S' + k (b (v - found))^T       o = S^T q / sqrt(K)

`delta_rule` computes a row in chunks (https://arxiv.org/abs/2406.06484): what the tokens of a chunk
write depends on each other, by a triangular matrix that is inverted, and a memory goes from chunk
to chunk. `step` is the recurrence above, for one token after the other. Both start afresh at each
document, and padding changes nothing.

    D_ts = e^(sum of g over s + 1 .. t)      within one document, else 0
    A_ts = b_t k_t.k_s D_ts                  where s < t, else 0
    new  = (I + A)^-1 b (v - D_t0 S^T k)     what the tokens write

B batch, T time, G heads of queries and keys, N heads of values (each N / G of them have the same
key), K and H dims of a key and of a value, C chunks of L tokens.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from lmwright.nn.kept_inputs import keeps_inputs
from lmwright.nn.mlstm import beginnings, documents

EPS = 1e-6  # of the norm of queries and keys, as in the paper's code


def empty(batch_size: int, num_heads: int, key_dim: int, head_dim: int) -> Array:
    """The memory before the first token, float32 [B, N, K, H]."""
    return jnp.zeros((batch_size, num_heads, key_dim, head_dim), jnp.float32)


def unit(x: Array) -> Array:
    """x [..., K] at length 1, as queries and keys are."""
    wide = x.astype(jnp.float32)
    length = jnp.sum(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(length + EPS)).astype(x.dtype)


def gates(
    write: Array, decay: Array, log_rate: Array, bias: Array, ids: Array
) -> tuple[Array, Array]:
    """Strength b and log decay g of each token, float32 [B, T, N], of what goes into them; padding,
    where `ids` [B, T] is 0, writes nothing and forgets nothing. `log_rate` and `bias` are [N]."""
    real = (ids > 0)[..., None]
    write, decay, log_rate, bias = (a.astype(jnp.float32) for a in (write, decay, log_rate, bias))
    g = -jnp.exp(log_rate) * jax.nn.softplus(decay + bias)
    return jnp.where(real, jax.nn.sigmoid(write), 0.0), jnp.where(real, g, 0.0)


@keeps_inputs
def delta_rule(
    q: Array, k: Array, v: Array, b: Array, g: Array, ids: Array, chunk_tokens: int
) -> Array:
    """o [B, T, N, H] of queries and keys [B, T, G, K] of length 1, values [B, T, N, H], and
    strengths and log decays [B, T, N], within the segments `ids` [B, T], of which 0 is padding."""
    first = empty(v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    return delta_rule_from(first, q, k, v, b, g, ids, chunk_tokens=chunk_tokens)[0]


def delta_rule_from(
    memory: Array, q: Array, k: Array, v: Array, b: Array, g: Array, ids: Array,
    *, chunk_tokens: int,
) -> tuple[Array, Array]:  # fmt: skip
    """`delta_rule` of tokens after those of a memory [B, N, K, H], and the memory after them."""
    length = q.shape[1]
    if length == 1:
        return step(memory, q, k, v, b, g)
    size, (rows, _, heads, _) = min(chunk_tokens, length), q.shape
    # the heads that share a key are apart: [B, T, G, N / G, H or 1]
    grouped = [a.reshape(*a.shape[:2], heads, v.shape[2] // heads, -1) for a in (v, b, g)]
    docs = documents(ids)
    of_heads = lambda a: jnp.broadcast_to(a[..., None, None], (*k.shape[:3], 1))  # noqa: E731
    arrays = q * q.shape[-1] ** -0.5, k, *grouped, of_heads(beginnings(docs))
    q, *rest = (_by_chunk(a, size) for a in arrays)
    chunks = _chunks(q, *rest, _by_chunk(of_heads(docs), size, "edge"))
    along = tuple(a.reshape(-1, rows * heads, *a.shape[1:]) for a in chunks[:4])
    last, found = lax.scan(_go_on, memory.reshape(rows * heads, -1, *memory.shape[2:]), along)
    o = _read(q, *(a.reshape(-1, *a.shape[2:]) for a in found), *chunks[4:])
    o = o.reshape(-1, rows, heads, *o.shape[1:])
    o = jnp.moveaxis(o, (0, 4), (1, 2))  # [B, C, L, G, N / G, H]
    o = o.reshape(rows, -1, *v.shape[2:])[:, :length]
    return o.astype(v.dtype), last.reshape(memory.shape)


def step(memory: Array, q: Array, k: Array, v: Array, b: Array, g: Array) -> tuple[Array, Array]:
    """The recurrence for one token: arrays as in `delta_rule_from`, with T = 1."""
    times = v.shape[2] // q.shape[2]
    q, k, v32, b, g = (a[:, 0].astype(jnp.float32) for a in (q, k, v, b, g))
    q, k = (jnp.repeat(a, times, axis=1) for a in (q * q.shape[-1] ** -0.5, k))
    memory = memory * jnp.exp(g)[..., None, None]
    found = jnp.einsum("bnk,bnkh->bnh", k, memory, preferred_element_type=jnp.float32)
    memory += k[..., :, None] * (b[..., None] * (v32 - found))[..., None, :]
    o = jnp.einsum("bnk,bnkh->bnh", q, memory, preferred_element_type=jnp.float32)
    return o[:, None].astype(v.dtype), memory


def _by_chunk(a: Array, size: int, beyond: str = "constant") -> Array:
    """[C B G, ..., L, H] of [B, T, G, ..., H], and `beyond` the last token, as `jnp.pad` has it."""
    a = jnp.pad(a, ((0, 0), (0, -a.shape[1] % size), *((0, 0),) * (a.ndim - 2)), mode=beyond)
    a = a.reshape(len(a), -1, size, *a.shape[2:])
    a = jnp.moveaxis(a, (1, 2), (0, -2))  # [C, B, G, ..., L, H]
    return a.reshape(-1, *a.shape[3:])


def _chunks(
    q: Array, k: Array, v: Array, b: Array, g: Array, begins: Array, docs: Array
) -> tuple[Array, ...]:
    """Arrays of all chunks of all rows and keys [S, N / G, L, ...]: values that their tokens write
    on an empty memory, and keys that read what is taken off these; keys that write, and the
    memory's decay; the decay since the beginning, and scores of queries and keys. q and k are
    [S, L, K], v, b and g [S, N / G, L, H or 1], `begins` and `docs` [S, L, 1]."""
    fresh = (jnp.cumsum(begins[..., 0], axis=-1) > 0)[:, None]  # since a document began
    same = jnp.tril(docs == docs[:, None, :, 0])  # [S, L, L]
    exact = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    since = exact("bts,brs->brt", same.astype(jnp.float32), g[..., 0])
    apart = since[..., :, None] - since[..., None, :]
    before = jnp.tril(same, -1)[:, None]  # a token itself has no decay, nor its gradient
    decay = jnp.exp(jnp.where(before, apart, -jnp.inf)) + jnp.eye(k.shape[-2])
    carried = jnp.where(fresh, 0.0, jnp.exp(since))[..., None]

    wide = partial(jnp.einsum, preferred_element_type=jnp.float32)
    keys = wide("btk,bsk->bts", k, k)[:, None]
    depends = jnp.where(np.tri(k.shape[-2], k=-1, dtype=bool), b * keys * decay, 0.0)
    inverse = inverted(depends, _precision(q)).astype(v.dtype)
    written = wide("brts,brsh->brth", inverse, (b * v).astype(v.dtype)).astype(v.dtype)
    ours = (b * carried * k[:, None]).astype(v.dtype)
    reads = wide("brts,brsk->brtk", inverse, ours).astype(v.dtype)
    scores = wide("btk,bsk->bts", q, k)[:, None] * decay
    left = (k[:, None] * decay[..., -1, :, None]).astype(v.dtype)
    return written, reads, left, carried[..., -1:, :], carried, scores.astype(v.dtype)


def _go_on(memory: Array, chunk: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
    """The memory [B G, N / G, K, H] after a chunk, and the one before it and what tokens write, as
    products read them."""
    written, reads, left, decay = chunk
    wide = partial(jnp.einsum, preferred_element_type=jnp.float32)
    held = memory.astype(left.dtype)
    new = (written - wide("brtk,brkh->brth", reads, held)).astype(left.dtype)
    return decay * memory + wide("brsk,brsh->brkh", left, new), (held, new)


def _read(q: Array, held: Array, new: Array, carried: Array, scores: Array) -> Array:
    """float32 [S, N / G, L, H]: what queries find."""
    wide = partial(jnp.einsum, preferred_element_type=jnp.float32)
    before = carried * wide("btk,brkh->brth", q, held)
    return before + wide("brts,brsh->brth", scores, new)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def inverted(a: Array, precision: lax.Precision) -> Array:
    """(I + a)^-1 of float32 a [..., L, L] that is 0 on and above the diagonal: blocks of one, two,
    four ... numbers, each from two of half its size, so that no power of `a` is ever large."""
    size = a.shape[-1]
    at, half = np.arange(size), 1
    product = partial(jnp.matmul, precision=precision)
    inverse = jnp.eye(size, dtype=a.dtype)
    while half < size:
        below = (at // half)[:, None] == at // half + 1
        part = jnp.where(below & ((at // (2 * half))[:, None] == at // (2 * half)), a, 0.0)
        change = part if half == 1 else product(product(inverse, part), inverse)
        inverse, half = inverse - change, 2 * half
    return jnp.broadcast_to(inverse, a.shape)


def _inverted_fwd(a: Array, precision: lax.Precision) -> tuple[Array, Array]:
    inverse = inverted(a, precision)
    return inverse, inverse


def _inverted_bwd(precision: lax.Precision, inverse: Array, grad: Array) -> tuple[Array]:
    turned = jnp.swapaxes(inverse, -1, -2)
    product = partial(jnp.matmul, precision=precision)
    return (-jnp.tril(product(product(turned, grad), turned), -1),)


inverted.defvjp(_inverted_fwd, _inverted_bwd)


def _precision(q: Array) -> lax.Precision:
    """Precision of products of float32: three passes of bfloat16 on a TPU are enough beside others
    of it."""
    return lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.HIGH
