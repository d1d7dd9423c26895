"""Twenty steps of training are what they were, for every family, objective and way of LoRA.

After a change that is meant: `python -m tests.golden.curves make tests/golden/curves.json`, and
read the diff. `python -m tests.golden.curves against COMMIT` compares bit for bit with a commit.
"""

import json
from pathlib import Path

import pytest

from lmwright.models import KINDS as MODELS
from lmwright.objectives import KINDS as OBJECTIVES
from tests.golden.cases import CASES, QUICK
from tests.golden.curves import ROOT, differences, train_apart

GOLDEN = json.loads(Path(__file__).with_name("curves.json").read_text())
TOLERANCE = 1e-5  # of other machines' roundings


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(QUICK, id="quick"),
        pytest.param([n for n in CASES if n not in QUICK], id="others", marks=pytest.mark.slow),
    ],
)
def test_the_curves_are_the_golden_ones(names):
    """All cases in one process, which imports jax once."""
    assert not differences(GOLDEN, train_apart(ROOT / "src", names), TOLERANCE)


def test_every_family_and_objective_has_a_curve():
    assert set(GOLDEN) == set(CASES)
    assert {n.removeprefix("family ") for n in CASES if n.startswith("family")} == set(MODELS)
    named = {n.removeprefix("objective ") for n in CASES if n.startswith("objective")}
    assert named | {"clm"} == set(OBJECTIVES)
