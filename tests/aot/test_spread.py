"""Decoding that the TPU compiler spreads over the chips of a host: it compiles, kernels and experts
included, and large models and long prompts fit.

`generate` in training takes the same programs, with weights as the run's mesh has them.
"""

import json
import re
import sys

import pytest

from tests.aot.slices import needs_libtpu, with_compiler

ROWS, MORE = 1, 1024
GIB = 2**30


def compiled(name, slice_name, prompt="1024", num_devices=None):
    """Bytes of a chip that reading a prompt and decoding take, and the collectives and kernels in
    each; on all devices of the slice, or so many."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    from lmwright.core.compute import Compute
    from lmwright.core.param import is_param
    from lmwright.core.spread import computing, spread_shardings
    from lmwright.evals import decoding, generate
    from lmwright.evals.compute import spread
    from lmwright.hardware.slices import parse_slice, topology_request
    from lmwright.kernels.select import kernels_for
    from lmwright.models import cached
    from lmwright.presets import of_section

    devices = topologies.get_topology_desc(**topology_request(parse_slice(slice_name))).devices
    devices = devices[: int(num_devices or len(devices))]
    kind = devices[0].device_kind
    prompt, length = int(prompt), int(prompt) + MORE
    model = small_moe() if name == "small" else of_section("model")[name]()
    shardings = spread_shardings(model.spec(), devices)
    shape = jax.ShapeDtypeStruct
    w = jax.tree.map(
        lambda param, sharding: shape(param.shape, jnp.bfloat16, sharding=sharding),
        model.spec(), shardings, is_leaf=is_param,
    )  # fmt: skip
    whole = NamedSharding(jax.tree.leaves(shardings)[0].mesh, PartitionSpec())
    there = lambda a: shape(a.shape, a.dtype, sharding=whole)  # noqa: E731
    kernels = kernels_for("tpu", 1, kind)
    compute = spread(Compute(precision="bf16", kernels=kernels), len(devices))
    with computing(len(devices), kind):
        ids = there(shape((ROWS, prompt), jnp.int32))
        real = there(shape((ROWS, prompt), bool))
        reading = decoding.prefill.lower(model, compute, length, w, ids, real).compile()
        _, places = reading.output_shardings
        cache = jax.tree.map(
            lambda a, sharding: shape(a.shape, a.dtype, sharding=sharding),
            jax.eval_shape(lambda: cached.new_cache(model, ROWS, length, compute)), places,
        )  # fmt: skip
        rest = (
            shape((), jnp.int32),
            (shape((), jnp.float32), shape((), jnp.int32), shape((), jnp.float32)),
        )
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), ROWS))
        logits = there(shape((ROWS, model.vocab_size), jnp.float32))
        writing = decoding.decode.lower(
            model, compute, generate.STEPS, "greedy", w, logits, cache, there(keys),
            *jax.tree.map(there, rest),
        ).compile()  # fmt: skip
    return {"prompt": facts(reading), "decode": facts(writing)}


def facts(program):
    memory, text = program.memory_analysis(), program.as_text()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return {
        "bytes": kept - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
        "sums": text.count("all-reduce"),
        "kernels": text.count('custom_call_target="tpu_custom_call"'),
        "layers of keys": sum(
            "bf16[" in line and "dynamic_update_index_in_dim" in line for line in text.splitlines()
        ),
        "layers of experts": len(re.findall(r"bf16\[1,16,\d+,\d+\]\S* dynamic-slice", text)),
    }


def small_moe():
    from dataclasses import replace

    from lmwright.presets import of_section

    model = of_section("model")["moe-6m"]()
    experts = replace(model.experts, num_experts=16, experts_per_token=2)
    return replace(model, num_layers=2, experts=experts)


def found(*words):
    return json.loads(with_compiler("-m", __name__, *words).splitlines()[-1])


@needs_libtpu
def test_a_model_with_experts():
    """A kernel for attention and one for each matrix, which it reads where it lies; of keys and
    values nothing is written but those of new tokens."""
    programs = found("small", "v5e-4", "1024")
    for program in programs.values():
        assert program["sums"] > 0
        assert program["layers of experts"] == program["layers of keys"] == 0
    assert [program["kernels"] for program in programs.values()] == [4, 3]


@needs_libtpu
@pytest.mark.parametrize("num_devices", ["1", "8"])
def test_chips_whose_kernels_cannot_multiply_bfloat16(num_devices):
    """Mosaic refuses such kernels there: that the programs compile is what is asked."""
    for program in found("small", "v3-8", "1024", num_devices).values():
        assert (program["sums"] > 0) == (num_devices == "8")


LARGE = ["gemma3-27b", "qwen3-32b", "qwen3-30b-a3b", "gpt-oss-20b", "gemma4-26b-a4b", "qwen3.5-27b"]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name, prompt", [*((name, 1024) for name in LARGE), ("qwen3-32b", 32768)])
def test_too_large_for_a_chip_and_not_for_eight(name, prompt):
    programs = found(name, "v5e-8", str(prompt))
    for program in programs.values():
        assert program["bytes"] < 15.75 * GIB and program["sums"] > 0
    assert programs["prompt"]["kernels"]


if __name__ == "__main__":
    print(json.dumps(compiled(*sys.argv[1:])))
