"""Prints a program compiled for an H100: `prefill` or `decode` of `generate` with its layers apart,
or that of `eval`; the model and the cache of test_gpu_decode."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding, use_abstract_mesh

from lmwright.core.compute import Compute
from lmwright.core.contract import Batch
from lmwright.core.param import is_param
from lmwright.core.sharding import NO_MESH
from lmwright.evals import decoding, generate, loss
from lmwright.models import cached
from lmwright.models.llama import Llama
from lmwright.objectives.clm import Clm
from lmwright.planner.analytic.machine import parse_machine
from lmwright.planner.compiler import gpu

MODEL = Llama(vocab_size=4096, embed_dim=512, mlp_dim=1408, num_layers=2, num_heads=8,
              num_kv_heads=2, head_dim=64, seq_len=8192)  # fmt: skip
ROWS, PROMPT, LENGTH = 4, 1024, 2048


def lowered(name):
    """The program, of bf16 weights for `generate`."""
    compute = Compute(precision="bf16", kernels="gpu", unroll=True)
    shape = jax.ShapeDtypeStruct
    w = jax.tree.map(lambda p: shape(p.shape, jnp.bfloat16), MODEL.spec(), is_leaf=is_param)
    w = jax.eval_shape(partial(cached.layers_apart, MODEL), w)
    place = SingleDeviceSharding(gpu.devices_of(parse_machine("gpu:h100x1"))[0])
    there = partial(jax.tree.map, lambda a: shape(a.shape, a.dtype, sharding=place))
    if name == "eval":
        ids, weight = shape((ROWS, PROMPT), jnp.int32), shape((ROWS, PROMPT), jnp.float32)
        scanned = Compute(precision="bf16", kernels="gpu")
        measure = loss._measure(loss.TokenRowTally, MODEL, Clm(), scanned)
        w = jax.tree.map(lambda p: shape(p.shape, jnp.float32), MODEL.spec(), is_leaf=is_param)
        return measure.lower(there(w), there(Batch(ids, ids, ids, weight)))
    if name == "prefill":
        tokens, valid = shape((ROWS, PROMPT), jnp.int32), shape((ROWS, PROMPT), bool)
        arrays = there((w, tokens, valid))
        return decoding.prefill.lower(MODEL, compute, LENGTH, *arrays)
    cache = jax.eval_shape(lambda: cached.new_cache(MODEL, ROWS, LENGTH, compute))
    logits = shape((ROWS, MODEL.vocab_size), jnp.float32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), ROWS))
    knobs = shape((), jnp.float32), shape((), jnp.int32), shape((), jnp.float32)
    arrays = there((w, logits, cache, keys, shape((), jnp.int32), knobs))
    return decoding.decode.lower(MODEL, compute, generate.STEPS, "greedy", *arrays)


if __name__ == "__main__":
    with use_abstract_mesh(NO_MESH):
        print(lowered(sys.argv[1]).compile().as_text())
