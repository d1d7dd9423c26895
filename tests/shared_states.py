"""One compiled program for the first states of all runs of a process that begin alike.

Each run makes its program anew, as its process begins once; tests begin hundreds of times, mostly
with one and the same small model.
"""

import sys

import jax

from tests.shared_steps import program_of

KEPT = 32  # programs; the oldest goes


def share_states():
    """Lets `init_state` and `fresh_frozen` take the program that they made before of the same
    plan."""
    state = sys.modules.get("lmwright.program.state")
    if state is not None and not isinstance(state.jax, SharedJit):
        state.jax = SharedJit()


class SharedJit:
    """JAX, whose `jit` finds again what it was given with the same plan."""

    def __init__(self):
        self.programs = {}

    def __getattr__(self, name):
        return getattr(jax, name)

    def jit(self, fn, **options):
        held = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        key = (fn.__code__, program_of(held["plan"].cell_contents))
        if key not in self.programs:
            if len(self.programs) == KEPT:
                del self.programs[next(iter(self.programs))]
            self.programs[key] = jax.jit(fn, **options)
        return self.programs[key]
