"""All checks, in the order in which they are shown."""

from collections.abc import Mapping
from types import MappingProxyType

from mjax.health.check import Check
from mjax.health.checks import (
    dcgm,
    fabric_manager,
    gpu_memory,
    gpu_modes,
    gpu_pcie,
    gpu_power,
    gpudirect,
    gpus,
    memory,
    nvlink,
    topology,
)

CHECKS: tuple[Check, ...] = (
    *gpus.CHECKS,
    *gpu_modes.CHECKS,
    *gpu_memory.CHECKS,
    *gpu_power.CHECKS,
    *gpu_pcie.CHECKS,
    *nvlink.CHECKS,
    *topology.CHECKS,
    *fabric_manager.CHECKS,
    *gpudirect.CHECKS,
    *dcgm.CHECKS,
    *memory.CHECKS,
)

BY_NAME: Mapping[str, Check] = MappingProxyType({c.name: c for c in CHECKS})
