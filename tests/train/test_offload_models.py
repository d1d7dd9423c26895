"""Memory settings on adapters and on every kind of mlp: the same numbers as without them."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from lmwright.config.run import Mesh
from lmwright.core import compute
from lmwright.formats.hf_read import model_from_config
from lmwright.optim import KINDS
from lmwright.program.lora_section import Adapter, LowRank
from lmwright.program.plan import resolve
from lmwright.program.state import abstract_batch, abstract_state
from lmwright.program.step import make_step
from tests.parity.families import ROWS
from tests.train.test_offload import equal, states
from tests.train.test_step import SEQ_LEN, assert_close_to_largest, make_run

TWO = (Adapter(name="a", rank=2), Adapter(name="b", rank=3))
LORAS = {
    "one": LowRank(base="fp32", rank=4),
    "one on int8": LowRank(base="int8", rank=4),
    "attention alone": LowRank(base="fp32", rank=4, targets=("attention",)),
    "dora": LowRank(base="fp32", rank=4, variant="dora"),
    "two": LowRank(base="fp32", rank=4, adapters=TWO),
    "two on int8": LowRank(base="int8", rank=4, adapters=TWO),
}


def tuned(lora, **train):
    return replace(make_run(remat="block", **train), lora=lora)


def assert_moments_close(state, other):
    """First moments, which are sums of gradients, within a share of the largest."""
    for name, trainee in state["trained"].items():
        moments = (each["optimizer"]["mu"] for each in (trainee, other["trained"][name]))
        assert_close_to_largest(*moments, share=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("dora", "two on int8") else pytest.param(name, marks=pytest.mark.slow)
        for name in LORAS
    ],
)
@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_chunks_change_no_adapter(name, devices):
    """Gradients of all factors, as the first moments of two steps have them: the second factor is
    zero before the first step, and the first has no gradient until it is not."""
    rows = 8 * len(LORAS[name].listed)  # of each adapter, as many as devices
    pair = [
        replace(
            tuned(LORAS[name], mlp_chunk_tokens=n, global_batch_size=rows), mesh=Mesh(fsdp=devices)
        )
        for n in (None, 8)
    ]
    (whole, metrics), (cut, cut_metrics) = (states(run, devices)[0] for run in pair)
    np.testing.assert_allclose(cut_metrics["loss"], metrics["loss"], rtol=1e-6)
    assert_moments_close(cut, whole)


def on_device(run, monkeypatch, **options):
    """The state and metrics where the device keeps what the run would put on the host."""
    policy = compute.remat_of(run.train.remat, run.train.offload)
    near = replace(policy, kept=policy.kept | policy.offloaded, offloaded=frozenset())
    with monkeypatch.context() as patch:
        patch.setattr(compute, "remat_of", lambda *_: near)
        return states(replace(run, name="near"), **options)[0]


@pytest.mark.parametrize(
    "name, offload",
    [
        ("one on int8", "block_inputs"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (
                ("one on int8", "attention"),
                ("one on int8", "products"),
                ("two", "products"),
                ("two", "block_inputs"),
                ("two", "attention"),
            )
        ),
    ],
)
def test_the_host_changes_no_bit_of_adapters(name, offload, monkeypatch):
    run = tuned(LORAS[name], offload=offload)
    far, near = states(run)[0], on_device(run, monkeypatch)
    if (name, offload) == ("one on int8", "products"):  # fused otherwise, which rounds otherwise
        assert_moments_close(far[0], near[0])
    else:
        equal(far, near)


@pytest.mark.slow
def test_moments_of_adapters_on_the_host_change_no_bit():
    run = tuned(LORAS["two"])
    near, far = (
        replace(run, optim=KINDS["adamw"](learning_rate=1e-2, offload=place))
        for place in ("none", "moments")
    )
    (state, kinds), (same, _) = states(far), states(near)
    equal(state, same)
    assert "pinned_host" in kinds


@pytest.mark.slow
def test_chunks_with_dropout_train_the_same_again():
    """Each chunk draws its own dropped inputs, in the backward pass the same as in the forward."""
    run = tuned(LowRank(base="fp32", rank=4, dropout=0.5, targets=("mlp",)), mlp_chunk_tokens=8)
    plan = resolve(run, jax.devices()[:1])
    first, again = states(run)[0], states(replace(run, name="again"))[0]
    equal(first, again)
    whole = states(replace(run, train=replace(run.train, mlp_chunk_tokens=None)))[0]
    assert first[1]["loss"] != whole[1]["loss"] and np.isfinite(first[1]["loss"])
    assert plan.run.train.mlp_chunk_tokens == 8


@pytest.mark.slow  # half a minute each
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "qwen3", "mistral"])
def test_chunks_and_the_host_on_families(name, monkeypatch):
    row = ROWS[name]
    model = model_from_config(row.said | {"architectures": [row.architecture]}, name)
    model = replace(model, seq_len=SEQ_LEN)
    run, cut, far = (
        replace(make_run(remat="block", **train), model=model)
        for train in ({}, {"mlp_chunk_tokens": 8}, {"offload": "products"})
    )
    (whole, metrics), (ours, our_metrics) = (states(each, steps=1)[0] for each in (run, cut))
    np.testing.assert_allclose(our_metrics["loss"], metrics["loss"], rtol=1e-6)
    assert_moments_close(ours, whole)
    # another place lets the compiler fuse otherwise, which rounds otherwise
    assert_moments_close(states(far, steps=1)[0][0], on_device(far, monkeypatch, steps=1)[0])


def num_host_results(offload):
    """Results that one block of the step puts into the host's memory."""
    plan = resolve(make_run(remat="block", offload=offload), jax.devices()[:1])
    plan = replace(plan, compute=replace(plan.compute, unroll=False))
    with jax.set_mesh(plan.mesh):
        traced = make_step(plan).trace(abstract_state(plan), abstract_batch(plan))
    return len(re.findall(r"devices=\(MemorySpace.Host,\)", str(traced.jaxpr)))


def test_each_setting_puts_more_on_the_host():
    """On a CPU the two memories are one: that nothing was moved would change no number."""
    none, inputs, attention, products = map(
        num_host_results, ("none", "block_inputs", "attention", "products")
    )
    assert none == 0 and inputs == 1
    assert inputs < attention < products
