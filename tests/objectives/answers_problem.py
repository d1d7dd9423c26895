"""A small model with adapters, and its logits of one conversation alone."""

import jax
import jax.numpy as jnp
import numpy as np

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.leaves import Lora
from lmwright.core.param import init_weights
from lmwright.models.llama import Llama

MODEL = Llama(
    vocab_size=37, embed_dim=12, mlp_dim=20, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=6, seq_len=48,
)  # fmt: skip


def weights(rank=3):
    """A base, and adapters on two of its matrices."""
    base = jax.tree.map(lambda a: 3 * a, init_weights(MODEL.spec(), jax.random.key(0)))
    rng = np.random.default_rng(1)
    normal = lambda *shape: jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32)  # noqa: E731
    layers = dict(base["layers"])
    layers["up"] = Lora(layers["up"], normal(2, 12, rank), normal(2, rank, 20))
    layers["down"] = Lora(layers["down"], normal(2, 20, rank), normal(2, rank, 12))
    return base, {**base, "layers": layers}


LONGEST = 48  # tokens


@jax.jit
def _logits(w, ids):
    batch = Batch(
        ids[None],
        jnp.ones((1, LONGEST), jnp.int32),
        jnp.arange(LONGEST)[None],
        jnp.ones((1, LONGEST)),
    )
    return MODEL.logits(w, MODEL.hidden(w, batch, Compute())[0])[0]


def logits(w, ids):
    """float32 [T, V] of one conversation alone; what follows it is seen by nothing in it."""
    return np.asarray(_logits(w, jnp.pad(jnp.asarray(ids), (0, LONGEST - len(ids)))))[: len(ids)]


def loss_of(objective, w, batch, compute=Compute()):  # noqa: B008
    """The objective's sums, compiled."""
    loss = lambda w, batch: objective.loss(MODEL, w, batch, jax.random.key(0), compute)  # noqa: E731
    return jax.jit(loss)(w, batch)


def gradients_of(objective, w, batch):
    loss = lambda w: objective.loss(MODEL, w, batch, jax.random.key(0), Compute()).total  # noqa: E731
    return jax.jit(jax.grad(loss))(w)
