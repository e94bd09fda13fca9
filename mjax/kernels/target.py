"""The kind of device that a program is traced for; it determines the backends."""

import dataclasses
import re

import jax

# Patterns of the driver's device names. GH200 and GB200 are an H200 and a B200 with a
# CPU.
_GENERATIONS = (
    ("ampere", r"\bA(10|16|30|40|100|800)\b"),
    ("hopper", r"\bG?H(20|100|200|800)\b"),
    ("blackwell", r"\bG?B(100|200|300)\b"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The kind of device that a program is traced for."""

    platform: str
    """Platform as jax.default_backend() returns it: "cpu" or "gpu"."""
    device_kind: str
    """Name from jax.Device.device_kind, such as NVIDIA H200."""

    @property
    def generation(self) -> str:
        """Name of the GPU's generation; "unknown" for other devices."""
        for name, pattern in _GENERATIONS:
            if re.search(pattern, self.device_kind):
                return name
        return "unknown"


def target() -> Target:
    """Return the kind of the current mesh's devices, or of JAX's default device.

    The devices of a mesh may be described rather than present.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = jax.devices()[0]
    return Target(platform=device.platform, device_kind=device.device_kind)
