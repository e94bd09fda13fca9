"""All checks, in the order in which they are shown."""

from collections.abc import Mapping
from types import MappingProxyType

from mjax.health.check import Check
from mjax.health.checks import (
    dcgm,
    ethernet,
    fabric_manager,
    gpu_memory,
    gpu_modes,
    gpu_pcie,
    gpu_power,
    gpudirect,
    gpus,
    infiniband,
    infiniband_tools,
    lspci,
    mellanox,
    memory,
    nccl_environment,
    nvlink,
    pcie,
    port_counters,
    resolver,
    roce,
    routes,
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
    *infiniband.CHECKS,
    *infiniband_tools.CHECKS,
    *port_counters.CHECKS,
    *roce.CHECKS,
    *mellanox.CHECKS,
    *ethernet.CHECKS,
    *routes.CHECKS,
    *resolver.CHECKS,
    *pcie.CHECKS,
    *lspci.CHECKS,
    *nccl_environment.CHECKS,
    *memory.CHECKS,
)

BY_NAME: Mapping[str, Check] = MappingProxyType({c.name: c for c in CHECKS})
