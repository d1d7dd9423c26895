"""A stop that comes while JAX compiles, in a thread of its own."""

import os
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import sys, threading, time
    import jax, jax.numpy as jnp
    import lmwright.cli.main as cli
    from lmwright.__main__ import main

    def long(x):
        for i in range(1500):
            x = jnp.sin(x @ x + i)
        return x

    def command():
        threading.Thread(target=jax.jit(long).lower(jnp.ones((8, 8))).compile, daemon=True).start()
        time.sleep(0.3)
        print("stopped")
        {end}

    cli.main = command
    sys.exit(main())
"""


@pytest.mark.parametrize("end, code", [("return 130", 130), ("raise SystemExit(42)", 42)])
def test_it_keeps_its_exit_code(end, code):
    """At its end Python takes JAX's objects from the thread, which crashed in six of seven."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT.format(end=end))],
        env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (code, "stopped\n", "")
