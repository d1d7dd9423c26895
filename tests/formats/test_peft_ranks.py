"""A run that starts from an adapter of PEFT with a larger rank than it has there."""

import jax
import numpy as np
import pytest

from lmwright.core.param import at
from lmwright.formats.train_state import init_state
from lmwright.program.lora import resolved
from lmwright.program.plan import resolve
from lmwright.program.step import make_step
from lmwright.program.trainee import Frozen
from tests.formats.test_peft import (
    MODEL,
    TOKENS,
    base_of,
    batch,
    bound_logits,
    close,
    run_of,
    torch,
    torch_adapter,
)


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_ranks_that_the_folder_lacks_start_fresh_and_learn(variant, tmp_path):
    # layer 0 keeps its own rank: what it lacks is there in other layers
    said = dict(r=5, lora_alpha=7, use_dora=variant == "dora")
    said["rank_pattern"] = {f"layers.0.self_attn.{name}_proj": 3 for name in "qo"}
    theirs = torch_adapter(said)
    theirs.save_pretrained(tmp_path)
    run = run_of(dict(rank=7, alpha=4.0, variant=variant, init_from=str(tmp_path)))
    plan = resolve(run, jax.devices()[:1])
    (adapter,) = resolved(run)
    rows = jax.tree.map(lambda a: a[None], batch())
    with jax.set_mesh(plan.mesh):
        state = init_state(plan, Frozen(base_of(MODEL)))
        started = jax.tree.map(np.asarray, state["trained"]["default"]["weights"])
        state, _ = make_step(plan)(state, rows)
        learned = jax.tree.map(np.asarray, state["trained"]["default"]["weights"])
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(TOKENS)).logits.numpy()
    close(bound_logits(adapter, started, base_of(MODEL)), expected)
    for module in adapter.modules:
        a, b = (at(started, f"{module.path}.{name}") for name in "ab")
        b = np.moveaxis(b, 1, -1)  # [layers, ..., rank]
        assert np.all(np.any(a[..., 5:] != 0, axis=tuple(range(1, a.ndim - 1)))), module.path
        assert not np.any(b[..., 5:])
        assert np.any(np.moveaxis(at(learned, f"{module.path}.b"), 1, -1)[..., 5:]), module.path
        if module.path in ("layers.q", "layers.o"):
            assert not np.any(a[0, ..., 3:5]) and not np.any(b[0, ..., 3:5])
