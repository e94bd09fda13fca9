"""The distance between two hosts: a leaf switch, a spine, or more.

Input: a `Cluster` and some of its hosts. Output: a number for each pair.
"""

from collections import defaultdict
from collections.abc import Sequence

from mjax.health.cluster.parts import Cluster


class Levels:
    """Distances between hosts: 0 on the same leaf, 1 over one spine, 2 farther."""

    def __init__(self, cluster: Cluster, names: Sequence[str]) -> None:
        self.spines: dict[str, set[str]] = defaultdict(set)
        """Maps a leaf to the switches above it."""
        for cable in cluster.cables:
            if cable.low.node in cluster.switches:
                self.spines[cable.low.node].add(cable.high.node)
        keys = [self._key(cluster, name) for name in names]
        groups = {key: index for index, key in enumerate(dict.fromkeys(keys))}
        self.group_of = [groups[key] for key in keys]
        """For the index of each host, the index of its group: hosts on equal leaves."""
        self.between = [[self._level(a, b) for b in groups] for a in groups]
        """Distances, by the indices of the groups of two hosts."""

    @staticmethod
    def _key(cluster: Cluster, name: str) -> tuple[tuple[str, str], ...]:
        """Return (rail, leaf) of each cabled NIC of a host, sorted.

        The name of the NIC stands for a missing rail.
        """
        host = cluster.hosts[name]
        return tuple(
            sorted(
                (nic if (rail := host.by_nic[nic].rail) is None else f"#{rail}", leaf)
                for nic, leaf in cluster.leaves[name].items()
            )
        )

    def _level(
        self, one: tuple[tuple[str, str], ...], other: tuple[tuple[str, str], ...]
    ) -> int:
        """Return the largest distance over all rails; 2 if the rails differ."""
        if [rail for rail, _ in one] != [rail for rail, _ in other]:
            return 2
        level = 0
        for (_, leaf), (_, far) in zip(one, other, strict=True):
            if far != leaf:
                level = max(level, 1 if self.spines[leaf] & self.spines[far] else 2)
        return level

    def level(self, one: int, other: int) -> int:
        """Return the distance between two hosts."""
        return self.between[self.group_of[one]][self.group_of[other]]
