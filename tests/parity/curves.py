"""Steps of training beside torch: the same rows of letters and AdamW, from the same weights."""

import random
from dataclasses import replace

import jax
import numpy as np
import pytest

from lmwright.config.run import Train
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from lmwright.optim.kinds import Constant
from lmwright.program.plan import resolve
from lmwright.program.state import init_state
from lmwright.program.step import make_step
from tests.golden.curves import sentence
from tests.parity.compare import make_batch
from tests.train.test_step import make_run

torch = pytest.importorskip("torch", reason="torch is the reference")

STEPS, ROWS, T, RATE, DECAY = 50, 8, 24, 2e-3, 0.1


def rows_of(number):
    """Ids [B, T] of the letters of sentences."""
    dice = random.Random(number)
    text = [" ".join(sentence(dice) for _ in range(3)) for _ in range(ROWS)]
    return np.array([[ord(letter) - 28 for letter in line[:T]] for line in text]) % 97


def both_curves(model, w, parameters, their_loss, qat=None, rate=RATE):
    """Losses of every step, ours and torch's; `their_loss` takes ids [B, T]."""
    optim = KINDS["adamw"](
        learning_rate=rate, weight_decay=DECAY, eps=1e-6, beta2=0.95, clip_norm=1.0,
        schedule=Constant(),
    )  # fmt: skip
    run = replace(
        make_run(), model=model, objective=Clm(), optim=optim, qat=qat,
        train=Train(steps=STEPS, global_batch_size=ROWS, precision="fp32"),
    )  # fmt: skip
    plan = resolve(run, jax.devices()[:1])
    step, state = make_step(plan), init_state(plan)
    state["trained"]["model"]["weights"] = jax.tree.map(jax.numpy.array, w)
    params = list(parameters)
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
    ]
    torch_optim = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-6)
    ours, theirs = [], []
    for number in range(STEPS):
        ids = rows_of(number)
        state, metrics = step(state, jax.tree.map(lambda a: a[None], make_batch(ids)))
        torch_optim.zero_grad()
        loss = their_loss(torch.tensor(ids))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        torch_optim.step()
        ours.append(float(metrics["loss"]))
        theirs.append(loss.item())
    assert theirs[-1] < 0.8 * theirs[0]
    return np.array(ours), np.array(theirs)


def apart(curves):
    """Differences of the losses of each step, as shares of them."""
    ours, theirs = curves
    return np.abs(ours - theirs) / theirs
