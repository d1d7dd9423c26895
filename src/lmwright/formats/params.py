"""params: how many weights the model at a place has, part by part."""

from collections.abc import Sequence

from lmwright.formats.open import find_model
from lmwright.models.counts import params_report


def params_command(name: str, overrides: Sequence[str] = ()) -> None:
    """Prints the count of whatever `find_model` finds by that name."""
    print(params_report(name, find_model(name, overrides)))
