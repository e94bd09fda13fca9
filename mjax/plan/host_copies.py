"""Model the copies between a GPU and the memory of its host, in closed form.

Input: bytes. Output: seconds. Modelled, never measured: the link has the speed of its
data sheet (`hardware.gpus`) times `LINK_EFFICIENCY`, even if all GPUs of a node copy at
once: host memory is assumed to keep up with them. For a compiled step the replay
models the same link, copy by copy (`mjax.plan.replay`).
"""

from mjax.hardware.gpus import Gpu

LINK_EFFICIENCY = 0.85
"""Fraction of the link's bandwidth that copies reach. Assumed."""
_FORWARD_SHARE = 1 / 4
"""Fraction of a layer's time in its forward pass, if the backward pass recomputes the
layer."""


def copy_s(num_bytes: int | float, gpu: Gpu) -> float:
    """Return the seconds to copy bytes over the link, in one direction."""
    return num_bytes / (gpu.host_link_bytes_per_s * LINK_EFFICIENCY)


def state_copies_s(state_bytes: int | float, gpu: Gpu) -> float:
    """Return the seconds of copying an optimizer state to the GPU and back.

    The two directions are assumed not to overlap. The update is not counted, because it
    is short compared with a copy.

    Args:
      state_bytes: bytes of the state in host memory, for one GPU.
      gpu: the GPU whose link the copies use.
    """
    return copy_s(2 * state_bytes, gpu)


def input_waits_s(input_bytes: int | float, layers_s: float, gpu: Gpu) -> float:
    """Return the seconds that layers wait for copies of their inputs.

    The inputs go to the host during the forward pass and return during the backward
    pass, which takes three times as long because it repeats the forward pass.

    Args:
      input_bytes: bytes of the inputs of all layers and microbatches of a step, on one
        GPU.
      layers_s: seconds of the layers in a step, forward and backward.
      gpu: the GPU whose link the copies use.
    """
    one_way_s, forward_s = copy_s(input_bytes, gpu), _FORWARD_SHARE * layers_s
    passes_s = (forward_s, layers_s - forward_s)
    return sum(max(0.0, one_way_s - seconds) for seconds in passes_s)
