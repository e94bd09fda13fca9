"""Build hosts, switches, racks, cables and GUIDs from the tables of a cluster file.

Input: tables whose values have the right types. Output: a `Cluster`, and problems:
malformed patterns, duplicate or unknown names, inconsistent numbers. `contradictions`
checks the cables against each other.
"""

import fnmatch
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from mjax.cli.flags import nearest
from mjax.health.cluster.contradictions import Problems
from mjax.health.cluster.parts import (
    ANY_PORT,
    TIERS,
    Cable,
    Cluster,
    Host,
    Nic,
    Port,
    Switch,
)
from mjax.health.cluster.ranges import expand
from mjax.health.cluster.tables import (
    CablesTable,
    ClusterTable,
    HostsTable,
    SwitchesTable,
)

_PCI = re.compile(r"([0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
_GUID = re.compile(r"(0x)?[0-9a-f]{1,16}|[0-9a-f]{4}(:[0-9a-f]{4}){3}", re.IGNORECASE)


class Builder:
    """Builds the parts of a cluster from tables, and collects problems."""

    def __init__(
        self,
        tables: ClusterTable,
        problems: Problems,
        *,
        is_whole: bool,
        known_checks: Collection[str] | None = None,
    ) -> None:
        """Begin with an empty cluster.

        Args:
          tables: tables of the file.
          problems: collects problems.
          is_whole: no table had to be skipped, so a name that is not defined is an
            error.
          known_checks: names of checks that may be required; None: any.
        """
        self._tables, self._problems, self._is_whole = tables, problems, is_whole
        self._known_checks = known_checks
        self.has_all_cables = True
        """Whether no cable entry was skipped."""
        self._hosts: dict[str, Host] = {}
        self._switches: dict[str, Switch] = {}
        self._racks: dict[str, tuple[str, ...]] = {}

    @property
    def is_whole(self) -> bool:
        """Whether all tables and patterns of the file were usable."""
        return self._is_whole

    def cluster(self) -> Cluster:
        """Build all parts. Their order matters: later parts refer to earlier ones."""
        tables = self._tables
        if tables.islands < 1:
            self._add("islands", "size", f"must be at least 1, got {tables.islands}")
        rack_of = self._make_racks()
        for group in tables.hosts:
            self._make_hosts(group, rack_of)
        for kind in tables.switches:
            self._make_switches(kind, rack_of)
        if not self._hosts and self._is_whole:
            self._add("hosts", "size", "no host; add a table [[hosts]] with names")
        self._check_racks()
        self._check_require()
        return Cluster(
            name=tables.name,
            hosts=self._hosts,
            switches=self._switches,
            racks=self._racks,
            cables=tuple(self._make_cables()),
            guids=self._make_guids(),
            versions=tables.versions,
            require=tables.require,
            islands=tables.islands,
            ignore=tables.ignore,
        )

    def _add(self, path: str, kind: str, text: str) -> None:
        self._problems.add(path, kind, text)

    def _expand(self, pattern: str, path: str) -> list[str]:
        try:
            return expand(pattern)
        except ValueError as error:
            self._add(path, "pattern", str(error))
            self._is_whole = False
            return []

    def _make_racks(self) -> dict[str, str]:
        """Return the rack of each host and switch; the first if two racks name it."""
        rack_of: dict[str, str] = {}
        for rack in self._tables.racks:
            if rack.name in self._racks:
                self._add(f"{rack.path}.name", "name", f"a second rack {rack.name}")
                continue
            members = []
            for key in ("hosts", "switches"):
                path = f"{rack.path}.{key}"
                for name in self._expand(getattr(rack, key), path):
                    before = rack_of.setdefault(name, rack.name)
                    if before != rack.name:
                        text = f"{name} is in {rack.name} and in {before}; keep one"
                        self._add(path, "rack", text)
                    elif name in members:
                        self._add(path, "rack", f"{name} is named twice")
                    else:
                        members.append(name)
            self._racks[rack.name] = tuple(members)
        return rack_of

    def _check_racks(self) -> None:
        for rack in self._tables.racks:
            for key in ("hosts", "switches"):
                known: Mapping[str, object] = getattr(self, f"_{key}")
                for name in _quietly(getattr(rack, key)):
                    if name not in known and self._is_whole:
                        text = f"no {key[:-2] if key == 'switches' else key[:-1]}"
                        text = f"{text} is called {name}{_near(name, known)}"
                        self._add(f"{rack.path}.{key}", "unknown", text)

    def _check_require(self) -> None:
        require = self._tables.require
        for index, name in enumerate(require):
            if name in require[:index]:
                self._add(f"require[{index}]", "name", f"{name} is named twice")
            known = self._known_checks
            if known is not None and not fnmatch.filter(known, name):
                text = f"no check is called {name}{_near(name, [*known])}"
                self._add(f"require[{index}]", "unknown", text)

    def _is_free(self, name: str, path: str) -> bool:
        """Return whether a name is valid and free for a node."""
        text = ""
        if ":" in name:
            text = f"{name!r} has a colon, which separates node and port in cables"
        elif name in self._hosts:
            text = f"{name} is a host of {self._hosts[name].group} already"
        elif name in self._switches:
            text = f"{name} is a switch already"
        if text:
            self._add(path, "name", text)
        return not text

    def _make_hosts(self, group: HostsTable, rack_of: Mapping[str, str]) -> None:
        self._check_gpus(group)
        nics: dict[str, Nic] = {}
        for index, nic in enumerate(group.nics):
            path = f"{group.path}.nics[{index}]"
            if nic.name in nics or not nic.name or ANY_PORT in nic.name:
                self._add(
                    f"{path}.name", "name", f"{nic.name!r} is empty, or names two NICs"
                )
            if nic.rail is not None and nic.rail < 0:
                self._add(f"{path}.rail", "size", f"must be at least 0, got {nic.rail}")
            self._check_rate(nic.rate_gbps, path)
            nics.setdefault(nic.name, nic)
        for name in self._expand(group.names, f"{group.path}.names"):
            before = self._hosts.get(name)
            if before is not None and before.num_gpus != group.gpus:
                text = f"{name} has {group.gpus} GPUs here and {before.num_gpus} in"
                self._add(f"{group.path}.gpus", "gpus", f"{text} {before.group}")
            if self._is_free(name, f"{group.path}.names"):
                self._hosts[name] = Host(
                    name=name,
                    group=group.path,
                    wiring=group.wiring,
                    num_gpus=group.gpus,
                    gpu_pci=tuple(address.lower() for address in group.gpu_pci),
                    nics=tuple(nics.values()),
                    rack=rack_of.get(name),
                )

    def _check_gpus(self, group: HostsTable) -> None:
        path, addresses = f"{group.path}.gpu_pci", group.gpu_pci
        if group.gpus < 0:
            text = f"must be at least 0, got {group.gpus}"
            self._add(f"{group.path}.gpus", "size", text)
        if addresses and len(addresses) != group.gpus:
            text = f"{len(addresses)} PCI addresses, and gpus = {group.gpus}"
            self._add(path, "gpus", f"{text}; give one for each GPU, or none")
        for index, address in enumerate(addresses):
            if not _PCI.fullmatch(address):
                text = f"{address!r} is not a PCI address; write it as 0000:1b:00.0"
                self._add(f"{path}[{index}]", "gpus", text)
            if address.lower() in {one.lower() for one in addresses[:index]}:
                self._add(f"{path}[{index}]", "gpus", f"{address} is named twice")

    def _check_rate(self, rate_gbps: int | None, path: str) -> None:
        if rate_gbps is not None and rate_gbps <= 0:
            text = f"must be positive, got {rate_gbps}; leave it out if unknown"
            self._add(f"{path}.rate_gbps", "size", text)

    def _make_switches(self, kind: SwitchesTable, rack_of: Mapping[str, str]) -> None:
        if kind.ports < 1:
            self._add(
                f"{kind.path}.ports", "size", f"must be at least 1, got {kind.ports}"
            )
        ports = [str(number + 1) for number in range(min(kind.ports, 2**16))]
        if kind.port_names is not None:
            path = f"{kind.path}.port_names"
            ports = self._expand(kind.port_names, path)
            if len(ports) != kind.ports:
                text = f"{len(ports)} names, and ports = {kind.ports}"
                self._add(path, "ports", f"{text}; give one for each port")
            if len(set(ports)) != len(ports):
                self._add(path, "ports", "a port is named twice")
        for name in self._expand(kind.names, f"{kind.path}.names"):
            if self._is_free(name, f"{kind.path}.names"):
                self._switches[name] = Switch(
                    name=name,
                    tier=kind.tier,
                    ports=tuple(ports),
                    rail=kind.rail,
                    fabric=kind.fabric,
                    rack=rack_of.get(name),
                )

    def _make_guids(self) -> dict[str, int]:
        found: dict[str, int] = {}
        owners: dict[int, str] = {}
        for name, text in self._tables.guids.items():
            path = f'guids."{name}"'
            if not self._is_known(name) and self._is_whole:
                known = [*self._switches, *self._nic_names()]
                text = f"no switch and no NIC is called {name}{_near(name, known)}"
                self._add(path, "unknown", text)
                continue
            if not _GUID.fullmatch(text):
                said = f"{text!r} is not a GUID; write it as 0x946dae03005a3c10"
                self._add(path, "guid", said)
                continue
            guid = int(text.replace(":", ""), 16)
            other = owners.setdefault(guid, name)
            if other != name:
                self._add(path, "guid", f"{text} is the GUID of {other} already")
            found[name] = guid
        return found

    def _is_known(self, name: str) -> bool:
        node, colon, nic = name.partition(":")
        if not colon:
            return node in self._switches
        return node in self._hosts and nic in self._hosts[node].by_nic

    def _nic_names(self) -> Iterator[str]:
        for host in self._hosts.values():
            yield from (f"{host.name}:{nic.name}" for nic in host.nics)

    def _make_cables(self) -> Iterator[Cable]:
        for entry in self._tables.cables:
            self._check_rate(entry.rate_gbps, entry.path)
            ends = [
                self._make_ports(pattern, f"{entry.path}.ends[{index}]")
                for index, pattern in enumerate(entry.ends)
            ]
            if None in ends:
                self.has_all_cables = False
                continue
            one, other = (end or [] for end in ends)
            one, other = _stretched(one, len(other)), _stretched(other, len(one))
            if len(one) != len(other):
                text = f"{len(one)} ports at one end and {len(other)} at the other"
                text = f"{text}; write equally many"
                self._add(f"{entry.path}.ends", "count", text)
                self.has_all_cables = False
                continue
            for pair in zip(one, other, strict=True):
                yield self._make_cable(*pair, entry)

    def _make_ports(self, pattern: str, path: str) -> list[Port] | None:
        """Return the ports of one end of cables; None if a port is unknown."""
        names = self._expand(pattern, path)
        if not names:
            if not pattern.strip():
                self._add(path, "pattern", "no port; write it as leaf1:[1-32]")
            return None
        found, is_known = [], True
        for text in names:
            node, _, name = text.partition(":")
            problem = self._port_problem(node, name, text)
            if problem and (
                self._is_whole or node in {**self._hosts, **self._switches}
            ):
                self._add(path, "unknown", problem)
            is_known = is_known and not problem
            found.append(Port(node=node, name=name))
        return found if is_known else None

    def _port_problem(self, node: str, name: str, text: str) -> str:
        """Return why a port cannot exist; empty if it can."""
        if not name:
            return f"{text!r} names no port; write node:port, as leaf1:17"
        if node in self._hosts:
            nics = self._hosts[node].by_nic
            if name not in nics:
                return f"{node} has no NIC {name}{_near(name, nics)}"
            return ""
        if node not in self._switches:
            known = [*self._hosts, *self._switches]
            return f"no host and no switch is called {node}{_near(node, known)}"
        switch = self._switches[node]
        if name != ANY_PORT and name not in switch.port_set:
            shown = f"{switch.ports[0]} to {switch.ports[-1]}" if switch.ports else "0"
            return f"{node} has no port {name}; its ports are {shown}"
        return ""

    def _make_cable(self, one: Port, other: Port, entry: CablesTable) -> Cable:
        low, high = sorted((one, other), key=self._height)
        nics = [
            self._hosts[end.node].by_nic[end.name]
            for end in (low, high)
            if end.node in self._hosts
        ]
        rates = [nic.rate_gbps for nic in nics if nic.rate_gbps is not None]
        if entry.rate_gbps is not None and entry.rate_gbps > min(rates, default=10**9):
            text = f"{entry.rate_gbps} Gb/s, and the NIC of {low} has {min(rates)}"
            self._add(f"{entry.path}.rate_gbps", "rate", text)
        fabric = nics[0].fabric if nics else self._switches[low.node].fabric
        rate_gbps = entry.rate_gbps or min(rates, default=None)
        return Cable(
            low=low, high=high, fabric=fabric, rate_gbps=rate_gbps, path=entry.path
        )

    def _height(self, port: Port) -> int:
        if port.node in self._hosts:
            return -1
        return TIERS.index(self._switches[port.node].tier)


def _stretched(ports: list[Port], num: int) -> list[Port]:
    """Repeat a single port `num` times if it names only a switch."""
    is_open = len(ports) == 1 and ports[0].name == ANY_PORT
    return ports * num if is_open else ports


def _quietly(pattern: str) -> list[str]:
    """Return the names of a pattern whose errors have already been reported."""
    try:
        return expand(pattern)
    except ValueError:
        return []


def _near(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """Return a hint with the nearest known name; empty if none or many are known."""
    if not known or len(known) > 10_000:
        return ""
    return f"; did you mean {nearest(name, known)}?"
