"""The hosts of a run, and their ranks.

Input: messages of agents. Output: the silent hosts, the placement (the active hosts in
the order of their ranks), and messages to hosts that have ranks.
"""

import dataclasses
import enum
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mjax.launch.messages import Hello, Match, Message, RankState, Signal


class HostState(enum.StrEnum):
    """The role of a host."""

    SPARE = "spare"
    ACTIVE = "active"
    LOST = "lost"
    """Has been silent for too long; may return as a spare."""
    SICK = "sick"
    """Failed its check, or is suspected or faulty; is checked until it passes."""
    EVICTED = "evicted"


@dataclasses.dataclass(kw_only=True)
class Host:
    """A host whose agent has connected at least once."""

    name: str
    address: str
    state: HostState = HostState.SPARE
    is_connected: bool = True
    heard_s: float
    """Time of the agent's last message, in seconds."""
    agent: str = ""
    """Id of the agent process; "" if unknown."""
    ranks: dict[int, RankState] = dataclasses.field(default_factory=dict)
    """Rank of the current generation -> state."""
    why: str = ""
    """Why the host was excluded; "" if it was not."""
    is_leaving: bool = False
    """Whether the agent has reported that the host leaves."""
    matches: list[tuple[float, Match]] = dataclasses.field(default_factory=list)
    """(time, match) of log lines that matched a rule in this generation."""
    rdma_bytes_per_s: float | None = None
    """Recent traffic of the RDMA ports, sent plus received; None if unknown."""
    _rdma: tuple[float, int] | None = dataclasses.field(default=None, init=False)

    def note_traffic(
        self, rdma_bytes: Mapping[str, Sequence[int]], now_s: float
    ) -> None:
        """Record the counters of the host's RDMA ports."""
        if rdma_bytes:
            total = sum(map(sum, rdma_bytes.values()))
            if self._rdma is not None and now_s > self._rdma[0]:
                before_s, before = self._rdma
                self.rdma_bytes_per_s = (total - before) / (now_s - before_s)
            self._rdma = now_s, total

    def to_json(self) -> dict[str, str]:
        """Return the state that a new driver needs, as JSON."""
        fields = {"address": self.address, "state": self.state.value, "why": self.why}
        return fields | {"agent": self.agent}


def from_json(name: str, fields: Mapping[str, Any], now_s: float) -> Host:
    """Return a host from the result of `to_json`, without a connected agent."""
    return Host(
        name=name,
        address=fields["address"],
        state=HostState(fields["state"]),
        why=fields["why"],
        agent=fields.get("agent", ""),
        is_connected=False,
        heard_s=now_s,
    )


class Fleet:
    """All hosts, and the ranks on some of them."""

    def __init__(
        self,
        ranks_per_host: int,
        lost_s: float,
        send: Callable[[str, Message], None],
        tell: Callable[..., None],
        faults: Callable[[str], float] = lambda _: 0.0,
    ) -> None:
        """Start without hosts.

        Args:
          ranks_per_host: trainer processes on each active host.
          lost_s: seconds of silence after which a host is lost.
          send: function of (host, message) that sends a message without waiting.
          tell: records an event, see `events.teller`.
          faults: maps a host to its score of past faults.
        """
        self._faults = faults
        self.hosts: dict[str, Host] = {}
        self.placement: list[str] = []
        """Active hosts, in the order of their ranks."""
        self.send = send
        self._placed: set[str] = set()
        self._ranks_per_host, self._lost_s, self._tell = ranks_per_host, lost_s, tell

    @property
    def num_ranks(self) -> int:
        """Number of trainer processes in the current generation."""
        return len(self.placement) * self._ranks_per_host

    def host_of(self, rank: int) -> str:
        """Return the host of a rank of the current generation."""
        return self.placement[rank // self._ranks_per_host]

    def ranks_of(self, index: int) -> range:
        """Return the ranks of a host, given by its position in the placement."""
        first = index * self._ranks_per_host
        return range(first, first + self._ranks_per_host)

    def has_ranks(self, name: str) -> bool:
        """Return whether a host has ranks, that is, is in the placement."""
        return name in self._placed

    def states(self) -> dict[int, RankState]:
        """Return rank -> state, for the current generation where it is known."""
        return {
            rank: state
            for name in self.placement
            for rank, state in self.hosts[name].ranks.items()
        }

    def alive(self) -> dict[int, RankState]:
        """Return rank -> state, for the ranks that have not ended."""
        return {r: state for r, state in self.states().items() if state.code is None}

    def active(self, names: Collection[str]) -> list[Host]:
        """Return the named hosts that are active: with ranks, and not excluded."""
        found = (self.hosts[name] for name in names)
        return [host for host in found if host.state is HostState.ACTIVE]

    def silent_s(self, rank: int, now_s: float) -> float:
        """Return the seconds since the last message of a rank's host."""
        return now_s - self.hosts[self.host_of(rank)].heard_s

    def are_heard_since(self, since_s: float) -> bool:
        """Return whether all hosts with ranks are connected and heard since a time."""
        hosts = (self.hosts[name] for name in self.placement)
        return all(host.is_connected and host.heard_s >= since_s for host in hosts)

    def matches(self, since_s: float) -> dict[str, list[Match]]:
        """Return host -> matches since a time; only hosts with ranks and matches."""
        found = {}
        for name in self.placement:
            late = [one for at_s, one in self.hosts[name].matches if at_s >= since_s]
            if late:
                found[name] = late
        return found

    def lost(self, now_s: float, *, active_only: bool = True) -> set[str]:
        """Return hosts silent for too long; by default only hosts with ranks."""
        names = self.placement if active_only else self.hosts.keys()
        return {name for name in names if self.is_lost(name, now_s)}

    def is_lost(self, name: str, now_s: float) -> bool:
        """Return whether a host has been silent for too long."""
        return now_s - self.hosts[name].heard_s > self._lost_s

    def silence(self, host: Host, now_s: float) -> None:
        """Make a host count as silent for too long."""
        host.heard_s = now_s - 2 * self._lost_s

    def ready(self, now_s: float) -> list[Host]:
        """Return the hosts that can have ranks; hosts that have ranks now come first.

        The others follow in order of their scores of past faults, lowest first.
        """
        unheard = self.lost(now_s, active_only=False)
        found = [
            host
            for host in self.hosts.values()
            if host.state in (HostState.SPARE, HostState.ACTIVE)
            and host.is_connected
            and host.name not in unheard
        ]
        return sorted(
            found,
            key=lambda host: (
                host.state is not HostState.ACTIVE,
                self._faults(host.name),
                host.name,
            ),
        )

    def num_spares(self, now_s: float) -> int:
        """Return the number of spares that can have ranks now."""
        return sum(host.state is HostState.SPARE for host in self.ready(now_s))

    def place(self, ready: Sequence[Host], size: int) -> None:
        """Give ranks to the first `size` hosts; the others become spares."""
        for index, host in enumerate(ready):
            host.state = HostState.ACTIVE if index < size else HostState.SPARE
        for host in self.hosts.values():
            host.ranks, host.matches = {}, []
        names = {host.name for host in ready[:size]}
        self._place(place(names, self.placement))

    def _place(self, placement: Sequence[str]) -> None:
        self.placement, self._placed = [*placement], {*placement}

    def evict(self, host: Host, why: str, state: HostState = HostState.EVICTED) -> None:
        """Exclude a host from later generations, and record why."""
        host.state, host.why = state, why
        text, data = (
            f"{host.name} is {state}: {why}",
            {"state": state.value, "why": why},
        )
        self._tell("evict", text, "warning", host=host.name, data=data)

    def join(self, hello: Hello, now_s: float) -> Host:
        """Mark a host as connected and return it; a new host is a spare."""
        new = Host(name=hello.host, address=hello.address, heard_s=now_s)
        host = self.hosts.setdefault(hello.host, new)
        host.address, host.agent = hello.address, hello.id
        host.is_connected, host.is_leaving = True, False
        return host

    def come_back(self, host: Host, generation: int) -> None:
        """Make a lost host a spare; kill its ranks of this and older generations."""
        host.state, host.why = HostState.SPARE, ""
        self._tell("host", f"{host.name} is back as a spare", host=host.name)
        self.kill(host, generation)

    def kill(self, host: Host, generation: int) -> None:
        """Kill the ranks of a host, of this and older generations."""
        self.send(host.name, Signal(generation=generation, number=signal.SIGKILL))

    def signal(self, generation: int, number: int) -> None:
        """Send a signal to all ranks of this and older generations."""
        self.send_all(Signal(generation=generation, number=number))

    def send_all(self, message: Message) -> None:
        """Send a message to all hosts that have ranks."""
        for name in self.placement:
            self.send(name, message)

    def to_json(self) -> dict[str, Any]:
        """Return the state that a new driver needs, as JSON."""
        return {
            "placement": self.placement,
            "hosts": {host.name: host.to_json() for host in self.hosts.values()},
        }

    def take_up(self, fields: Mapping[str, Any], now_s: float) -> None:
        """Restore the result of `to_json`; ignore other fields."""
        self._place(fields["placement"])
        for name, host in fields["hosts"].items():
            self.hosts[name] = from_json(name, host, now_s)

    def take_up_matches(
        self, log_events: Sequence[Mapping[str, Any]], now_s: float
    ) -> None:
        """Restore the matches of log rules that a previous driver recorded."""
        for event in log_events:
            if event["host"] in self.hosts:
                rule = event["data"]["rule"]
                line = event["text"].removeprefix(f"{rule}: ")
                one = Match(rule=rule, line=line, rank=event["rank"])
                at_s = now_s - event["age_s"]
                self.hosts[event["host"]].matches.append((at_s, one))


def place(chosen: Collection[str], before: Sequence[str]) -> list[str]:
    """Return the chosen hosts in the order of their ranks.

    Hosts that stay keep their position, so neighbours stay neighbours. If there are
    fewer positions than before, hosts move up.
    """
    new = iter(sorted(set(chosen) - set(before)))
    kept = [name if name in chosen else None for name in before]
    if len(kept) > len(chosen):
        kept = [name for name in kept if name is not None]
    kept += [None] * (len(chosen) - len(kept))
    return [name or next(new) for name in kept]
