"""Memory of the host that a run pins for its devices, checked before anything is pinned: a process
that pins more than there is is killed without a message."""

import psutil

from lmwright.core.compute import HOST_MEMORY
from lmwright.errors import UserError
from lmwright.hardware.chips import GIB
from lmwright.program.plan import Plan


def refuse_small_host(plan: Plan) -> None:
    """Raises UserError where a run puts something on the host that its devices cannot read there,
    or for which the host has too little free memory."""
    run = plan.run
    optims = [trainee.optim.offload for trainee in plan.training.trainees]
    field = "train.offload" if run.train.offload != "none" else "optim.offload"
    if run.train.offload == "none" and set(optims) == {"none"}:
        return
    device = plan.devices[0]
    if HOST_MEMORY not in {memory.kind for memory in device.addressable_memories()}:
        raise UserError(
            f"{field}: devices of kind {device.device_kind} cannot read the memory of their host; "
            f"use {field}=none"
        )
    if device.platform == "cpu":  # where the host's memory is the device's own
        return
    from lmwright.planner.analytic.layout import Layout
    from lmwright.planner.analytic.memory import memory

    local = sum(device.process_index == near.process_index for near in plan.devices)
    needed, free = local * memory(Layout.of(plan)).host, psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"{field}: {local} devices put {needed / GIB:.1f} GiB into the memory of this host, "
            f"where {free / GIB:.1f} GiB are free; use less of it, smaller batches or more hosts"
        )
