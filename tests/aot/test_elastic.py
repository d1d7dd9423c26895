"""A run that was planned for two slices goes on on one: the same run, state and rows of a step."""

import json

from tests.aot.slices import needs_libtpu, with_compiler

RUN = "examples/kisoku-3b.toml"
TWO, ONE = "2xv5e-16", "v5e-16"


def planned(name, *words):
    """What a checkpoint and a batch of the run's plan for a slice depend on."""
    import jax
    from jax.experimental import topologies

    from lmwright.core.sharding import batch_sharding
    from lmwright.formats.open import load_noted
    from lmwright.hardware.slices import parse_slice, topology_request
    from lmwright.program.plan import resolve
    from lmwright.program.state import abstract_state
    from lmwright.train.identity import identity

    run, _ = load_noted(RUN, ["train.steps=100", "train.global_batch_size=64", *words])
    where = topologies.get_topology_desc(**topology_request(parse_slice(name)))
    plan = resolve(run, list(where.devices))
    num = run.train.num_microbatches
    shape = (num, run.train.global_batch_size // num, plan.seq_len)
    indices = batch_sharding(plan.mesh, leading=1).devices_indices_map(shape).values()
    rows = {range(shape[1])[index[1]] for index in indices}
    return {
        "identity": repr(identity(run)),
        "state": {
            jax.tree_util.keystr(path): [*map(str, (leaf.shape, leaf.dtype))]
            for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_state(plan))
        },
        "rows": sorted(j * num + a for part in rows for j in part for a in range(num)),
        "devices": plan.mesh.size,
        "data": plan.mesh.shape["data"],
    }


@needs_libtpu
def test_two_slices_to_one():
    two, one = json.loads(with_compiler("-m", __name__).splitlines()[-1])
    assert (two["devices"], two["data"]) == (2 * one["devices"], 2 * one["data"])
    assert two["rows"] == one["rows"] == list(range(64))
    assert two["identity"] == one["identity"] and two["state"] == one["state"]


if __name__ == "__main__":
    words = ["train.num_microbatches=2"]
    print(json.dumps([planned(TWO, *words, "mesh.data=2"), planned(ONE, "mesh.data=1")]))
