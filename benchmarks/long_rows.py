"""Memory of a train step on a row of 32,768 tokens, on this CPU: whole, and in pieces.

    python benchmarks/long_rows.py            # a tiny Gemma 2; a few minutes, 8 GiB
    python benchmarks/long_rows.py --lora 16  # the same with adapters

The run is examples/gemma2-9b-32k.toml with a smaller model of the same kinds of layers. Each
setting takes a step in a process of its own. Printed is the peak of the resident memory above that
of the process when it had compiled the step and had no weights yet, as bytes and as a share of the
first; then the loss and the norm of the gradient.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

RUN = Path(__file__).resolve().parents[1] / "examples" / "gemma2-9b-32k.toml"
SEQ_LEN = 32_768
TINY = (
    "model.num_layers=8", "model.embed_dim=512", "model.mlp_dim=2048", "model.num_heads=2",
    "model.num_kv_heads=1", "model.head_dim=32", "model.query_dim=32", "model.vocab_size=2048",
    "train.global_batch_size=1", "train.precision=fp32", "mesh.fsdp=1", "train.steps=10",
    "train.offload=none", "train.head_gradient=by_chunk",
)  # fmt: skip
SETTINGS = {
    "whole": (
        "train.remat=none",
        "train.mlp_chunk_tokens=none",
        f"train.loss_chunk_tokens={SEQ_LEN}",
    ),
    "remat and chunks": ("train.remat=block", "train.mlp_chunk_tokens=4096"),
    "remat": ("train.remat=block", "train.mlp_chunk_tokens=none"),
}


def peak_bytes(overrides: Sequence[str]) -> dict[str, float]:
    """Peak resident memory of a step above that of the idle process, loss and gradient norm."""
    import jax
    import numpy as np

    from lmwright.core.contract import Batch
    from lmwright.core.sharding import batch_sharding
    from lmwright.formats.open import load_run
    from lmwright.program.plan import resolve
    from lmwright.program.state import abstract_state, init_state
    from lmwright.program.step import make_step

    run = load_run(str(RUN), overrides)
    plan = resolve(run, jax.devices()[:1])
    size = (1, 1, plan.seq_len)
    batch = Batch(
        tokens=np.random.default_rng(0).integers(0, run.model.vocab_size, size, dtype=np.int32),
        segment_ids=np.ones(size, np.int32),
        positions=np.broadcast_to(np.arange(plan.seq_len, dtype=np.int32), size),
        loss_weight=np.ones(size, np.float32),
    )
    jax.set_mesh(plan.mesh)
    batch = jax.device_put(batch, batch_sharding(plan.mesh, leading=1))
    step = make_step(plan).lower(abstract_state(plan), batch).compile()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # of what the compiler used
    idle = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    _, metrics = step(init_state(plan), batch)
    figures = {name: float(metrics[name]) for name in ("loss", "grad_norm")}
    return {"bytes": resident_bytes("VmHWM") - idle, **figures}


def resident_bytes(kind: str) -> int:
    """Memory of this process: VmRSS what is resident now, VmHWM the most that ever was."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"no {kind} in /proc/self/status")


def measure(overrides: Sequence[str]) -> dict[str, float]:
    """`peak_bytes` in a process of its own."""
    words = [sys.executable, __file__, "--child", *overrides]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measures every setting, or one as the child."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lora", type=int, metavar="RANK")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=SETTINGS, metavar="SETTING")
    parser.add_argument("--child", nargs="*")
    asked = parser.parse_args()
    if asked.child is not None:
        print(json.dumps(peak_bytes(asked.child)))
        return
    lora = (f"lora.rank={asked.lora}",) if asked.lora else ()
    whole = None
    for name in asked.only:
        got = measure((*TINY, *lora, *SETTINGS[name]))
        whole = whole or got["bytes"]
        figures = f"{got['bytes'] / 2**30:6.2f} GiB  {got['bytes'] / whole:6.1%}"
        print(f"{name:18} {figures}  {got['loss']:.6f}  {got['grad_norm']:.6f}", flush=True)


if __name__ == "__main__":
    main()
