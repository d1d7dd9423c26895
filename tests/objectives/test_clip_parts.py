"""Two models clipped apart, each by its own norm, as torch does it; and five whole steps."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmwright.config.run import Train
from lmwright.core.compute import Compute
from lmwright.core.param import Param, walk
from lmwright.models.detector import Detector
from lmwright.optim import KINDS
from lmwright.optim.build import clip_parts
from lmwright.optim.kinds import Constant
from lmwright.program.plan import resolve
from lmwright.program.state import init_state
from lmwright.program.step import make_step
from tests.in_memory import to_hf
from tests.objectives import test_rtd
from tests.objectives.test_rtd import LENGTHS, Head, V, masked_lm, packed, their_loss
from tests.parity.compare import randomize
from tests.train.test_step import make_run

torch = pytest.importorskip("torch", reason="torch is the reference")

OBJECTIVE = replace(test_rtd.OBJECTIVE, generator_layers=1)
STEPS, CLIP, RATE, DECAY, EPS = 5, 0.3, 3e-3, 0.1, 1e-4


@pytest.mark.parametrize("clip_norm", [CLIP, None])
def test_the_rule_is_torchs_of_each_part(clip_norm):
    """One of the two is below the limit, and stays as it is."""
    draws, sizes = np.random.default_rng(0), {"generator": 1.0, "discriminator": 0.01}
    params = {"up": Param("embed -> mlp", (4, 6)), "norm": Param("norm", (6,), fill=1.0)}
    spec = {part: {name: param for name, param in params.items()} for part in sizes}
    grads = {
        part: {n: (size * draws.standard_normal(p.shape)).astype("f4") for n, p in params.items()}
        for part, size in sizes.items()
    }
    found = clip_parts(grads, spec, clip_norm)
    for part, tree in grads.items():
        ps = {path: torch.nn.Parameter(torch.tensor(leaf)) for path, leaf in walk(tree)}
        for p in ps.values():
            p.grad = p.detach().clone()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(ps.values(), clip_norm)
        for path, leaf in walk(found[part]):
            np.testing.assert_allclose(leaf, ps[path].grad, rtol=1e-5, err_msg=path)
    same = np.array_equal(found["discriminator"]["up"], grads["discriminator"]["up"])
    assert same and np.array_equal(found["generator"]["up"], grads["generator"]["up"]) == (
        clip_norm is None
    )


def optimizer_of(*modules):
    """Adam over modules, whose matrices decay."""
    params = [p for module in modules for p in module.parameters()]
    groups = [{"params": [p for p in params if (p.ndim > 1) == matrix], "weight_decay": decay}
              for matrix, decay in ((True, DECAY), (False, 0.0))]  # fmt: skip
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=EPS), params


def their_models():
    """A small generator, an encoder and a head."""
    torch.manual_seed(1)
    generator, encoder = masked_lm(1), masked_lm(2)
    head = Head(encoder.config)
    randomize(head)
    return generator, encoder.deberta, head


def test_each_model_is_clipped_by_its_own_norm():
    theirs = their_models()
    model, w = test_rtd.our_models(theirs, OBJECTIVE)
    optim = KINDS["adamw"](
        learning_rate=RATE, weight_decay=DECAY, eps=EPS, clip_norm=CLIP, clip_over="part",
        schedule=Constant(),
    )  # fmt: skip
    run = replace(
        make_run(), model=model, objective=OBJECTIVE, optim=optim,
        train=Train(steps=9, global_batch_size=len(LENGTHS), precision="fp32"),
    )  # fmt: skip
    plan, batch = resolve(run, jax.devices()[:1]), packed(LENGTHS)
    step, state = make_step(plan), init_state(plan)
    state["trained"]["model"]["weights"] = jax.tree.map(jnp.array, w)
    fill = jax.jit(lambda w, hidden, keys: OBJECTIVE.fill(model, w, batch, hidden, keys, Compute()))
    generator, encoder, head = theirs
    both = [optimizer_of(generator), optimizer_of(encoder, head)]
    key, norms = jax.random.key(run.seed), []
    for number in range(STEPS):
        draws = jax.random.fold_in(key, number)
        keys = OBJECTIVE.draws(draws, jnp.arange(len(LENGTHS)), len(LENGTHS))
        hidden = OBJECTIVE.masking.hide(batch, V, keys)
        now = state["trained"]["model"]["weights"]["generator"]
        expected = their_loss(theirs, batch, hidden, fill(now, hidden, keys)[1])
        state, metrics = step(state, jax.tree.map(lambda a: a[None], batch))
        np.testing.assert_allclose(metrics["loss"], expected.item(), rtol=2e-5)
        for optimizer, _ in both:
            optimizer.zero_grad()
        expected.backward()
        for optimizer, params in both:
            norms.append(float(torch.nn.utils.clip_grad_norm_(params, CLIP)))
            optimizer.step()
        whole = np.hypot(*norms[-2:])
        np.testing.assert_allclose(metrics["grad_norm"], whole, rtol=1e-4)
    assert min(norms) > CLIP  # so that one norm over both would be another run
    last = state["trained"]["model"]["weights"]
    found = to_hf(OBJECTIVE.generator(model), last["generator"])
    for name, p in generator.named_parameters():
        np.testing.assert_allclose(found[name], p.detach(), atol=2e-5, err_msg=name)
    found = to_hf(Detector(model), last["discriminator"])
    wanted = {f"deberta.{n}": p for n, p in encoder.named_parameters()}
    wanted |= {f"mask_predictions.{n}": p for n, p in head.named_parameters()}
    for name, p in wanted.items():
        np.testing.assert_allclose(found[name], p.detach(), atol=2e-5, err_msg=name)
