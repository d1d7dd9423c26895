"""Chips: whether JAX has all devices of the slice that is paid for."""

import os
from collections.abc import Mapping

import jax

from lmwright.errors import UserError
from lmwright.hardware.slices import parse_slice

SLICE = "LMWRIGHT_ON"  # by the host's agent, as in 2xv4-32


def refuse_missing_chips(variables: Mapping[str, str] = os.environ) -> None:
    """Raises UserError where there are fewer devices than the slice has, or none but CPUs. Its
    words tell the supervisor that the slice is bad."""
    name = variables.get(SLICE)
    if not name:
        return
    wanted, devices = parse_slice(name).num_devices, jax.devices()
    num_devices = 0 if devices[0].platform == "cpu" else len(devices)
    if num_devices < wanted:
        raise UserError(
            f"chips are missing: JAX has {num_devices} of the {wanted} devices of {name}; start "
            "again on another slice"
        )
