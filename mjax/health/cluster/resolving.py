"""Map the nodes of a dump to those of a cluster file.

Input: a node's description and GUIDs. Output: a port of the file, or why there is
none. A GUID in the file takes precedence over a description, which anyone can set; a
conflict between the two is reported.

Source of descriptions: rdma-ndd(8), linux-rdma/rdma-core: "%h %d", the names of host
and device. OFED writes `HCA-1` for the device; the key `node_description` of a NIC
gives this name. Managed switches write `MF0;NAME:MODEL/U1`.
"""

import re

from mjax.health.cluster.links import End
from mjax.health.cluster.parts import Cluster, Port

_MANAGED = re.compile(r"MF0;([^:;]+):.*")


class Resolver:
    """Finds the ports of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._by_guid = {guid: name for name, guid in cluster.guids.items()}
        self._nics = {
            (host.name, nic.node_description or nic.name): nic.name
            for host in cluster.hosts.values()
            for nic in host.nics
        }
        self._found: dict[tuple[End, bool], Port | None] = {}
        self.disagreements: dict[str, str] = {}
        """Maps a node of the file to the conflict between its GUID and its name."""

    def port(self, end: End, *, is_own: bool = False) -> Port | None:
        """Return the port of the file for an end of a link; None if there is none.

        Args:
          end: end of a link.
          is_own: the node itself reports the end, with all its GUIDs.
        """
        key = end, is_own
        if key not in self._found:
            self._found[key] = self._port(end, is_own)
        return self._found[key]

    def _port(self, end: End, is_own: bool) -> Port | None:
        node = self._node(end, is_own)
        if node is None:
            return None
        name, colon, nic = node.partition(":")
        if not colon:
            return Port(node=name, name=self._switch_port(name, end.ports))
        number = end.ports[0]
        is_first = number == "1" or not number.isdigit()
        return Port(node=name, name=nic if is_first else f"{nic}/{number}")

    def _node(self, end: End, is_own: bool) -> str | None:
        """Return the `host:nic` or switch of the file; None if it is neither."""
        by_name = self._by_name(end)
        named = [self._by_guid[guid] for guid in end.guids if guid in self._by_guid]
        shown = ", ".join(f"0x{guid:016x}" for guid in end.guids)
        expected = by_name and self._cluster.guids.get(by_name)
        if named and by_name and by_name != named[0]:
            self.disagreements[named[0]] = (
                f"the node with the GUID of {named[0]}, {shown}, calls itself {by_name}"
            )
        elif not named and by_name and expected is not None and end.guids and is_own:
            self.disagreements[by_name] = (
                f"the node that calls itself {by_name} has the GUID {shown}, and the "
                f"file says 0x{expected:016x}"
            )
        return named[0] if named else by_name

    def is_ignored(self, end: End) -> bool:
        """Return whether the file ignores links of this node."""
        return end.description in self._cluster.ignore

    def _by_name(self, end: End) -> str | None:
        text = end.description
        if managed := _MANAGED.fullmatch(text):
            text = managed[1]
        for name in (text, text.partition(".")[0]):  # with and without a domain
            if name in self._cluster.switches:
                return name
        host, _, device = text.rpartition(" ")
        if not host:  # LLDP names the interface instead
            host, device = text, end.ports[0]
        for name in (host.strip(), host.strip().partition(".")[0]):
            nic = self._nics.get((name, device))
            if nic is not None:
                return f"{name}:{nic}"
        return None

    def _switch_port(self, name: str, said: tuple[str, ...]) -> str:
        """Return the name of a port in the file; a port number counts from 1."""
        ports = self._cluster.switches[name].ports
        for text in said:
            if text in self._cluster.switches[name].port_set:
                return text
        for text in said:
            if text.isascii() and text.isdigit() and 1 <= int(text) <= len(ports):
                return ports[int(text) - 1]
        return said[0]
