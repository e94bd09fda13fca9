"""The tables of a cluster file, as written by a person.

Frozen dataclasses whose fields are the keys of the file. `file` expands their patterns
into the parts of a `Cluster`.
"""

import dataclasses

from mjax.health.cluster.parts import Fabric, Nic, Tier, Wiring

AGGREGATION_NODE = "Mellanox Technologies Aggregation Node"
"""Node description of the SHARP engine inside a switch, on the port after the external
ones (NVIDIA Quantum: port 41 of 40). It has no cable, so no file needs to name it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostsTable:
    """A group of equal hosts."""

    names: str
    gpus: int
    gpu_pci: tuple[str, ...] = ()
    wiring: Wiring = "rail"
    """Which NICs share a leaf: `rail`, the group's NICs of one rail (rail-optimised);
    `host`, all NICs of a host (top of rack); `free`, no rule."""
    nics: tuple[Nic, ...] = ()
    path: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwitchesTable:
    """A group of equal switches."""

    names: str
    tier: Tier
    ports: int
    port_names: str | None = None
    """Pattern of names, such as swp[1-64]; absent: numbers from 1."""
    rail: int | None = None
    fabric: Fabric = "infiniband"
    path: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RackTable:
    """A rack."""

    name: str
    hosts: str = ""
    switches: str = ""
    path: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CablesTable:
    """Cables between two lists of ports of equal length."""

    ends: tuple[str, str]
    rate_gbps: int | None = None
    """Rate in Gb/s; absent: the rate of the NIC at one end."""
    path: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterTable:
    """All tables of a file."""

    name: str
    require: tuple[str, ...] = ()
    islands: int = 1
    ignore: tuple[str, ...] = (AGGREGATION_NODE,)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    guids: dict[str, str] = dataclasses.field(default_factory=dict)
    hosts: tuple[HostsTable, ...] = ()
    switches: tuple[SwitchesTable, ...] = ()
    racks: tuple[RackTable, ...] = ()
    cables: tuple[CablesTable, ...] = ()
