"""A model without attention, of no family, trains and is planned: the contract is all that is
asked of it."""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.config.run import Data, Mesh, Run, Train
from lmwright.core.contract import Batch, Work
from lmwright.core.param import Param
from lmwright.core.sharding import constrain
from lmwright.core.stack import run_stack
from lmwright.core.weight import dot, lookup
from lmwright.errors import UserError
from lmwright.nn.norm import rms_norm
from lmwright.objectives.clm import Clm
from lmwright.optim import KINDS
from lmwright.planner.analytic.candidates import candidates
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.analytic.quick import Quick
from lmwright.program.plan import resolve
from lmwright.program.state import init_state
from lmwright.program.step import make_step


@dataclass(frozen=True, kw_only=True)
class Leaky:
    """Layers that mix tokens by a leaky sum: s_t = a_t s_{t-1} + (1 - a_t) v_t."""

    both_ways: ClassVar[bool] = False
    fills_masks: ClassVar[bool] = False

    kind: str = "leaky"
    vocab_size: int = 64
    embed_dim: int = 32
    num_layers: int = 3
    seq_len: int = 24

    def spec(self):
        d, layers = self.embed_dim, ("layers", self.num_layers)
        matrices = {name: Param("embed -> mlp", (d, 2 * d)) for name in ("leak", "value")}
        layer = matrices | {
            "down": Param("mlp -> embed", (2 * d, d)),
            "norm": Param("norm", (d,), fill=1.0),
        }
        return {
            "embed": Param("vocab -> embed", (self.vocab_size, d), std=0.02),
            "layers": {name: param.stacked(*layers) for name, param in layer.items()},
            "norm": Param("norm", (d,), fill=1.0),
        }

    mixtures: ClassVar = {}

    def work(self, seq_len):
        width = 2 * self.embed_dim * self.num_layers
        return Work(
            spec=self.spec(), seq_len=seq_len, num_layers=self.num_layers,
            embed_dim=self.embed_dim, vocab_size=self.vocab_size,
            mixing_flops=3 * width, mixing_kept=width,
        )  # fmt: skip

    def hidden(self, w, batch, compute):
        x = constrain(lookup(w["embed"], batch.tokens, compute.dtype), "batch stream embed")
        again = (batch.positions > 0)[..., None]  # segments do not see each other

        def layer(w, x, again):
            h = rms_norm(x, w["norm"], 1e-6)
            leak = jax.nn.sigmoid(dot("btd,df->btf", h, w["leak"])) * again
            value = (1 - leak) * dot("btd,df->btf", h, w["value"])
            join = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
            state = jax.lax.associative_scan(join, (leak, value), axis=1)[1]
            return constrain(x + dot("btf,fd->btd", state, w["down"]), "batch stream embed"), {}

        x, aux = run_stack([layer], w["layers"], x, again, remat=compute.policy)
        return rms_norm(x, w["norm"], 1e-6), aux

    def head_weights(self, w):
        return {"embed": w["embed"]}

    def logits(self, w, hidden):
        return dot("btd,vd->btv", hidden, w["embed"], out_dtype=jnp.float32)


RUN = Run(
    name="t", dir="unused", model=Leaky(), objective=Clm(),
    optim=KINDS["adamw"](learning_rate=1e-2), data=Data(dir="unused"),
    train=Train(steps=20, global_batch_size=8, precision="fp32", remat="dots"),
)  # fmt: skip


def batch_of():
    """Rows of two segments, each of which counts on from a random token."""
    at = np.arange(24, dtype=np.int32)
    start = np.random.default_rng(0).integers(0, 64, (1, 8, 2))
    positions = np.broadcast_to(at % 12, (1, 8, 24)).astype(np.int32)
    ids = np.broadcast_to(1 + at // 12, (1, 8, 24)).astype(np.int32)
    tokens = (np.repeat(start, 12, axis=2) + positions) % 64
    return Batch(tokens.astype(np.int32), ids, positions, (positions > 0).astype(np.float32))


def losses_on(num_devices, **mesh):
    plan = resolve(replace(RUN, mesh=Mesh(**mesh)), jax.devices()[:num_devices])
    state, step, losses = init_state(plan), make_step(plan), []
    with jax.set_mesh(plan.mesh):
        for _ in range(5):
            state, metrics = step(state, batch_of())
            losses.append(float(metrics["loss"]))
    return losses


def test_it_trains_alike_on_one_device_and_on_eight():
    one = losses_on(1)
    assert one[-1] < one[0] - 0.1
    np.testing.assert_allclose(losses_on(8, fsdp=4, tensor=2), one, rtol=1e-5)


def test_it_is_planned():
    plan = resolve(RUN, jax.devices()[:1])
    inside = 3 * 3 * 32 * 64  # layers, matrices
    by_hand = 6 * (inside + 64 * 32) + 3 * (3 * 2 * 32 * 3)
    assert plan.flops_per_step == 8 * 24 * by_hand
    quick = Quick.of(RUN, parse_machine("v5e-8"))
    assert "attention" not in quick.timing.by_kind and quick.timing.by_kind["mixing"] > 0
    assert quick.memory.saved > 0 and quick.step_s > 0
    best = candidates(RUN, parse_machine("v5e-8"))[0]
    assert best.quick.fits


def test_its_rows_are_not_cut_over_devices():
    cut = replace(RUN, mesh=Mesh(context=2, fsdp=4))
    with pytest.raises(UserError, match=r"mesh\.context: a leaky model cannot cut its rows"):
        resolve(cut, jax.devices()[:8])
