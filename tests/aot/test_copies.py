"""Programs of devices that have all weights each, compiled for the chips of a host: their kernels
are those of one chip, and nothing is exchanged."""

import json
import sys

import pytest

from tests.aot.slices import needs_libtpu, with_compiler

CHIPS, ROWS, PROMPT, LENGTH = 4, 8, 128, 512


def compiled(name):
    """Collectives and kernels in each program, of four chips of v5e."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from lmwright.core.compute import Compute
    from lmwright.core.contract import Batch
    from lmwright.core.copies import COPIES, computing_with, on_each
    from lmwright.core.param import is_param
    from lmwright.evals import generate, slots
    from lmwright.hardware.slices import parse_slice, topology_request
    from lmwright.models import cached
    from lmwright.presets import of_section

    devices = topologies.get_topology_desc(**topology_request(parse_slice("v5e-4"))).devices
    mesh = Mesh(np.array(devices), (COPIES,))
    compute = Compute(precision="bf16", kernels="tpu")
    model = of_section("model")[name]()

    def there(shape, dtype=jnp.int32, spec=None):
        spec = P(COPIES) if spec is None else spec
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    w = jax.tree.map(
        lambda param: there(param.shape, jnp.bfloat16, P()), model.spec(), is_leaf=is_param
    )
    each = lambda *shape: there((CHIPS, *shape))  # noqa: E731
    with computing_with(w):
        if model.both_ways:
            hidden = lambda w, batch: model.hidden(w, batch, compute)[0]  # noqa: E731
            ids = each(ROWS, LENGTH)
            batch = Batch(ids, ids, ids, there((CHIPS, ROWS, LENGTH), jnp.float32))
            return {"rows": facts(jax.jit(on_each(hidden)).lower(w, batch))}
        cache = jax.tree.map(
            lambda a: there((CHIPS, *a.shape), a.dtype),
            jax.eval_shape(lambda: cached.new_cache(model, ROWS, LENGTH, compute)),
        )
        logits = there((CHIPS, ROWS, model.vocab_size), jnp.float32)
        prompts = each(2, PROMPT), there((CHIPS, 2, PROMPT), bool), each(2)
        scalar = lambda dtype: there((), dtype, P())  # noqa: E731
        knobs = scalar(jnp.float32), scalar(jnp.int32), scalar(jnp.float32)
        rows = scalar(jnp.int32), there((CHIPS, ROWS), jnp.uint32), each(ROWS)
        return {
            "read": facts(slots._read.lower(model, compute, PROMPT, w, logits, cache, *prompts)),
            "write": facts(
                slots._write.lower(
                    model, compute, generate.STEPS, "greedy", w, logits, cache, *rows, knobs
                )
            ),
        }


def facts(lowered):
    text = lowered.compile().as_text()
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    return {
        "exchanged": sum(text.count(name) for name in names),
        "kernels": text.count("tpu_custom_call"),
    }


def found(name):
    return json.loads(with_compiler("-m", __name__, name).splitlines()[-1])


@needs_libtpu
@pytest.mark.parametrize(
    "name, with_kernel",
    [("llama-135m", "read"), pytest.param("modernbert-base", "rows", marks=pytest.mark.slow)],
)
def test_each_chip_computes_alone(name, with_kernel):
    programs = found(name)
    assert programs[with_kernel]["kernels"] > 0
    assert all(each["exchanged"] == 0 for each in programs.values())


if __name__ == "__main__":
    print(json.dumps(compiled(*sys.argv[1:])))
