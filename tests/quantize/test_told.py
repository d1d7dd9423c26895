"""Lines that `quantize` prints."""

from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest

from lmwright.api import models as api
from lmwright.cli import models as cli
from lmwright.quantize import command
from lmwright.quantize.grids import FILES, RULES, Target


@pytest.mark.parametrize("count, rows", [(1, "row"), (2, "rows")])
def test_one_row_is_no_rows(monkeypatch, capsys, count, rows):
    monkeypatch.setattr(command, "matrices_of", lambda *_: {})
    monkeypatch.setattr(command, "matrices_left", lambda *_: 0)
    done = SimpleNamespace(
        loaded=SimpleNamespace(model=None),
        difference=SimpleNamespace(line=lambda: "equal"),
        errors={},
    )
    read = SimpleNamespace(measured=np.zeros((count, 8)), compared=np.zeros((count, 8)))
    command._tell(done, read, "int4", "a.txt")
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"measured on {count} {rows} of 8 tokens of a.txt: 0 weights rounded"
    assert second == f"on {count} other {rows}: equal"


def test_the_command_and_python_offer_the_same_grids():
    option = next(p for p in cli.quantize.params if p.name == "to")
    offered = _words(Target)
    assert set(option.type.choices) == offered == {*RULES, *FILES}
    assert _words(api.quantize.__annotations__["to"]) == offered


def _words(kind):
    """Choices of a type."""
    if isinstance(kind, str):
        return {kind}
    return set().union(*map(_words, get_args(kind)))
