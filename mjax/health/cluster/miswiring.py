"""Explain cables that are not where the cluster file places them.

Input: cables of the file that were not seen in their places, and the links that were
seen. Output: one finding for each swap (two or more cables in each other's places), and
for each other cable that is misplaced, on a leaf of another rail, or missing.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from mjax.health.cluster.host_reports import Finding
from mjax.health.cluster.links import End
from mjax.health.cluster.parts import ANY_PORT, Cable, Cluster, Port
from mjax.health.cluster.seen_links import SeenLinks


class Search:
    """Explains cables that are not in their places."""

    def __init__(
        self,
        cluster: Cluster,
        seen: SeenLinks,
        wrong: list[Cable],
        cables: Iterable[Cable],
    ) -> None:
        """Store the specification and the links.

        Args:
          cluster: the specification.
          seen: the links that were seen.
          wrong: cables that are not in their places.
          cables: all cables that are checked.
        """
        self._cluster, self._seen, self._wrong = cluster, seen, wrong
        self._num_of = Counter(cable.low.node for cable in cables)
        self.unseen: list[Cable] = []
        """Cables that no source can have seen; set by `find`."""
        self._rails: dict[str, set[int | None]] = defaultdict(set)
        for cable in cluster.cables:
            host = cluster.hosts.get(cable.low.node)
            if host is not None:
                self._rails[cable.high.node].add(host.by_nic[cable.low.name].rail)
        self.explained: set[Port] = set()
        """Ports whose links the findings cover."""

    def find(self) -> Iterator[Finding]:
        """Yield a finding for each swap and for each other misplaced or missing cable.

        Cables that no source can see are only added to `unseen`.
        """
        following = self._following()
        rings = list(_rings(following))
        in_ring = {cable for ring in rings for cable in ring}
        yield from self._exchanges(rings)
        for cable in self._wrong:
            self.explained |= {cable.low, cable.high}
            if self._is_unseen(cable):
                self.unseen.append(cable)
            elif cable not in in_ring:
                yield self._alone(cable)

    def _is_unseen(self, cable: Cable) -> bool:
        """Return whether no source can have seen a cable."""
        if cable.fabric in self._seen.whole_fabrics:
            return False
        ends = (cable.low, cable.high)
        return not any(
            end in self._seen.peers or end.node in self._seen.nodes for end in ends
        )

    def _following(self) -> dict[Cable, Cable]:
        """Map each cable to the cable whose place it has taken.

        Its low end is connected to the high port of the other cable, or to any port of
        the other cable's switch if that port is `ANY_PORT`. Cables that are connected
        elsewhere, or have no link, are absent.
        """
        by_high = {cable.high: cable for cable in self._wrong}
        open_ends: dict[str, list[Cable]] = defaultdict(list)
        for cable in self._wrong:
            if cable.high.name == ANY_PORT:
                open_ends[cable.high.node].append(cable)
        found = {}
        for cable in self._wrong:
            peer = self._seen.peers.get(cable.low)
            if not isinstance(peer, Port):
                continue
            if peer in by_high:
                found[cable] = by_high[peer]
            elif open_ends[peer.node]:
                found[cable] = open_ends[peer.node].pop(0)
        return found

    def _exchanges(self, rings: list[list[Cable]]) -> Iterator[Finding]:
        """Yield a finding for each ring of swapped cables.

        If two hosts have swapped all their cables, their rings are one finding.
        """
        pairs: dict[tuple[str, str], list[list[Cable]]] = defaultdict(list)
        for ring in rings:
            hosts = sorted({cable.low.node for cable in ring})
            if len(ring) == 2 and len(hosts) == 2 and hosts[0] in self._cluster.hosts:
                pairs[hosts[0], hosts[1]].append(ring)
            else:
                yield _ring_finding(ring)
        for hosts, found in pairs.items():
            num = len(found)
            if num > 1 and all(self._num_of[host] == num for host in hosts):
                text = f"all {num} cables of {hosts[0]} and {hosts[1]} are exchanged"
                text = f"{text}: exchange the two hosts, or their names"
                yield Finding(kind="exchanged hosts", text=text, nodes=hosts)
            else:
                yield from map(_ring_finding, found)

    def _alone(self, cable: Cable) -> Finding:
        """Return the finding for a cable outside all rings."""
        low, high = cable.low, cable.high
        peer, other = self._seen.peers.get(low), self._seen.peers.get(high)
        if peer is not None:
            if isinstance(peer, Port):
                self.explained.add(peer)
            text = f"{low} should go to {high}, and goes to {peer}"
            kind, more = self._rail(low, peer)
            return finding(kind, f"{text}{more}", cable)
        if isinstance(other, Port):
            self.explained.add(other)
        if other is not None:
            text = f"{high} should go to {low}, and goes to {other}"
            return finding("misplaced", text, cable)
        says = "; ".join(f"{end} {self._says(end)}" for end in (low, high))
        return finding("missing", f"no link {cable}: {says}", cable)

    def _rail(self, low: Port, peer: Port | End) -> tuple[str, str]:
        """Return the kind of the finding, and the text to append to it.

        The kind is "wrong rail" if a NIC is on a leaf of another rail, else
        "misplaced".
        """
        host = self._cluster.hosts.get(low.node)
        if host is None or not isinstance(peer, Port):
            return "misplaced", ""
        rail, others = host.by_nic[low.name].rail, self._rails[peer.node] - {None}
        if rail is None or not others or rail in others:
            return "misplaced", ""
        shown = ", ".join(sorted(map(str, others)))
        return "wrong rail", f"; {low} is of rail {rail}, {peer.node} of rail {shown}"

    def _says(self, end: Port) -> str:
        if end.name == ANY_PORT:
            return "does not see it"
        if end in self._seen.states:
            return f"is {self._seen.states[end]}"
        is_there = end.node in self._seen.nodes
        return "is not listed" if is_there else f"is silent ({end.node} is not listed)"


def _rings(following: Mapping[Cable, Cable]) -> Iterator[list[Cable]]:
    """Yield the rings of a map: cables that are each in the place of the next one."""
    done: set[Cable] = set()
    for start in following:
        path: dict[Cable, None] = {}
        cable: Cable | None = start
        while cable is not None and cable not in done and cable not in path:
            path[cable] = None
            cable = following.get(cable)
        if cable is not None and cable in path:
            order = list(path)
            yield order[order.index(cable) :]
        done |= path.keys()


def _ring_finding(ring: list[Cable]) -> Finding:
    lows = [str(cable.low) for cable in ring]
    highs = [str(cable.high) for cable in ring]
    if len(ring) == 2:
        kind, text = "exchanged", f"the cables {ring[0]} and {ring[1]} are exchanged"
    else:
        kind = "exchanged in a ring"
        text = f"{len(ring)} cables are each in the place of the next: "
        text += ", ".join(map(str, ring))
    after = zip(lows, highs[1:] + highs[:1], strict=True)
    text = f"{text}: " + ", ".join(f"{low} goes to {high}" for low, high in after)
    low, high = ring[0].low.node, ring[0].high.node
    if all((cable.low.node, cable.high.node) == (low, high) for cable in ring):
        text += f"; all join {low} and {high}, so routes stay the same"
    nodes = tuple(dict.fromkeys(n for c in ring for n in (c.low.node, c.high.node)))
    return Finding(kind=kind, text=text, nodes=nodes)


def finding(kind: str, text: str, cable: Cable) -> Finding:
    """Return a finding of one cable, with its place in the file."""
    text = f"{text} ({cable.path} of the file)"
    return Finding(kind=kind, text=text, nodes=(cable.low.node, cable.high.node))
