"""A small model with all sizes different, packed rows, and its results on any mesh."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from lmwright.config.run import Data, Mesh, Run, Train
from lmwright.core.contract import Batch
from lmwright.core.param import init_weights
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from lmwright.program.plan import resolve
from lmwright.program.step import summed_gradients

SEQ_LEN, VOCAB, ROWS = 48, 56, 32


def make_run(axes=None, model=None, **train):
    """A run over `axes`, a dict of mesh sizes."""
    sizes = {
        "vocab_size": VOCAB, "embed_dim": 24, "mlp_dim": 40, "num_layers": 2, "num_heads": 16,
        "num_kv_heads": 8, "head_dim": 6, "seq_len": SEQ_LEN, "head": "untied",
    }  # fmt: skip
    fields = {"steps": 10, "global_batch_size": ROWS, "precision": "fp32", "loss_chunk_tokens": 20}
    return Run(
        name="t",
        dir="unused",
        model=Llama(**sizes | (model or {})),
        objective=Clm(z_loss=1e-3),
        optim=KINDS["adamw"](learning_rate=1e-2, eps=1e-4),  # Adam amplifies rounding near zero
        data=Data(dir="unused"),
        train=Train(**(fields | train)),
        mesh=Mesh(**{"fsdp": 1} | (axes or {})),
    )


def make_batch(num_microbatches, seed=0):
    """[A, B, T]: two to four segments a row that end anywhere, some rows with padding."""
    rng = np.random.default_rng(seed)
    starts = np.sort(rng.integers(1, SEQ_LEN, (ROWS, 3)), axis=1)
    at = np.arange(SEQ_LEN)
    segments = 1 + (at[None, :, None] >= starts[:, None]).sum(-1)
    first = np.array([[np.argmax(row == row[i]) for i in range(SEQ_LEN)] for row in segments])
    segments[::3, -7:] = 0
    weights = (segments > 0) & (at != first)
    shape = (num_microbatches, ROWS // num_microbatches, SEQ_LEN)
    cut = lambda a, t: a.reshape(shape).astype(t)  # noqa: E731
    return Batch(
        tokens=cut(rng.integers(0, VOCAB, (ROWS, SEQ_LEN)), jnp.int32),
        segment_ids=cut(segments, jnp.int32),
        positions=cut(at - first, jnp.int32),
        loss_weight=cut(weights, jnp.float32),
    )


@cache
def fresh_weights(model):
    """The same weights for every mesh, as numpy arrays."""
    return jax.tree.map(np.asarray, init_weights(model.spec(), jax.random.key(0)))


def plan_of(run):
    """Its plan on as many of the simulated devices as its mesh has."""
    count = np.prod([size for size in vars(run.mesh).values()])
    return resolve(run, jax.devices()[: int(count)])


def gradients(run):
    """Summed gradients and the loss's sums, as numpy arrays."""
    plan = plan_of(run)
    batch = make_batch(run.train.num_microbatches)
    with jax.set_mesh(plan.mesh):
        weights = jax.device_put(fresh_weights(run.model), plan.shardings)
        fn = jax.jit(lambda w, b: model_gradients(plan, w, b))
        return jax.tree.map(np.asarray, fn(weights, batch))


def model_gradients(plan, weights, batch):
    """Summed gradients of the model's weights, and the loss's sums; traceable."""
    trainees, keys = plan.training.trainees, [jax.random.key(0)]
    grads, (loss,) = summed_gradients(plan, trainees, {}, {"model": weights}, batch, keys)
    return grads["model"], loss


@cache
def alone(**model):
    """The single device's gradients and loss, one microbatch."""
    return gradients(make_run(model=model))


def assert_same(found, expected, share=1e-5):
    """Losses to 1e-5; gradients to `share` of the largest of each leaf."""
    (grads, loss), (want, want_loss) = found, expected
    assert loss.weight == want_loss.weight
    for a, b in zip(jax.tree.leaves(loss), jax.tree.leaves(want_loss), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want), strict=True
    ):
        name = jax.tree_util.keystr(path)
        largest = np.abs(b).max()
        if name.endswith("['k_bias']") and largest < 1e-6:
            # without rotations it moves all scores of a query alike: rounding alone
            assert np.abs(a).max() < 1e-6, name
            continue
        # no training changes these
        if name.endswith(("['layer_scale']", "['xielu_beta']", "['xielu_eps']")):
            assert largest == np.abs(a).max() == 0, name
            continue
        assert largest > 0, name
        np.testing.assert_allclose(a, b, rtol=0, atol=share * largest, err_msg=name)
