"""Links of an InfiniBand fabric from the output of iblinkinfo or ibnetdiscover.

Input: lines of `iblinkinfo --line` or of `ibnetdiscover`, as bytes with their line
ends. Output: one `Sighting` per port, one at a time, and signs of an incomplete text:
lines that do not parse, an unterminated last line. Neither format has a trailer, so
`seen_links` checks that both nodes of a link list it.

Source of the formats: linux-rdma/rdma-core, infiniband-diags/iblinkinfo.c
(`print_port`, also for ports that are down) and ibnetdiscover.c (`out_switch_port`,
`out_ca_port`, which do not give the state of a port), and the man page
ibnetdiscover(8), "Topology file format"; of speeds: libibmad/dump.c.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from mjax.health.cluster.links import End, Observation, Sighting

MAX_LINE_BYTES = 4096
"""Maximum length of a line. The longest line of either format has about 300 bytes."""
_SHOWN_CHARS = 80
_MAX_BROKEN = 5
"""Number of unparsed lines shown. They are enough to recognise another format."""

_LANE_GBPS = {2.5: 2.5, 5.0: 5.0, 10.0: 10.0, 14.0625: 14.0}
_LANE_GBPS |= {25.78125: 25.0, 53.125: 50.0, 106.25: 100.0, 212.5: 200.0}
"""Maps the signalling rate of a lane, as in dump.c, to the nominal rate of its
generation: 4 lanes of 106.25 are NDR, 400 Gb/s. iblinkinfo of OFED rounds 25.78125."""
_LANE_GBPS |= {14.06: 14.0, 25.78: 25.0, 53.12: 50.0, 53.13: 50.0}
_GENERATION_GBPS = {"SDR": 2.5, "DDR": 5.0, "QDR": 10.0, "FDR10": 10.0, "FDR": 14.0}
_GENERATION_GBPS |= {"EDR": 25.0, "HDR": 50.0, "NDR": 100.0, "XDR": 200.0}

_INFO_LINE = re.compile(
    r'\s*0x(?P<guid>[0-9a-f]{1,16}) "(?P<name>[^"]*)"\s+\d+\s+(?P<port>\d+)\[[ \d]*\] '
    r"==\((?P<link>[^()]*(?:\(FDR10\)[^()]*)?)\)(?: \(HOQ:[^()]*\))?==>\s+"
    r"(?P<remote>.*)"
)
_INFO_LINK = re.compile(
    r"\s*(?:(?P<lanes>\d+)X\s+(?P<speed>[\d.]+) Gbps(?: \(FDR10\))?\s+)?"
    r"(?P<state>[A-Z]\w*)/\s*(?P<physical>[A-Z]\w*)\s*"
)
_INFO_REMOTE = re.compile(
    r'0x(?P<guid>[0-9a-f]{1,16})\s+\d+\s+(?P<port>\d+)\[[ \d]*\] "(?P<name>[^"]*)" '
    r"\([^()]*(?:\([^()]*\)[^()]*)*\)"
)
_INFO_ABSENT = re.compile(r'\[  \] "" \( \)|"Port not available"')
_NET_NODE = re.compile(
    r'(?P<kind>Switch|Ca|Rt)\s+(?P<ports>\d+)\s+"[SHR]-(?P<guid>[0-9a-f]{1,16})"\s+'
    r'# "(?P<name>[^"]*)"(?P<rest>.*)'
)
_NET_PORT = re.compile(
    r"\[(?P<port>\d+)\](?:\[ext \d+\])?(?:\((?P<own>[0-9a-f]{1,16})\))?\s+"
    r'"(?P<kind>[SHR])-(?P<guid>[0-9a-f]{1,16})"\[(?P<peer>\d+)\](?:\[ext \d+\])?'
    r"\s*(?:\((?P<remote>[0-9a-f]{1,16})\))?\s+"
    r'# (?:lid \d+ lmc \d+ )?"(?P<name>[^"]*)" lid \d+ '
    r"(?P<lanes>\d+)x(?P<speed>\w+|\?\?\?)(?: s=\d+ w=\d+ v=\d+)?"
    r"(?: slot \d+)?(?: \(scp\))?\s*"
)
_NET_SWITCH = re.compile(r"switchguid=0x[0-9a-f]{1,16}\((?P<port>[0-9a-f]{1,16})\).*")
_NET_OTHER = re.compile(
    r"(?:#.*|(?:vendid|devid|sysimgguid|caguid|rtguid)=0x[0-9a-f]+.*|Chassis \d+.*"
    r"|Non-Chassis Nodes|Hostname: .*)?\s*"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Broken:
    """A line that does not parse."""

    place: str
    text: str


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file with their ends, each at most `MAX_LINE_BYTES`."""
    while line := file.readline(MAX_LINE_BYTES):
        yield line


def read(
    lines: Iterable[bytes], source: str, *, switches_only: bool = False
) -> Observation:
    """Read a whole dump of either format.

    Args:
      lines: lines of the dump, with their line ends.
      source: name of the text in messages.
      switches_only: the dump is from `iblinkinfo --line --switches-only`. Without this
        argument, such a dump is taken for one that was truncated before the first host.
    """
    parser = _Parser(source)
    sightings = tuple(one for line in lines for one in parser.feed(line))
    return Observation(
        source=source,
        fabric="infiniband",
        sightings=sightings,
        lists_hosts=not switches_only,
        counts=parser.counts,
        problems=parser.problems(bool(sightings)),
    )


class _Parser:
    """Parses a dump line by line; the format of each line is recognised."""

    def __init__(self, source: str) -> None:
        self.counts: dict[int, int] = {}
        self._source, self._number, self._broken = source, 0, list[Broken]()
        self._num_broken, self._is_cut = 0, False
        self._node: End | None = None
        self._switch_guid: int | None = None

    def feed(self, line: bytes) -> Iterator[Sighting]:
        """Yield the port of a line, if it has one."""
        self._number += 1
        self._is_cut = not line.endswith(b"\n")
        text = line.decode("utf-8", errors="replace").rstrip("\r\n")
        is_known = False
        for found in self._parse(text):
            is_known = True
            if isinstance(found, Sighting):
                yield found
        if not is_known:
            self._num_broken += 1
            if len(self._broken) < _MAX_BROKEN:
                shown = text[:_SHOWN_CHARS]
                self._broken.append(Broken(place=self._place, text=shown))

    def problems(self, has_links: bool) -> tuple[str, ...]:
        """Return the reasons why the text may be incomplete."""
        found = [
            f"{one.place}: not a line of iblinkinfo --line or ibnetdiscover: "
            f"{one.text!r}"
            for one in self._broken
        ]
        if self._num_broken > len(self._broken):
            found.append(f"{self._source}: and {self._num_broken - _MAX_BROKEN} more")
        if self._is_cut:
            found.append(f"{self._source} ends in the middle of line {self._number}")
        if not has_links:
            found.append(f"{self._source} has no port; was the command allowed to run?")
        return tuple(found)

    @property
    def _place(self) -> str:
        return f"{self._source}:{self._number}"

    def _parse(self, text: str) -> Iterator[Sighting | bool]:
        """Yield the port of a line, True if it has none, nothing if it is invalid."""
        if not text.strip():
            yield True
        elif text.lstrip().startswith("0x"):
            yield from self._parse_info(text)
        else:
            yield from self._parse_net(text)

    def _parse_info(self, text: str) -> Iterator[Sighting | bool]:
        line = _INFO_LINE.fullmatch(text.rstrip())
        link = line and _INFO_LINK.fullmatch(line["link"])
        if not line or not link:
            return
        remote = _INFO_REMOTE.fullmatch(line["remote"].strip())
        if not remote and not _INFO_ABSENT.fullmatch(line["remote"].strip()):
            return
        guid = int(line["guid"], 16)
        self.counts[guid] = self.counts.get(guid, 0) + 1
        lane_gbps = _LANE_GBPS.get(float(link["speed"])) if link["speed"] else None
        yield Sighting(
            end=_end(line["name"], guid, None, line["port"]),
            peer=remote
            and _end(remote["name"], int(remote["guid"], 16), None, remote["port"]),
            rate_gbps=lane_gbps and lane_gbps * int(link["lanes"]),
            state=link["state"],
            place=self._place,
        )

    def _parse_net(self, text: str) -> Iterator[Sighting | bool]:
        if switch := _NET_SWITCH.fullmatch(text):
            self._node, self._switch_guid = None, int(switch["port"], 16)
            yield True
        elif node := _NET_NODE.fullmatch(text):
            guid = self._switch_guid if node["kind"] == "Switch" else None
            self._switch_guid = None
            self._node = _end(node["name"], int(node["guid"], 16), guid, "0")
            yield True
        elif (port := _NET_PORT.fullmatch(text)) and self._node is not None:
            yield self._net_port(self._node, port)
        elif _NET_OTHER.fullmatch(text):
            if not text.startswith("#"):
                self._node = None
            yield True

    def _net_port(self, node: End, port: re.Match[str]) -> Sighting:
        own = (int(port["own"], 16),) if port["own"] else ()
        remote = int(port["remote"], 16) if port["remote"] else None
        lane_gbps = _GENERATION_GBPS.get(port["speed"])
        return Sighting(
            end=End(
                description=node.description,
                guids=tuple(dict.fromkeys((*own, *node.guids))),
                ports=(port["port"],),
            ),
            peer=_end(port["name"], int(port["guid"], 16), remote, port["peer"]),
            rate_gbps=lane_gbps and lane_gbps * int(port["lanes"]),
            place=self._place,
        )


def _end(name: str, guid: int, port_guid: int | None, port: str) -> End:
    guids = (guid,) if port_guid is None else (port_guid, guid)
    # Unknown nodes have GUID 0.
    known = tuple(one for one in dict.fromkeys(guids) if one)
    return End(description=name.strip(), guids=known, ports=(port,))
