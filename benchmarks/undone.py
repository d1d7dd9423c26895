"""Compiles a train step as lmwright did it before some of its changes for TPUs.

For benchmarks: what a change brings, and programs like those that others ran. Given to
`plan.compile.compile_for` as its program.
"""

import sys
from types import ModuleType
from typing import Any

ALL = ("attention", "rope", "gradients", "swiglu", "matrices", "norms")
NO_TILE = 1 << 20  # which no head fills
# instead of "attention": as some published runs, and as lmwright did before
NO_INT8 = "int8"  # ternary products, which published runs have none of
OTHER_ATTENTION = ("splash 2048", "no kernel", "one block of keys", "whole rows")


def without(names: tuple[str, ...]) -> tuple[str, ...]:
    """The program for `compile_for` that undoes these."""
    return (__file__, ",".join(names))


def _in_bfloat16(eqn: str, xs: Any, ws: Any, dtype: Any) -> Any:
    from jax import lax

    from lmwright.core.weight import product

    # without the barrier the compiler sees through the conversion and multiplies int8
    return product(eqn, *lax.optimization_barrier((xs.astype(dtype), ws.astype(dtype))))


def undo(names: list[str]) -> None:
    """Puts the old functions back, in this process."""
    from dataclasses import replace
    from functools import partial

    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    from lmwright.core import ternary, weight
    from lmwright.kernels import tpu_attention, tpu_row_attention, tpu_splash
    from lmwright.models import block
    from lmwright.nn import mlp, rope

    ours = tpu_splash.block_sizes

    def one_block_of_keys(seq_len: int, *rest: int, **keys: int) -> splash.BlockSizes:
        sizes = {"block_q_dkv": min(seq_len, 512), "block_kv_dkv": min(seq_len, 2048)}
        return replace(ours(seq_len, *rest, **keys), **sizes)

    @partial(jax.checkpoint, static_argnums=0)
    def behind_barrier(kind: str, gate: jax.Array, up: jax.Array) -> jax.Array:
        return mlp.activate(kind, gate) * up

    def head_minor(seq_len: int, head_dim: int, *rest: bool, **keys: int) -> splash.BlockSizes:
        fitting = (s for s in (1024, 512, 256, 128) if seq_len % s == 0 and s * head_dim <= 2**17)
        size = next(fitting)
        names = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
        inner = {"block_kv_compute": min(size, 512), "block_kv_dkv_compute": min(size, 512)}
        return splash.BlockSizes(**{f"block_{name}": size for name in names}, **inner)

    def fused_2048(seq_len: int, head_dim: int, *rest: bool, **keys: int) -> splash.BlockSizes:
        size = min(seq_len, 2048)
        names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")
        blocks = {f"block_{name}": size for name in names}
        return splash.BlockSizes(**blocks, use_fused_bwd_kernel=True)

    if {"attention", *OTHER_ATTENTION} & set(names):
        _replace(tpu_row_attention, "VECTOR_MEMORY", 0)
        _replace(tpu_attention, "TILE", NO_TILE)  # splash takes long rows, too
    _replace(ternary, "_integers", _in_bfloat16 if NO_INT8 in names else ternary._integers)
    if "matrices" in names:
        _replace(weight, "_heads_as_one", lambda eqn: None)
        _replace(weight, "added_up", lambda sums: jnp.sum(sums.astype(jnp.float32), axis=0))
    if "norms" in names:
        _replace(block, "before_products", lambda h: h)
    if "gradients" in names:
        _replace(weight, "MOST_SCATTERED", 0)
    if "rope" in names:
        _replace(rope, "_by_product", rope._by_halves)
    if "attention" in names:
        _replace(tpu_splash, "block_sizes", head_minor)
    if "splash 2048" in names:
        _replace(tpu_splash, "block_sizes", fused_2048)
    if "one block of keys" in names:
        _replace(tpu_splash, "block_sizes", one_block_of_keys)
    if "swiglu" in names:
        _replace(block, "gated", behind_barrier)
    if "no kernel" in names:
        _replace(tpu_attention, "fits", lambda seq_len, early=False: False)


def _replace(module: ModuleType, name: str, old: Any) -> None:
    """Fails where the module no longer has the name, which would undo nothing."""
    getattr(module, name)
    setattr(module, name, old)


if __name__ == "__main__":
    from lmwright.planner.compiler import child

    undo(sys.argv.pop(1).split(","))
    child.main()
