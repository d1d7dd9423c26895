"""Log-likelihoods of continuations compiled for a TPU: rows, branches, and a common beginning."""

import pytest

from tests.aot.slices import needs_libtpu, with_compiler

ROWS, BEHIND, BRANCHES, CHOICES, PREFIX = 8, 128, 128, 4, 1024


def lower_all():
    """Compiles each program for one chip of v5e."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from lmwright.core.compute import Compute
    from lmwright.core.contract import Batch
    from lmwright.core.param import is_param
    from lmwright.evals import likelihood, shared_contexts
    from lmwright.hardware.slices import parse_slice, topology_request
    from lmwright.presets import of_section

    devices = topologies.get_topology_desc(**topology_request(parse_slice("v5e-1"))).devices
    place, compute = SingleDeviceSharding(devices[0]), Compute(precision="bf16", kernels="tpu")

    def whole(param):
        return jax.ShapeDtypeStruct(param.shape, jnp.bfloat16, sharding=place)

    def there(*shape, dtype=jnp.int32):  # on one device
        return jax.ShapeDtypeStruct((1, *shape), dtype, sharding=place)

    for name in ("gemma3-1b", "llama-135m"):
        model = of_section("model")[name]()
        w = jax.tree.map(whole, model.spec(), is_leaf=is_param)
        ids, real = there(ROWS, BEHIND), there(ROWS, BEHIND, dtype=bool)
        read, score = shared_contexts._programs(model, compute)
        reading = read.trace(w, there(1, PREFIX), there(1, PREFIX, dtype=bool))
        prefix = jax.tree.map(lambda a: there(*a.shape[1:], dtype=a.dtype), reading.out_info)
        reading.lower(lowering_platforms=("tpu",)).compile()
        inner = there(ROWS, BRANCHES)
        rows = (
            ids, real, there(ROWS, CHOICES), inner, there(ROWS, BRANCHES, dtype=bool), inner,
            inner, inner,
        )  # fmt: skip
        for beginning in (prefix, None):
            score.lower(w, beginning, *rows).compile()
        batch = Batch(ids, ids, ids, there(ROWS, BEHIND, dtype=jnp.float32))
        pairs = there(ROWS), there(ROWS, 16), there(ROWS, 16, dtype=bool)
        likelihood._scores(model, compute).lower(w, batch, there(ROWS, 16), *pairs).compile()
        print(name)


@needs_libtpu
@pytest.mark.slow
def test_every_program_compiles():
    assert with_compiler("-m", __name__).split() == ["gemma3-1b", "llama-135m"]


if __name__ == "__main__":
    lower_all()
