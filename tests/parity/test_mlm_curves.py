"""Fifty steps of masked language modeling beside transformers and torch: the same rows, masks and
AdamW, from the same weights; the loss of each step, and the weights at the end."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.config.run import Train
from lmwright.core.contract import Batch
from lmwright.core.param import init_weights
from lmwright.optim import KINDS
from lmwright.optim.kinds import Linear
from lmwright.program.plan import resolve
from lmwright.program.state import init_state
from lmwright.program.step import make_step
from tests.golden.curves import sentence
from tests.in_memory import to_hf
from tests.parity.test_encoders import (
    EOS,
    OBJECTIVE,
    T,
    V,
    encoder_of,
    their_loss,
)
from tests.train.test_step import make_run

torch = pytest.importorskip("torch", reason="torch is the reference")

STEPS, ROWS, RATE, WARMUP, DECAY, EPS, CLIP = 50, 8, 1e-3, 5, 0.01, 1e-6, 1.0
LARGEST = 2e-6  # difference of a loss, as a share of it


def rows_of(number):
    """Rows of the letters of sentences, two documents in most of them; the rest is padding."""
    dice = random.Random(number)
    tokens, ids, places = (np.zeros((ROWS, T), np.int32) for _ in range(3))
    for row in range(ROWS):
        start = 0
        for document, length in enumerate((dice.randint(8, 14), dice.randint(0, 11)), 1):
            letters = [ord(letter) - 28 for letter in sentence(dice)[: max(0, length - 1)]]
            at = slice(start, start := start + length)
            tokens[row, at] = [*letters, *[EOS] * bool(length)]
            ids[row, at], places[row, at] = document, np.arange(length)
    arrays = map(jnp.asarray, (tokens, ids, places, (ids > 0).astype(np.float32)))
    return Batch(*arrays)


def rate_at(step):
    """A rise over the first steps, and a line to zero at the last."""
    return RATE * min(step / WARMUP, (STEPS - step) / (STEPS - WARMUP))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["EuroBert", "ModernBert", "DebertaV2"])
def test_fifty_steps_are_those_of_torch(kind, record_property):
    theirs, model, _ = encoder_of(kind)
    model = replace(model, embed_std=0.02)
    w = init_weights(model.spec(), jax.random.key(1))
    fresh = {name: torch.tensor(np.array(a)) for name, a in to_hf(model, w).items()}
    assert not theirs.load_state_dict(fresh, strict=False).unexpected_keys
    for module in theirs.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # a mask may become that id, whose gradient torch forgets
    optim = KINDS["adamw"](
        learning_rate=RATE, weight_decay=DECAY, eps=EPS, beta2=0.98, clip_norm=CLIP,
        schedule=Linear(warmup_steps=WARMUP),
    )  # fmt: skip
    run = replace(
        make_run(), model=model, objective=OBJECTIVE, optim=optim,
        train=Train(steps=STEPS, global_batch_size=ROWS, precision="fp32"),
    )  # fmt: skip
    plan = resolve(run, jax.devices()[:1])
    step, state = make_step(plan), init_state(plan)
    state["trained"]["model"]["weights"] = jax.tree.map(jnp.array, w)
    params = list(theirs.parameters())
    groups = [{"params": [p for p in params if (p.ndim > 1) == matrix], "weight_decay": decay}
              for matrix, decay in ((True, DECAY), (False, 0.0))]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), eps=EPS)
    hide = jax.jit(lambda batch, keys: OBJECTIVE.hide(batch, V, keys))
    curve, far = [], []
    for number in range(STEPS):
        batch = rows_of(number)
        key = jax.random.fold_in(jax.random.key(run.seed), number)
        hidden = hide(batch, OBJECTIVE.draws(key, jnp.arange(ROWS), ROWS))
        state, metrics = step(state, jax.tree.map(lambda a: a[None], batch))
        for group in optimizer.param_groups:
            group["lr"] = rate_at(number)
        optimizer.zero_grad()
        loss = their_loss(theirs, batch, hidden)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        curve.append(loss.item())
        far.append(abs(float(metrics["loss"]) - loss.item()) / loss.item())
    assert np.mean(curve[-5:]) < 0.8 * np.mean(curve[:5])
    found, last = (
        to_hf(model, state["trained"]["model"]["weights"]),
        dict(theirs.named_parameters()),
    )
    weights = max(
        np.abs(found[name] - p.detach().numpy()).max() / np.abs(p.detach().numpy()).max()
        for name, p in last.items() if name in found
    )  # fmt: skip
    print(f"{kind}: {curve[0]:.3f} to {curve[-1]:.3f}, loss {max(far):.1e}, weights {weights:.1e}")
    record_property("loss", max(far))
    record_property("weights", float(weights))
    assert max(far) <= LARGEST
