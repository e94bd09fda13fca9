"""Links as hosts and switches report them.

Enters: nothing; `fabric_dump` and `lldp` make these. Leaves: one form for all sources.
A node is known by its GUIDs where the source has them, and by what it says of itself.
"""

import dataclasses

from mjax.health.cluster.parts import Fabric


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """One end of a link."""

    description: str
    """What the node says of itself: `gpu001 mlx5_0`, `leaf1`."""
    guids: tuple[int, ...] = ()
    """Of the port, then of the node."""
    ports: tuple[str, ...]
    """Names that the port may have; the first one that the switch knows counts."""

    def __str__(self) -> str:
        name = self.description or ", ".join(f"0x{guid:016x}" for guid in self.guids)
        return f'"{name}"[{self.ports[0]}]'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sighting:
    """A port, seen from its own side."""

    end: End
    peer: End | None
    """At the other end; None: there is no link."""
    rate_gbps: float | None = None
    """None: the source does not say."""
    state: str = ""
    """As the source writes it: Active, Down."""
    place: str
    """Where this was read, for messages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """All that one source reports."""

    source: str
    fabric: Fabric
    sightings: tuple[Sighting, ...] = ()
    has_both_sides: bool = True
    """Whether each link is reported by both of its nodes, if the source is whole."""
    lists_hosts: bool = True
    """Whether hosts list their ports too; only with `has_both_sides`."""
    counts: dict[int, int] = dataclasses.field(default_factory=dict)
    """From the GUID of a node to the number of its ports that the source lists; only
    where it lists ports without a link too."""
    problems: tuple[str, ...] = ()
    """Why it may not be whole; it then never counts as a match."""
