"""All checks, in display order."""

import itertools
from collections.abc import Mapping
from types import MappingProxyType

from mjax.health.check import Check
from mjax.health.checks import (
    clock,
    dcgm,
    disks,
    ethernet,
    fabric_manager,
    firmware,
    gpu_memory,
    gpu_modes,
    gpu_pcie,
    gpu_power,
    gpudirect,
    gpus,
    infiniband,
    infiniband_tools,
    ipmi,
    kernel,
    lspci,
    mellanox,
    memory,
    nccl_environment,
    nvlink,
    nvme,
    pcie,
    pfc,
    port_counters,
    processes,
    processors,
    raid,
    resolver,
    roce,
    routes,
    services,
    sysctl,
    topology,
    ulimits,
    versions,
    zpool,
)

AREAS: Mapping[str, tuple[Check, ...]] = MappingProxyType(
    {
        "GPU": (
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
        ),
        "RDMA": (
            *infiniband.CHECKS,
            *infiniband_tools.CHECKS,
            *port_counters.CHECKS,
            *roce.CHECKS,
            *pfc.CHECKS,
            *mellanox.CHECKS,
        ),
        "Ethernet": (*ethernet.CHECKS, *routes.CHECKS, *resolver.CHECKS),
        "PCIe": (*pcie.CHECKS, *lspci.CHECKS),
        "NCCL": (*nccl_environment.CHECKS,),
        "system": (
            *memory.CHECKS,
            *kernel.CHECKS,
            *processors.CHECKS,
            *processes.CHECKS,
            *sysctl.CHECKS,
            *ulimits.CHECKS,
            *clock.CHECKS,
        ),
        "storage": (*disks.CHECKS, *nvme.CHECKS, *zpool.CHECKS, *raid.CHECKS),
        "services and versions": (*services.CHECKS, *versions.CHECKS),
        "board": (*firmware.CHECKS, *ipmi.CHECKS),
    }
)
"""All checks by the part of a host that they concern."""

CHECKS: tuple[Check, ...] = tuple(itertools.chain.from_iterable(AREAS.values()))

BY_NAME: Mapping[str, Check] = MappingProxyType({c.name: c for c in CHECKS})

AREA_OF: Mapping[str, str] = MappingProxyType(
    {check.name: area for area, checks in AREAS.items() for check in checks}
)
