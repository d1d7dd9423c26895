"""Lines that `quantize` prints."""

from types import SimpleNamespace

import numpy as np
import pytest

from lmwright.quantize import command


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
