"""The hosts of a run, and which of them have which ranks.

Enters: what agents have said. Leaves: which hosts are silent, and a placement: active
hosts in the order of their ranks.
"""

import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mjax.launch.messages import RankState


class HostState(enum.StrEnum):
    """What a host is for."""

    SPARE = "spare"
    ACTIVE = "active"
    LOST = "lost"
    """It may come back, as a spare."""
    SICK = "sick"
    """It did not pass its check, and is checked again when hosts are missing."""
    EVICTED = "evicted"


@dataclasses.dataclass(kw_only=True)
class Host:
    """A host whose agent has been seen."""

    name: str
    address: str
    state: HostState = HostState.SPARE
    is_connected: bool = True
    heard_s: float
    """When its agent last said something."""
    ranks: dict[int, RankState] = dataclasses.field(default_factory=dict)
    """Of the present generation."""
    why: str = ""
    """Why it was evicted."""

    def to_json(self) -> dict[str, str]:
        """Return what a new driver must know of it."""
        return {"address": self.address, "state": self.state.value, "why": self.why}


def from_json(name: str, fields: Mapping[str, Any], now_s: float) -> Host:
    """Make a host of what `to_json` returned; its agent has not called yet."""
    return Host(
        name=name,
        address=fields["address"],
        state=HostState(fields["state"]),
        why=fields["why"],
        is_connected=False,
        heard_s=now_s,
    )


def silent(
    hosts: Mapping[str, Host], names: Collection[str], now_s: float, limit_s: float
) -> set[str]:
    """Return the hosts of these names that have not been heard for limit_s."""
    return {name for name in names if now_s - hosts[name].heard_s > limit_s}


def ready(hosts: Mapping[str, Host], now_s: float, limit_s: float) -> list[Host]:
    """Return the hosts that can have ranks, those that have some first."""
    unheard = silent(hosts, hosts.keys(), now_s, limit_s)
    found = [
        host
        for host in hosts.values()
        if host.state in (HostState.SPARE, HostState.ACTIVE)
        and host.is_connected
        and host.name not in unheard
    ]
    return sorted(
        found, key=lambda host: (host.state is not HostState.ACTIVE, host.name)
    )


def place(chosen: Collection[str], before: Sequence[str]) -> list[str]:
    """Return the chosen hosts in the order of their ranks.

    Hosts that stay keep their place, so that neighbours stay neighbours, unless there
    are fewer places than before: then they move up.
    """
    new = iter(sorted(set(chosen) - set(before)))
    kept = [name if name in chosen else None for name in before]
    if len(kept) > len(chosen):
        kept = [name for name in kept if name is not None]
    kept += [None] * (len(chosen) - len(kept))
    return [name or next(new) for name in kept]
