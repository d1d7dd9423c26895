"""What gradients that are applied layer by layer could take off the peak, by the TPU compiler.

    python benchmarks/gradient_tree.py examples/gemma2-9b-32k.toml v6e-8 [train.remat=mlp ...]

Compiles the run's step as it is (up to 20 minutes; needs libtpu), and walks it in its order: the
most that is alive at once beside weights and optimizer, and the same without the stacks of the
layers' gradients, which is the least that such a step could need.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from lmwright.formats.open import load_run
from lmwright.hardware.slices import parse_slice
from lmwright.planner.compiler.buffers import padded_bytes
from lmwright.planner.compiler.compile import compile_for
from lmwright.planner.compiler.hlo import Computation, arrays, parse
from lmwright.planner.compiler.peak import GRADIENTS, Walk

GIB = 2**30


@dataclass
class WithoutGradients(Walk):
    """A walk in which the stacks of gradients take nothing."""

    def last_reads(self, computation: Computation) -> dict[str, int]:
        last = super().last_reads(computation)
        self.sizes |= dict.fromkeys(layer_gradients(self), 0)
        return last


def layer_gradients(walk: Walk) -> list[str]:
    """Stacks that the backward pass fills, of the shape of a weight."""
    stacks = [name for name in walk.sizes if walk.stacks.get(name, "").startswith(GRADIENTS)]
    return [n for n in stacks if {dims for _, dims in arrays(walk.made[n].shape)} & walk.weights]


def most_alive(walk: Walk) -> Mapping[str, int]:
    """Bytes of what is alive at the fullest moment, by the name of its instruction."""
    alive = walk.fullest(walk.program.computations[walk.program.entry])
    return {name: walk.sizes[name] for name in alive}


def main(words: list[str]) -> None:
    """Compiles and prints."""
    run_file, where, *changes = words
    compiled = compile_for(load_run(run_file, changes), parse_slice(where))
    program = parse(compiled.hlo)
    ours, less = Walk(program), WithoutGradients(program)
    now, then = most_alive(ours), most_alive(less)
    tree = sum(padded_bytes(ours.made[name].shape) for name in layer_gradients(ours) if name in now)
    print(f"peak {compiled.peak_bytes / GIB:.2f} GiB, by the compiler")
    print(f"alive beside weights and optimizer {sum(now.values()) / GIB:.2f} GiB")
    print(f"  of that gradients of layers {tree / GIB:.2f} GiB")
    print(f"without them {sum(then.values()) / GIB:.2f} GiB, the largest of it")
    for name, size in sorted(then.items(), key=lambda pair: -pair[1])[:4]:
        print(f"  {size / GIB:.2f} GiB  {less.made[name].shape.partition('{')[0]}")


if __name__ == "__main__":
    main(sys.argv[1:])
