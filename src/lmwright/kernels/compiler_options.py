"""Options that the platforms' compilers need for the kernels of a program."""

import os
from collections.abc import Mapping

from lmwright.core import cpu
from lmwright.core.compute import Compute
from lmwright.core.weight import TORUS

# docs/internals/flagship.md says what each of them brings
TPU_OPTIONS = {
    # a gathered weight is put together before its product, not in a loop of small products
    # that keeps a float32 sum of the whole result
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
    # collectives run behind arithmetic
    "xla_enable_async_all_gather": "true",
    "xla_enable_async_all_reduce": "true",
    "xla_tpu_enable_latency_hiding_scheduler": "true",
}

GPU_OPTIONS = {
    # devices sum each large gradient once it is there, not those of a layer together
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "8388608",
    # products of one input are not put into one, whose result would be cut again
    "xla_disable_hlo_passes": "dot-merger",
}

# the same bits each time: sums in a fixed order
IN_ORDER = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")


def in_order(options: Mapping[str, str]) -> bool:
    """True if a run's options for the step, or the environment, ask for sums in a fixed order.
    cuDNN's attention is left out then: XLA forgets what it compiled for it in all layers but one
    (seen with JAX 0.11.2: `raw_hash_map<>::at` at the first step)."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return any(options.get(name) == "True" or f"--{name}=true" in flags for name in IN_ORDER)


def options_for(compute: Compute, device_kind: str) -> dict[str, str]:
    """Compiler options for `jax.jit` that the kernels of these settings need."""
    if compute.platform == "tpu":
        # other generations' compilers refuse it
        torus = {"xla_tpu_enable_async_all_to_all": "true"} if device_kind in TORUS else {}
        return TPU_OPTIONS | torus
    if compute.platform == "gpu":
        return GPU_OPTIONS
    return cpu.compiler_options() if compute.platform == "cpu" else {}
