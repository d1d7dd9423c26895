"""List prices of one chip-hour by kind of machine, of one day; a run may override them.

`plan.prices` in the run file and `lmwright plan --price` go before this table. Prices differ by
region, contract and day; none here is an offer.
"""

from lmwright.hardware.chips import CHIPS, Price
from lmwright.hardware.devices import GPUS

PRICES_DATE = "2026-10"
PRICES_SOURCE = "cloud.google.com/tpu/pricing and /compute/gpus-pricing, cheapest US region"


def price_of(kind: str) -> Price | None:
    """The list price of a kind of machine; None where there is none."""
    return (CHIPS.get(kind) or GPUS[kind]).price if kind in CHIPS or kind in GPUS else None
