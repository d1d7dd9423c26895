"""List prices of one chip-hour by kind of machine, of one day; a run may override them.

`plan.prices` in the run file and `lmwright plan --price` go before this table. Prices differ by
region, contract and day; none here is an offer.
"""

from dataclasses import dataclass

PRICES_DATE = "2026-10"
PRICES_SOURCE = "cloud.google.com/tpu/pricing and /compute/gpus-pricing, cheapest US region"


@dataclass(frozen=True, kw_only=True)
class Price:
    """USD for one chip (or GPU) and hour."""

    on_demand: float
    spot: float | None = None
    """As the SkyPilot catalog (github.com/skypilot-org/skypilot-catalog) lists it for the
    cheapest US region; None where we have no figure."""


# A GPU's price is that of the whole machine (a2-highgpu, a2-ultragpu, a3-highgpu, a3-ultragpu,
# g2-standard-4) over its GPUs. The B200 has no list price by the hour.
PRICES = {
    "v2": Price(on_demand=1.50),
    "v3": Price(on_demand=2.00),
    "v4": Price(on_demand=3.22),
    "v5e": Price(on_demand=1.20),
    "v5p": Price(on_demand=4.20, spot=0.93),
    "v6e": Price(on_demand=2.70, spot=0.57),
    "7x": Price(on_demand=12.00),
    "a100-40gb": Price(on_demand=3.67),
    "a100": Price(on_demand=5.07),
    "h100": Price(on_demand=11.06),
    "h200": Price(on_demand=10.60),
    "l4": Price(on_demand=0.71),
}
