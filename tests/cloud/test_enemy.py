"""A few seeds of benchmarks/drill_slices.py."""

import pytest

pytest.importorskip("google.cloud.tpu_v2", reason="google-cloud-tpu is not installed")

from tests.cloud.enemy import drill


@pytest.mark.parametrize(
    "seed", [4, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (6, 30))]
)
def test_a_job_is_done_and_nothing_is_left_over(seed, tpu, proxy):
    world = drill(seed, proxy, faults=8)
    assert world.problems == [], world.told
