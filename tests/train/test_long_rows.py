"""Memory of a step on rows of 32,768 tokens: pieces against the whole, by the benchmark."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "long_rows.py"


@pytest.mark.slow
def test_pieces_need_less_than_a_third_of_the_memory():
    """The same loss and norm of the gradient, in less than a third of the memory (31.7 %)."""
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--only", "whole", "remat and chunks"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    whole, pieces = (line.rsplit(maxsplit=5)[1:] for line in done.stdout.splitlines())
    (full, _, _, *of_whole), (part, _, _, *of_pieces) = whole, pieces
    assert float(full) > 6
    assert float(part) <= float(full) / 3
    for one, other in zip(of_whole, of_pieces, strict=True):
        assert float(one) == pytest.approx(float(other), rel=2e-5)
