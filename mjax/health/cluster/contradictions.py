"""Find contradictions among the cables of a cluster file.

Input: the parts of a cluster, each of which is valid by itself. Output: problems with
their paths in the file: ports with two cables, rails spread over several leaves,
switches that no host reaches, more cables than ports.

Source of the rule for rails: NVIDIA DGX SuperPOD reference architecture, "Network
Fabrics": the NICs of one rail of a scalable unit are one switch away from each other.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from mjax.health.cluster.parts import (
    ANY_PORT,
    Cable,
    Cluster,
    Fabric,
    Host,
    Port,
    switch_groups,
)
from mjax.health.cluster.toml_tables import Problem

_SHOWN = 3
"""Maximum number of problems of a kind shown for one path, and of names in a message.
One entry of a cluster file covers hundreds of ports, which are mostly wrong
together."""
_FABRICS: tuple[Fabric, ...] = ("infiniband", "ethernet")


class Problems:
    """The problems found so far."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, path: str, kind: str, text: str) -> None:
        """Add a problem; see `Problem`."""
        self.found.append(Problem(path=path, kind=kind, text=text))

    def limited(self) -> list[Problem]:
        """Return the first problems of each kind at a path, and count the others."""
        counts: Counter[tuple[str, str]] = Counter()
        kept: list[Problem] = []
        for one in self.found:
            counts[one.path, one.kind] += 1
            if counts[one.path, one.kind] <= _SHOWN:
                kept.append(one)
        for (path, kind), num in counts.items():
            if num > _SHOWN:
                text = f"and {num - _SHOWN} more like it"
                kept.append(Problem(path=path, kind=kind, text=text))
        return kept


def check(cluster: Cluster, problems: Problems, *, has_all_cables: bool = True) -> None:
    """Add the contradictions of a cluster to the problems.

    Args:
      cluster: a cluster of valid parts, whose cables name existing ports.
      problems: collects problems.
      has_all_cables: no cable entry was skipped; otherwise absent cables are not
        reported.
    """
    for cable in cluster.cables:
        _check_cable(cable, cluster, problems)
    _check_ports(cluster, problems)
    if has_all_cables:
        _check_nics(cluster, problems)
    for group, hosts in _groups(cluster.hosts.values()).items():
        _check_wiring(group, hosts, cluster, problems)
    for fabric in _FABRICS if has_all_cables else ():
        _check_reach(fabric, cluster, problems)


def few(names: Iterable[str]) -> str:
    """Return a text with the first names and the number of the others."""
    words = list(names)
    shown = ", ".join(words[:_SHOWN])
    return shown if len(words) <= _SHOWN else f"{shown} and {len(words) - _SHOWN} more"


def _check_cable(cable: Cable, cluster: Cluster, problems: Problems) -> None:
    """Check the ends of one cable."""
    low, high = cable.low, cable.high
    if low.node == high.node:
        problems.add(cable.path, "loop", f"{cable} joins {low.node} with itself")
    if low.node in cluster.switches and ANY_PORT in (low.name, high.name):
        text = f"{cable}: between switches both ports must be named"
        problems.add(cable.path, "pattern", text)
    fabrics = {_fabric(end, cluster) for end in (low, high)}
    if len(fabrics) > 1:
        text = f"{cable} joins {_fabric(low, cluster)} and {_fabric(high, cluster)}"
        problems.add(cable.path, "fabric", text)
    switch = cluster.switches.get(high.node)
    host = cluster.hosts.get(low.node)
    if switch is None or host is None:
        return
    if switch.tier != "leaf":
        text = f"{cable}: hosts belong on leaves, and {high.node} is a {switch.tier}"
        problems.add(cable.path, "tier", text)
    rail = host.by_nic[low.name].rail
    if switch.rail is not None and rail != switch.rail:
        text = f"{low} has {_rail(rail)}, and {high.node} is for rail {switch.rail}"
        problems.add(cable.path, "rail", text)


def _rail(rail: int | None) -> str:
    return "no rail" if rail is None else f"rail {rail}"


def _fabric(port: Port, cluster: Cluster) -> str:
    if port.node in cluster.hosts:
        return cluster.hosts[port.node].by_nic[port.name].fabric
    return cluster.switches[port.node].fabric


def _check_ports(cluster: Cluster, problems: Problems) -> None:
    """Find ports with two cables, and switches with more cables than ports."""
    first: dict[Port, Cable] = {}
    num: Counter[str] = Counter()
    paths: dict[str, str] = {}
    for cable in cluster.cables:
        for end in (cable.low, cable.high):
            before = cable if end.name == ANY_PORT else first.setdefault(end, cable)
            if before is not cable:
                text = f"{end} has a second cable, {cable}; the first, {before}, is in"
                problems.add(cable.path, "two cables", f"{text} {before.path}")
            elif end.node in cluster.switches:
                num[end.node] += 1
                paths[end.node] = cable.path
    for name, count in num.items():
        num_ports = len(cluster.switches[name].ports)
        if count > num_ports:
            text = f"{name} has {count} cables and {num_ports} ports"
            problems.add(paths[name], "too many cables", text)


def _check_nics(cluster: Cluster, problems: Problems) -> None:
    """Find NICs without a cable although other NICs of their fabric have one."""
    joined = {end for cable in cluster.cables for end in (cable.low, cable.high)}
    cabled = {
        cable.fabric for cable in cluster.cables if cable.low.node in cluster.hosts
    }
    for host in cluster.hosts.values():
        for nic in host.nics:
            port = Port(node=host.name, name=nic.name)
            if nic.fabric in cabled and port not in joined:
                text = f"{port} has no cable, and other NICs on {nic.fabric} have one"
                problems.add(host.group, "no cable", text)


def _groups(hosts: Iterable[Host]) -> Mapping[str, list[Host]]:
    found: dict[str, list[Host]] = defaultdict(list)
    for host in hosts:
        found[host.group].append(host)
    return found


def _check_wiring(
    group: str, hosts: list[Host], cluster: Cluster, problems: Problems
) -> None:
    """Check that the NICs of a group share leaves according to its `wiring`."""
    wiring = hosts[0].wiring
    if wiring == "free":
        return
    members: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for host in hosts:
        for nic, leaf in cluster.leaves[host.name].items():
            rail, fabric = host.by_nic[nic].rail, host.by_nic[nic].fabric
            if wiring == "host":
                members[f"the {fabric} NICs of {host.name}"][leaf].append(nic)
            elif rail is not None:
                members[f"rail {rail} on {fabric}"][leaf].append(host.name)
    for what, by_leaf in members.items():
        if len(by_leaf) > 1:
            places = "; ".join(f"{leaf} ({few(by_leaf[leaf])})" for leaf in by_leaf)
            text = f"{what} sits on {len(by_leaf)} leaves: {places}"
            help_text = "make a group of the hosts of each leaf, or set wiring to free"
            problems.add(group, "wiring", f"{text}; {help_text}")


def _check_reach(fabric: Fabric, cluster: Cluster, problems: Problems) -> None:
    """Find switches that no host reaches, and separate parts of a fabric."""
    cables = [cable for cable in cluster.cables if cable.fabric == fabric]
    switches = [s for s in cluster.switches.values() if s.fabric == fabric]
    if not cables or not switches:
        return
    links = [(cable.low.node, cable.high.node) for cable in cables]
    joined = {name for link in links for name in link}
    with_hosts = {high for low, high in links if low in cluster.hosts}
    parts = []
    for part in switch_groups((switch.name for switch in switches), links):
        if with_hosts & {*part}:
            parts.append(part)
            continue
        for name in part:
            text = "no host reaches it" if name in joined else "it has no cable"
            problems.add("switches", "unreachable", f"{name} is a switch, and {text}")
    if parts and len(parts) != cluster.islands:
        shown = "; ".join(f"{len(part)} with {few(part)}" for part in parts[:_SHOWN])
        text = f"the switches on {fabric} make {len(parts)} parts ({shown})"
        text = f"{text}, and islands = {cluster.islands}"
        text = f"{text}; add the cables between them, or set islands = {len(parts)}"
        problems.add("islands", "islands", text)
