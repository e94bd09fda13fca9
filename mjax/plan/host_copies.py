"""Model the copies between a GPU and the memory of its host, in closed form.

Enters: bytes. Leaves: seconds. Modelled, never measured: the link has the speed in its
data sheet (`hardware.gpus`) times `LINK_EFFICIENCY`, for every GPU of a node at once.
The memory of the host is assumed to keep up with all of them. Of a compiled step the
replay models the same link, copy by copy (`mjax.plan.replay`).
"""

from mjax.hardware.gpus import Gpu

LINK_EFFICIENCY = 0.85
"""Share of the link's bandwidth. Assumed."""
_FORWARD_SHARE = 1 / 4
"""Share of the forward pass in the time of layers whose backward pass repeats it."""


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


def input_waits_s(input_bytes: int | float, layers_s: float, gpu: Gpu) -> float:
    """Return the seconds for which layers wait for copies of their inputs.

    The inputs go to the host during the forward pass, and come back during the backward
    pass, which takes three times as long: it repeats the forward pass.

    Args:
      input_bytes: of all layers and microbatches of a step, for one GPU.
      layers_s: seconds of the layers in a step, forward and backward.
      gpu: the GPU whose link they cross.
    """
    one_way_s, forward_s = copy_s(input_bytes, gpu), _FORWARD_SHARE * layers_s
    passes_s = (forward_s, layers_s - forward_s)
    return sum(max(0.0, one_way_s - seconds) for seconds in passes_s)
