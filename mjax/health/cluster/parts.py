"""The parts of a cluster: hosts, GPUs, NICs, rails, switches, racks and cables.

`file` builds these frozen types from a TOML file; cable checks, placement and commands
share them. A port is named by its node and its name on that node: `gpu001:mlx5_0`,
`leaf1:17`.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Literal

Fabric = Literal["infiniband", "ethernet"]
Tier = Literal["leaf", "spine", "core"]
Wiring = Literal["rail", "host", "free"]

TIERS: tuple[str, ...] = ("leaf", "spine", "core")
"""Tiers, from the hosts upwards."""
ANY_PORT = "*"
"""Port of a cable whose switch is known, but not the port on it."""


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Port:
    """A port of a host or a switch."""

    node: str
    name: str
    """A NIC of a host, a port of a switch, or `ANY_PORT`."""

    def __str__(self) -> str:
        return f"{self.node}:{self.name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nic:
    """A network card of a host, with one port."""

    name: str
    """Name in the system: mlx5_0, or eth0 where LLDP reports the links."""
    rail: int | None = None
    fabric: Fabric = "infiniband"
    rate_gbps: int | None = None
    """Rate of the link in Gb/s."""
    node_description: str | None = None
    """The part of the InfiniBand node description after the host's name, such as HCA-1;
    absent: `name`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """A host with its hardware."""

    name: str
    group: str
    """Path of its table in the file."""
    wiring: Wiring
    num_gpus: int
    gpu_pci: tuple[str, ...] = ()
    """PCI addresses of its GPUs; empty if not in the file."""
    nics: tuple[Nic, ...] = ()
    rack: str | None = None

    @functools.cached_property
    def by_nic(self) -> Mapping[str, Nic]:
        """NICs by name."""
        return {nic.name: nic for nic in self.nics}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switch:
    """A switch."""

    name: str
    tier: Tier
    ports: tuple[str, ...]
    """Names of its ports; the first has number 1."""
    rail: int | None = None
    """Rail of all NICs that are connected to it; None: any rail."""
    fabric: Fabric = "infiniband"
    rack: str | None = None

    @functools.cached_property
    def port_set(self) -> frozenset[str]:
        """Names of its ports, as a set."""
        return frozenset(self.ports)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cable:
    """A cable between two ports."""

    low: Port
    """The end that is closer to hosts."""
    high: Port
    fabric: Fabric
    rate_gbps: int | None = None
    path: str
    """Path of its entry in the file."""

    def __str__(self) -> str:
        return f"{self.low} - {self.high}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The content of a cluster file, free of contradictions."""

    name: str
    hosts: Mapping[str, Host]
    """Hosts by name, in the order of the file."""
    switches: Mapping[str, Switch]
    racks: Mapping[str, tuple[str, ...]]
    """Maps a rack to its hosts and switches."""
    cables: tuple[Cable, ...]
    guids: Mapping[str, int]
    """Maps `host:nic` or a switch to its GUID."""
    versions: Mapping[str, str]
    require: tuple[str, ...]
    islands: int = 1
    """Number of separate parts of each fabric; no cable between switches joins two
    parts."""
    ignore: tuple[str, ...] = ()
    """Descriptions of nodes whose links are ignored."""

    @functools.cached_property
    def leaves(self) -> Mapping[str, Mapping[str, str]]:
        """Maps a host to its cabled NICs, each mapped to the switch at its other
        end."""
        return leaves_of(self.cables, self.hosts)


def leaves_of(
    cables: Iterable[Cable], hosts: Mapping[str, Host]
) -> dict[str, dict[str, str]]:
    """Return, for each host, its NICs with a cable and the switch at the other end."""
    found: dict[str, dict[str, str]] = {name: {} for name in hosts}
    for cable in cables:
        if cable.low.node in hosts and cable.high.node not in hosts:
            found[cable.low.node][cable.low.name] = cable.high.node
    return found


def switch_groups(
    names: Iterable[str], links: Iterable[tuple[str, str]]
) -> list[list[str]]:
    """Return the connected components of a graph, largest first.

    Args:
      names: names of all nodes.
      links: pairs of nodes; pairs with an unknown node are ignored.
    """
    neighbours: dict[str, set[str]] = {name: set() for name in names}
    for one, other in links:
        if one in neighbours and other in neighbours:
            neighbours[one].add(other)
            neighbours[other].add(one)
    found, seen = [], set[str]()
    for name in neighbours:
        if name in seen:
            continue
        group, border = [], [name]
        seen.add(name)
        while border:
            node = border.pop()
            group.append(node)
            new = neighbours[node] - seen
            seen |= new
            border += sorted(new)
        found.append(sorted(group))
    return sorted(found, key=lambda group: (-len(group), group))
