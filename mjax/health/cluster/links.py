"""Links as hosts and switches report them.

`fabric_dump` and `lldp` produce these types, the common form of all sources. A node is
identified by its GUIDs, if the source has them, and by its description.
"""

import dataclasses

from mjax.health.cluster.parts import Fabric


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """One end of a link."""

    description: str
    """The node's description: `gpu001 mlx5_0`, `leaf1`."""
    guids: tuple[int, ...] = ()
    """GUIDs of the port, then of the node."""
    ports: tuple[str, ...]
    """Possible names of the port; the first one that the switch has applies."""

    def __str__(self) -> str:
        name = self.description or ", ".join(f"0x{guid:016x}" for guid in self.guids)
        return f'"{name}"[{self.ports[0]}]'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sighting:
    """A port, as its own node reports it."""

    end: End
    peer: End | None
    """The port at the other end; None: there is no link."""
    rate_gbps: float | None = None
    """Rate of the link in Gb/s; None: not in the source."""
    state: str = ""
    """State as written in the source: Active, Down."""
    place: str
    """Where this was read, for messages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """The whole report of one source."""

    source: str
    fabric: Fabric
    sightings: tuple[Sighting, ...] = ()
    has_both_sides: bool = True
    """Whether both nodes of a link report it, if the source is complete."""
    lists_hosts: bool = True
    """Whether hosts list their ports too; only with `has_both_sides`."""
    counts: dict[int, int] = dataclasses.field(default_factory=dict)
    """Maps the GUID of a node to the number of its listed ports; only if the source
    also lists ports without a link."""
    problems: tuple[str, ...] = ()
    """Reasons why the report may be incomplete; a report with reasons never counts as
    a match."""
