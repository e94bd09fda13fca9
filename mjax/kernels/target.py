"""The kind of device that a program is traced for, which determines backends."""

import dataclasses
import re

import jax

# By the names of the driver. GH200 and GB200 are an H200 and a B200 with a CPU.
_GENERATIONS = (
    ("ampere", r"\bA(10|16|30|40|100|800)\b"),
    ("hopper", r"\bG?H(20|100|200|800)\b"),
    ("blackwell", r"\bG?B(100|200|300)\b"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The kind of device that a program is traced for."""

    platform: str
    """Name from jax.default_backend(): cpu, gpu."""
    device_kind: str
    """Name from jax.Device.device_kind, such as NVIDIA H200."""

    @property
    def generation(self) -> str:
        """The GPU's generation; "unknown" for other devices."""
        for name, pattern in _GENERATIONS:
            if re.search(pattern, self.device_kind):
                return name
        return "unknown"


def target() -> Target:
    """Return the device of the current mesh, or JAX's default device without a mesh.

    The devices of a mesh may be described rather than present.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = jax.devices()[0]
    return Target(platform=device.platform, device_kind=device.device_kind)
