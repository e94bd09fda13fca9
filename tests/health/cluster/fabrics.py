"""Dumps of fabrics, written after the public formats, for the tests of cables.

Formats: linux-rdma/rdma-core, infiniband-diags/iblinkinfo.c and ibnetdiscover.c. The
values are made up; no dump is of a real fabric.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping

from mjax.health.cluster import file as cluster_file
from mjax.health.cluster.parts import Cluster, Port

FILE = """
name = "small"
[[hosts]]
names = "gpu[01-04]"
gpus = 2
nics = [{ name = "mlx5_0", rail = 0, rate_gbps = 400 },
        { name = "mlx5_1", rail = 1, rate_gbps = 400 }]
[[hosts]]
names = "gpu[05-08]"
gpus = 2
nics = [{ name = "mlx5_0", rail = 0, rate_gbps = 400 },
        { name = "mlx5_1", rail = 1, rate_gbps = 400 }]
[[switches]]
names = "leaf[1-4]"
tier = "leaf"
ports = 8
[[switches]]
names = "spine[1-2]"
tier = "spine"
ports = 8
[[cables]]
ends = ["gpu[01-04]:mlx5_0", "leaf1:[1-4]"]
[[cables]]
ends = ["gpu[01-04]:mlx5_1", "leaf2:[1-4]"]
[[cables]]
ends = ["gpu[05-08]:mlx5_0", "leaf3:[1-4]"]
[[cables]]
ends = ["gpu[05-08]:mlx5_1", "leaf4:[1-4]"]
[[cables]]
ends = ["leaf[1-4]:[5-6]", "spine1:[1-8]"]
rate_gbps = 400
[[cables]]
ends = ["leaf[1-4]:[7-8]", "spine2:[1-8]"]
rate_gbps = 400
"""

Links = dict[Port, Port]
"""Maps a port to the other end of its cable, in both directions."""


@functools.cache
def cluster(text: str = FILE) -> Cluster:
    return cluster_file.parse(text)


def port(text: str) -> Port:
    node, _, name = text.partition(":")
    return Port(node=node, name=name)


def links_of(cluster: Cluster) -> Links:
    found: Links = {}
    for cable in cluster.cables:
        join(found, cable.low, cable.high)
    return found


def join(links: Links, one: Port, other: Port) -> None:
    links[one], links[other] = other, one


def cut(links: Links, one: Port) -> Port:
    """Remove a link and return its other end."""
    other = links.pop(one)
    del links[other]
    return other


def exchange(links: Links, *ports: str) -> None:
    """Move the cable of each port to the other end of the next one's."""
    ends = [port(text) for text in ports]
    others = [cut(links, end) for end in ends]
    for end, other in zip(ends, others[1:] + others[:1], strict=True):
        join(links, end, other)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fabric:
    """A dump of links in the format of a tool."""

    cluster: Cluster
    links: Mapping[Port, Port]
    slow: Mapping[Port, str] = dataclasses.field(default_factory=dict)
    """Maps a port to another speed, such as 53.125 or HDR."""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Maps a node to another node description."""
    absent: tuple[str, ...] = ()
    """Nodes that report nothing."""
    guids: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def _known(self) -> dict[str, int]:
        known = {name: 0x10 + index for index, name in enumerate(self._nodes())}
        return {**known, **self.guids}

    def guid(self, node: str) -> int:
        return self._known[node]

    def name(self, node: str) -> str:
        return self.names.get(node, node.replace(":", " "))

    def _nodes(self) -> list[str]:
        """Return switches, then NICs, which InfiniBand calls nodes."""
        extra = {self.node_of(end) for end in self.links}
        nodes = [*self.cluster.switches]
        for host in self.cluster.hosts.values():
            nodes += [f"{host.name}:{nic.name}" for nic in host.nics]
        return list(dict.fromkeys([*nodes, *sorted(extra)]))

    def node_of(self, end: Port) -> str:
        is_switch = end.node in self.cluster.switches or end.node.startswith("new")
        return end.node if is_switch else f"{end.node}:{end.name}"

    def number(self, end: Port) -> int:
        return int(end.name) if end.name.isdigit() else 1

    def _ends(self, node: str) -> Iterator[tuple[int, Port | None]]:
        """Yield the ports of a node with their other ends."""
        switch = self.cluster.switches.get(node)
        ports = [port(f"{node}:{n}") for n in switch.ports] if switch else [port(node)]
        if not switch and node.startswith("new"):
            ports = [end for end in self.links if end.node == node]
        for end in ports:
            yield self.number(end), self.links.get(end)

    def iblinkinfo(self, *, switches_only: bool = False) -> list[bytes]:
        return [line.encode() for line in self._iblinkinfo(switches_only=switches_only)]

    def _iblinkinfo(self, *, switches_only: bool) -> Iterator[str]:
        for node in self._nodes():
            if node in self.absent or (switches_only and ":" in node):
                continue
            for number, peer in self._ends(node):
                head = f'0x{self.guid(node):016x} "{self.name(node):>30}" {7:6} '
                head += f"{number:4}[  ] =="
                own = port(node) if ":" in node else Port(node=node, name=str(number))
                if peer is None:
                    link = f"(              {'Down':>6}/{'Polling':>8})"
                    yield f'{head}{link}==>             [  ] "" ( )\n'
                    continue
                speed = self.slow.get(own, self.slow.get(peer, "106.25"))
                link = f"({'4X':>3} {speed + ' Gbps':>18} {'Active':>6}/{'LinkUp':>8})"
                far = self.node_of(peer)
                yield (
                    f"{head}{link}==>  0x{self.guid(far):016x} {9:6} "
                    f'{self.number(peer):4}[  ] "{self.name(far)}" ( )\n'
                )

    def ibnetdiscover(self) -> list[bytes]:
        return "".join(self._ibnetdiscover()).encode().splitlines(keepends=True)

    def _ibnetdiscover(self) -> Iterator[str]:
        yield from ("#\n", "# Topology file: generated on Tue Jun  2 14:15:10 2026\n")
        yield from ("#\n", "# Initiated from node 0000000000000010 port 10\n")
        for node in self._nodes():
            if node in self.absent:
                continue
            guid, is_nic = self.guid(node), ":" in node
            yield from ("\n", "vendid=0x2c9\n", "devid=0xd2f2\n")
            kind = "Ca" if is_nic else "Switch"
            yield f"caguid=0x{guid:x}\n" if is_nic else switch_guid(guid)
            letter, num = ("H", 1) if is_nic else ("S", 64)
            tail = "" if is_nic else " base port 0 lid 6 lmc 0"
            yield f'{kind}\t{num} "{letter}-{guid:016x}"\t\t# "{self.name(node)}"'
            yield f"{tail}\n"
            for number, peer in self._ends(node):
                if peer is not None:
                    yield self._net_port(node, number, peer)

    def _net_port(self, node: str, number: int, peer: Port) -> str:
        far, is_nic = self.node_of(peer), ":" in node
        guid = self.guid(far)
        own = f"({self.guid(node):x}) " if is_nic else ""
        letter = "H" if ":" in far else "S"
        remote = f"({guid:x}) " if letter == "H" else ""
        lids = "lid 12 lmc 0 " if is_nic else ""
        own_port = port(node) if is_nic else Port(node=node, name=str(number))
        speed = self.slow.get(own_port, self.slow.get(peer, "NDR"))
        return (
            f'[{number}]{own}\t"{letter}-{guid:016x}"[{self.number(peer)}]{remote}'
            f'\t\t# {lids}"{self.name(far)}" lid 9 4x{speed}\n'
        )


def switch_guid(guid: int) -> str:
    return f"switchguid=0x{guid:x}({guid:x})\n"
