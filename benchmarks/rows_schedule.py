"""What passes over the rows of experts cost on TPUs, by the compiler's own cycles.

    python benchmarks/rows_schedule.py [v5e ...]      # some 10 s a generation; needs libtpu

For every generation: seconds of small programs over M rows of D bfloat16 values as `plan` reckons
them (`planner/compiler/cost.py`), in arrays that memory reads or writes in that time, and what the
constants of `planner/analytic/experts.py` give. `sum` adds up k neighboring rows: cycles of a core
for each element of the result.
"""

import argparse
import os

from lmwright.hardware.slices import parse_slice, topology_request
from lmwright.planner.analytic import experts
from lmwright.planner.compiler.compile import COMPILER_ENVIRONMENT
from lmwright.planner.compiler.cost import FREE, _Walk
from lmwright.planner.compiler.hlo import parse

SLICES = {"v4": "v4-8", "v5e": "v5e-4", "v5p": "v5p-8", "v6e": "v6e-4", "7x": "7x-8"}
ROWS, WIDTH = 65536, 2048
MOST = (2, 4, 8)  # choices of a token


def programs(array) -> dict[str, tuple]:
    """Programs by name, with their arguments from `array(dtype, sizes...)`."""
    import jax
    import jax.numpy as jnp

    def masked(ours, a):
        return jnp.where(ours[:, None], a, 0)

    def mask(ours, a):
        return masked(ours, a)

    def gate(ours, a, b):
        return jax.nn.silu(masked(ours, a)) * masked(ours, b)

    def added(y, shares):
        parts = y.reshape(*shares.shape, WIDTH).astype(jnp.float32) * shares[..., None]
        return jnp.sum(parts, axis=1).astype(y.dtype)

    rows, ours = array(jnp.bfloat16, ROWS, WIDTH), array(jnp.bool_, ROWS)
    sums = {f"sum {k}": (added, rows, array(jnp.float32, ROWS // k, k)) for k in MOST}
    return {"mask": (mask, ours, rows), "gate": (gate, ours, rows, rows), **sums}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("generations", nargs="*", default=list(SLICES))
    os.environ.update(COMPILER_ENVIRONMENT)
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    for name in parser.parse_args().generations:
        where = parse_slice(SLICES[name])
        rates = where.family.rates
        device = topologies.get_topology_desc(**topology_request(where)).devices[0]
        place = SingleDeviceSharding(device)

        def array(dtype, *sizes, place=place):
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

        one = ROWS * WIDTH * 2 / rates.hbm_bytes_per_s
        words = []
        for title, (function, *given) in programs(array).items():
            program = parse(jax.jit(function).lower(*given).compile().as_text())
            walk, body = _Walk(program, where, rates), program.computations[program.entry]
            steps = [s for s in body.instructions if s.opcode not in FREE]
            costs = [walk.compute_s(s, body, 0.0) for s in steps]
            seconds = sum(s for kind, s in costs if kind == "vector")
            if title.startswith("sum"):
                results = ROWS * WIDTH / int(title.split()[1])
                cycles = seconds * rates.clock_hz * rates.cores * rates.cycles_share
                words.append(f"{title}: {cycles / results:.3f}")
            else:
                words.append(f"{title}: {seconds / one:.2f}")
        share = experts.CYCLES / rates.cycles_share
        given = [(experts.STARTED + arrays) * share for arrays in (2, 3)]
        sums = 1 / experts.SUMMED_PER_CYCLE
        print(f"{name}: {', '.join(words)}; by the constants {given[0]:.2f}, {given[1]:.2f} and "
              f"{sums:.3f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
