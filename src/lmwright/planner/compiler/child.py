"""The child process of `compiler.compile`: one train step, one slice, one answer as JSON.

It is a process of its own because the TPU compiler can take gigabytes, hang or abort.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from lmwright.core.compute import HOST_MEMORY
from lmwright.core.weight import nbytes
from lmwright.errors import UserError
from lmwright.formats.open import load_run
from lmwright.hardware.slices import topology_request
from lmwright.planner.analytic.machine import Machine, parse_machine
from lmwright.planner.compiler import gpu
from lmwright.planner.compiler.compile import memory_of_error
from lmwright.program import cache, executable
from lmwright.program.plan import resolve


def shard_bytes(tree: Any) -> int:
    """Bytes that one device holds of a tree of abstract arrays with shardings, without what is on
    the host."""
    leaves = [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind != HOST_MEMORY]
    return nbytes([
        jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in leaves
    ])  # fmt: skip


def compile_step(
    run_file: str, slice_name: str, folder: Path, names: Sequence[str] = ()
) -> dict[str, Any]:
    """Compiles the step of the trainees of these names, of all if there are none, and writes
    `step.hlo`; what the compiler said, in bytes and seconds."""
    from lmwright.program.plan import step_options
    from lmwright.program.state import abstract_batch, abstract_state
    from lmwright.program.step import make_step

    where = parse_machine(slice_name)
    plan = resolve(load_run(run_file), devices_of(where))
    trainees = plan.training.trainees
    active = [t for t in trainees if t.name in names] if names else list(trainees)
    rows = sum(t.rows for t in active)
    share = rows / sum(t.rows for t in trainees)
    num_rows = rows // plan.run.train.num_microbatches
    state = abstract_state(plan)
    frozen, parts = state["frozen"], list(state["trained"].values())
    with jax.set_mesh(plan.mesh), gpu.as_default_device(where):
        started = time.perf_counter()
        lowered = make_step(plan, active).lower(state, abstract_batch(plan, num_rows))
        lower_s = time.perf_counter() - started
        answer = {
            "slice": where.name,
            "mesh": dict(plan.mesh.shape),
            "num_params": plan.num_params,
            "tokens_per_step": round(share * plan.tokens_per_step),
            "flops_per_step": share * plan.flops_per_step,
            "weights_bytes": shard_bytes([frozen, [part["weights"] for part in parts]]),
            "optimizer_bytes": shard_bytes([(p["optimizer"], p.get("ema", {})) for p in parts]),
            "lower_s": lower_s,
        }
        text, options = lowered.as_text(), step_options(plan)
        key = cache.key_of(text, where.name, options)
        made = executable.made_of(text, plan.devices, options, plan.run)
        step_key = executable.key_of(text, plan.devices, options)
        cached = cache.load(key)
        if cached and not is_answer(cached[0]):  # as earlier versions kept them
            cached = None
        if cached:
            reply, hlo = cached
            is_kept = executable.exists(step_key)
        else:
            reply, hlo, compiled = ask_compiler(lowered, gpu.without_card(where, options))
            if is_answer(reply):
                cache.save(key, reply, hlo)
            ours = compiled is not None and where.platform == "tpu"
            is_kept = ours and executable.save(step_key, compiled, made)
    if hlo:
        folder.joinpath("step.hlo").write_text(hlo)
    return answer | reply | {"from_cache": bool(cached), "step_kept": is_kept}


def devices_of(where: Machine) -> Sequence[Any]:
    """JAX's devices of a machine, for compiling alone."""
    if where.where is None:
        return gpu.devices_of(where)
    try:
        return topologies.get_topology_desc(**topology_request(where.where)).devices
    except Exception as error:
        raise UserError(
            f"--on {where.name}: the TPU compiler refuses this topology ({error}); name another, "
            "or ask with --quick"
        ) from None


def is_answer(reply: dict[str, Any]) -> bool:
    """True if the compiler said what memory it needs, which is worth caching; a failure is not, nor
    is less than it says now."""
    if "error" in reply:
        return memory_of_error(reply["error"]) is not None
    return not reply.get("host_bytes") or "host_argument_bytes" in reply


def ask_compiler(
    lowered: jax.stages.Lowered, options: dict[str, str]
) -> tuple[dict[str, Any], str, jax.stages.Compiled | None]:
    """The compiler's answer for a program with more options, and the compiled program, as text and
    as an object."""
    started = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=options)
    except Exception as error:
        # an error in a kernel is raised as one of JAX's own, from what the compiler raised
        if not isinstance(error.__cause__ or error, jax.errors.JaxRuntimeError):
            raise
        return {"error": str(error), "compile_s": time.perf_counter() - started}, "", None
    memory = compiled.memory_analysis()
    facts = {
        "compile_s": time.perf_counter() - started,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "live_bytes": memory.peak_memory_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "host_argument_bytes": memory.host_argument_size_in_bytes,
        "host_bytes": memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
    }
    return facts, compiled.as_text(), compiled


def main() -> None:
    """`python -m lmwright.planner.compiler.child RUN SLICE FOLDER [TRAINEE...]` writes
    FOLDER/answer.json."""
    run_file, slice_name, folder, *names = sys.argv[1:]
    try:
        answer = compile_step(run_file, slice_name, Path(folder), names)
    except UserError as error:
        answer = {"user_error": str(error)}
    Path(folder, "answer.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
