"""Layers that carry different things in one model: keys and values beside memories."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lmwright.core.compute import Compute
from lmwright.core.param import init_weights
from lmwright.models import cached
from lmwright.models.block import output, project
from lmwright.models.llama import Llama
from lmwright.nn.mlstm import empty, mlstm, mlstm_from
from lmwright.nn.norm import rms_norm
from tests.parity.compare import make_batch


@dataclass(frozen=True, kw_only=True)
class Mixed(Llama):
    """Every second layer of a llama has memories, whose gates are numbers of q and k."""

    @property
    def kinds(self):
        return ("mlstm", "global") * (self.num_layers // 2)

    def state(self, kind, *, batch_size, length, dtype):
        if kind == "global":
            return super().state(kind, batch_size=batch_size, length=length, dtype=dtype)
        return jax.eval_shape(lambda: empty(batch_size, self.num_heads, *2 * (self.head_dim,)))

    def layer(self, kind, w, x, tables, attend):
        if kind == "global":
            return super().layer(kind, w, x, tables, attend)
        q, k, v = project(w, rms_norm(x, w["attention_norm"], self.norm_eps))
        i, f, ids = q[..., 0] - 1, 3 + k[..., 0], attend.ids
        h = attend.carry(
            lambda: mlstm(q, k, v, i, f, ids, 4),
            lambda memory: mlstm_from(memory, q, k, v, i, f, ids, chunk_tokens=4),
        )
        return x + output(w, h), {}


MODEL = Mixed(
    vocab_size=31, embed_dim=16, mlp_dim=24, num_layers=4, num_heads=2, num_kv_heads=2,
    head_dim=8, seq_len=32,
)  # fmt: skip


def test_a_row_token_by_token_is_the_row():
    """A left-padded batch, of which ten tokens come at once and three one by one."""
    w = init_weights(MODEL.spec(), jax.random.key(0))
    tokens = np.random.default_rng(0).integers(0, 31, (2, 13))
    real = np.ones((2, 13), bool)
    real[1, :6] = False
    compute = Compute()
    whole = jax.jit(lambda w: MODEL.hidden(w, make_batch(tokens, real), compute)[0])(w)
    cache = cached.new_cache(MODEL, 2, 16, compute)
    stacks = cache["layers"]["layers"]
    assert stacks["0"].matrix.shape == (2, 2, 2, 8, 8) and stacks["1"]["k"].shape[2] == 16
    tokens, real = jnp.asarray(tokens), jnp.asarray(real)
    extend = jax.jit(
        lambda t, r, cache, first: cached.extend(MODEL, w, t, r, cache, compute, empty_cache=first),
        static_argnums=3,
    )
    first, cache = extend(tokens[:, :10], real[:, :10], cache, True)
    parts = [first]
    for at in range(10, 13):
        hidden, cache = extend(tokens[:, at : at + 1], real[:, at : at + 1], cache, False)
        parts.append(hidden)
    found = jnp.concatenate(parts, axis=1)
    np.testing.assert_allclose(found[real], whole[real], atol=1e-5 * np.abs(whole).max())
