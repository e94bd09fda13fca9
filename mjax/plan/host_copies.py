"""Model the copies between a GPU and the memory of its host.

Enters: a plan. Leaves: the plan with the seconds that these copies add to a step.
Modelled, never measured: the link has the speed of its data sheet (`hardware.gpus`),
of which `LINK_EFFICIENCY` is reached by every GPU of a node at once: the memory of the
host is taken to keep up with all of them. The replay of a schedule knows no such link;
so these seconds stand beside its own.
"""

import dataclasses

from mjax.hardware.gpus import Gpu
from mjax.plan.result import HOST_COPIES, Modelled, Plan

LINK_EFFICIENCY = 0.85
"""Share of the link's bandwidth. Assumed."""


def copy_s(num_bytes: int | float, gpu: Gpu) -> float:
    """Return the seconds of copying bytes over the link, in one direction."""
    return num_bytes / (gpu.host_link_bytes_per_s * LINK_EFFICIENCY)


def state_copies_s(state_bytes: int | float, gpu: Gpu) -> float:
    """Return the seconds in which an optimizer state comes to the GPU and goes back.

    One direction after the other; an update is short beside a copy, and what overlaps
    of the two directions is not counted.

    Args:
      state_bytes: in host memory, for one GPU.
      gpu: whose link it crosses.
    """
    return copy_s(2 * state_bytes, gpu)


def with_copies(plan: Plan) -> Plan:
    """Add to a plan what the copies of its optimizer state take; nothing hides them."""
    state = plan.memory.host.get("optimizer state", 0)
    if not state:
        return plan
    seconds = state_copies_s(state, plan.topology.description)
    return dataclasses.replace(plan, modelled=_longer(plan.modelled, seconds))


def _longer(modelled: Modelled, seconds: float) -> Modelled:
    share = modelled.step_s / (modelled.step_s + seconds)
    return dataclasses.replace(
        modelled,
        parts_s={**modelled.parts_s, HOST_COPIES: seconds},
        mfu=modelled.mfu * share,
        tokens_per_s=modelled.tokens_per_s * share,
    )
