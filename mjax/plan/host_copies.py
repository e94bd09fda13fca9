"""Model the copies between a GPU and the memory of its host.

Enters: a plan. Leaves: the plan with the seconds that these copies add to a step.
Modelled, never measured: the link has the speed in its data sheet (`hardware.gpus`)
times `LINK_EFFICIENCY`, for every GPU of a node at once. The memory of the host is
assumed to keep up with all of them. The replay of a schedule does not model this link,
so these seconds are added to its own.
"""

import dataclasses

from mjax.hardware.gpus import Gpu
from mjax.plan.result import HOST_COPIES, Modelled, Plan, Source

LINK_EFFICIENCY = 0.85
"""Share of the link's bandwidth. Assumed."""


def copy_s(num_bytes: int | float, gpu: Gpu) -> float:
    """Return the seconds of copying bytes over the link, in one direction."""
    return num_bytes / (gpu.host_link_bytes_per_s * LINK_EFFICIENCY)


def state_copies_s(state_bytes: int | float, gpu: Gpu) -> float:
    """Return the seconds of copying an optimizer state to the GPU and back.

    The directions are counted one after the other: any overlap of the two is ignored,
    and so is the update, which is short compared with a copy.

    Args:
      state_bytes: bytes in host memory, for one GPU.
      gpu: the GPU whose link they cross.
    """
    return copy_s(2 * state_bytes, gpu)


def with_copies(plan: Plan) -> Plan:
    """Add the copies of the optimizer state to a plan; nothing overlaps them."""
    state = plan.memory.host.get("optimizer state", 0)
    if not state:
        return plan
    seconds = state_copies_s(state, plan.topology.description)
    sources = plan.sources
    if sources:
        row = Source(name=HOST_COPIES, seconds=seconds, num_bytes=None, floor_s=seconds)
        *rows, other = sources
        sources = (*sorted((*rows, row), key=lambda row: -row.seconds), other)
    modelled = _longer(plan.modelled, seconds)
    return dataclasses.replace(plan, modelled=modelled, sources=sources)


def _longer(modelled: Modelled, seconds: float) -> Modelled:
    share = modelled.step_s / (modelled.step_s + seconds)
    return dataclasses.replace(
        modelled,
        parts_s={**modelled.parts_s, HOST_COPIES: seconds},
        mfu=modelled.mfu * share,
        tokens_per_s=modelled.tokens_per_s * share,
    )
