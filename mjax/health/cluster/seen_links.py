"""Links that were seen, indexed by the ports of a cluster file.

Input: the links that nodes report. Output: the other end, rate and state of each port
of the file; links of nodes that are not in the file; and problems: contradictory
reports and truncated sources. A source that should list each link from both nodes is
complete only if it does.
"""

from collections.abc import Iterable, Mapping

from mjax.health.cluster.links import End, Observation, Sighting
from mjax.health.cluster.parts import ANY_PORT, Cable, Cluster, Port
from mjax.health.cluster.resolving import Resolver


class SeenLinks:
    """Links that were seen, indexed by the ports of the file."""

    def __init__(
        self,
        cluster: Cluster,
        observations: Iterable[Observation],
        rates: Mapping[Port, float],
    ) -> None:
        self.cluster, self.resolver = cluster, Resolver(cluster)
        self.peers: dict[Port, Port | End] = {}
        """Maps a port of the file to the port at the other end."""
        self.states: dict[Port, str] = {}
        """States of the ports that are reported by their own node."""
        self.rates: dict[Port, float] = {}
        self.foreign: list[Sighting] = []
        """Links between nodes that are not in the file."""
        self.nodes: set[str] = set()
        """Hosts and switches that report their own ports."""
        self.whole_fabrics: set[str] = set()
        """Fabrics for which a source lists all nodes."""
        self.problems: list[str] = []
        for one in observations:
            self.problems += one.problems
            for sighting in one.sightings:
                self._take(sighting)
            if one.has_both_sides:
                self.whole_fabrics.add(one.fabric)
                self._check_sides(one)
            self._check_counts(one)
        for port, rate_gbps in rates.items():
            self.rates.setdefault(port, rate_gbps)

    def has(self, cable: Cable) -> bool:
        """Return whether a cable is in its place."""
        peer = self.peers.get(cable.low)
        if not isinstance(peer, Port):
            return False
        is_any = cable.high.name == ANY_PORT and peer.node == cable.high.node
        return is_any or peer == cable.high

    def rate_gbps(self, cable: Cable) -> float | None:
        """Return the lowest rate that an end of a cable reports."""
        ends = (cable.low, self.peers.get(cable.low, cable.high))
        found = [self.rates[end] for end in ends if end in self.rates]
        return min(found, default=None)

    def _take(self, one: Sighting) -> None:
        """Record a link under both of its ports."""
        own = self.resolver.port(one.end, is_own=True)
        peer = one.peer and (self.resolver.port(one.peer) or one.peer)
        if own is not None:
            self.nodes.add(own.node)
            self.states[own] = one.state
            if one.rate_gbps is not None:
                before = self.rates.get(own, one.rate_gbps)
                self.rates[own] = min(before, one.rate_gbps)
        if one.peer is None or peer is None:
            return
        if self.resolver.is_ignored(one.end) or self.resolver.is_ignored(one.peer):
            return
        if own is not None:
            self._join(own, peer, one.place)
        if isinstance(peer, Port):
            self._join(peer, own or one.end, one.place)
        elif own is None:
            self.foreign.append(one)

    def _join(self, port: Port, peer: Port | End, place: str) -> None:
        before = self.peers.setdefault(port, peer)
        is_same = before == peer or (
            isinstance(before, End)
            and isinstance(peer, End)
            and before.description == peer.description
            and bool({*before.guids} & {*peer.guids} or not before.guids)
        )
        if not is_same:
            text = f"{place}: {port} is reported as joined with {before} and {peer}"
            self.problems.append(text)

    def _check_sides(self, one: Observation) -> None:
        """Find links that only one node lists, a sign of a truncated text."""
        own = {self._key(sighting.end) for sighting in one.sightings}
        nodes = {guid for s in one.sightings for guid in s.end.guids}
        num, first = 0, ""
        for sighting in one.sightings:
            peer = sighting.peer
            if peer is None or self._key(peer) in own:
                continue
            port = self.resolver.port(peer)
            is_switch = port is not None and port.node in self.cluster.switches
            if is_switch or one.lists_hosts or nodes & {*peer.guids}:
                num, first = num + 1, first or f"{sighting.end} with {peer}"
        if num:
            text = f"{one.source} lists {num} links from one side only, first {first}"
            self.problems.append(f"{text}; it is truncated, write it again")

    def _key(self, end: End) -> tuple[str, str]:
        """Return a key of an end that is the same in the lines of both nodes."""
        port = self.resolver.port(end)
        if port is not None:
            return port.node, port.name
        # GUIDs are left out: the lines of a switch give two GUIDs for it, the lines of
        # other nodes give one.
        return end.description, end.ports[0]

    def _check_counts(self, one: Observation) -> None:
        """Find switches with fewer listed ports than they have."""
        ends = {guid: s.end for s in one.sightings for guid in s.end.guids}
        for guid, num in one.counts.items():
            port = self.resolver.port(ends[guid]) if guid in ends else None
            switch = port and self.cluster.switches.get(port.node)
            if switch and num < len(switch.ports):
                text = f"{one.source} lists {num} of {len(switch.ports)} ports of"
                self.problems.append(f"{text} {switch.name}; it is truncated")
