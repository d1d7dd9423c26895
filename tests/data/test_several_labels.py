"""Several labels in one cell of csv, with a separator between them."""

import pytest

from lmwright.data.tokens.classes import Classes
from lmwright.errors import UserError


@pytest.mark.parametrize("cell", ["joy, love", "joy;love", "joy | love"])
def test_several_labels_in_a_cell_are_told_their_form(cell):
    classes = Classes(("joy", "love", "a, b"), 16)
    with pytest.raises(UserError) as caught:
        classes.number(cell, "ml", "ml.csv:2")
    assert str(caught.value).endswith(
        """; write several as a list, ["joy", "love"], also in a cell of csv, for """
        'objective.kind = "multilabel"'
    )
    with pytest.raises(UserError, match="add it there, or correct the row"):
        classes.number("joy, hate", "ml", "ml.csv:2")
    assert classes.number("a, b", "ml", "ml.csv:2") == 2
