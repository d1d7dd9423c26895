"""Rows over the chips of a slice: what the TPU compiler makes of a window's layer and of a global
one."""

import json
import os
import subprocess
import sys

from tests.aot.programs import ROOT
from tests.aot.slices import needs_libtpu

WINDOW, GLOBAL, IN_ORDER = "window, ring", "ring", "ring, in order"


@needs_libtpu
def test_a_window_exchanges_only_its_stretch_and_the_ring_is_balanced():
    """Eight chips with 256 tokens each; the window lies within a neighbor's."""
    small = ["--tokens", "2048", "--window", "129", "--heads", "4", "2", "128"]
    script = ROOT / "benchmarks" / "context_schedule.py"
    command = [sys.executable, str(script), "--json", *small, "--only", WINDOW, GLOBAL, IN_ORDER]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
                          capture_output=True, text=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    permutes = {name: one["collective-permute"] for name, one in found.items()}
    # keys, values and segment ids from the neighbor, two gradients back
    assert permutes[WINDOW] == 5
    # keys and values go around seven times, and again with gradients, beside what changes the order
    assert permutes[GLOBAL] > 7 * 2 + 7 * 4
    # 128 of 256 tokens once, not all of them seven times
    assert found[WINDOW]["links_s"] < found[GLOBAL]["links_s"] / 14
    products = {name: one["matmul_flops"] for name, one in found.items()}
    # pairs of half a device's tokens: 3 of its own and 2 in each of seven steps; 4 in each of eight
    assert products[GLOBAL] / products[IN_ORDER] < 0.6
