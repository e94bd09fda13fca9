"""Find the hosts of a run: their names, addresses and processes.

A host is named by MJAX_HOST, which the launcher may set, or by its own host name.
"""

import dataclasses
import ipaddress
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from mjax.processes import distributed
from mjax.processes.agreement import Agreement
from mjax.processes.config import split_address

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a run, as one process sees them."""

    own: str
    """Name of the host of this process."""
    leaders: Mapping[str, int]
    """Lowest rank of each host, by name of the host."""
    address: str
    """IP address of this host, at which the other hosts reach it."""


def find(agreement: Agreement) -> Hosts:
    """Find the hosts of a run; every process must call this.

    Raises:
      RuntimeError: see `Agreement.all_of`.
    """
    coordinator = distributed.coordinator()
    own = {
        "name": _own_name(),
        "boot": _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "",
        "address": _route_to(split_address(coordinator)[0] if coordinator else None),
    }
    texts = agreement.all_of(json.dumps(own))
    found = [json.loads(text) for text in texts]
    names = _names(found)
    leaders: dict[str, int] = {}
    for rank, name in enumerate(names):
        leaders.setdefault(name, rank)
    address = own["address"]
    others = [f["address"] for f in found if not _is_loopback(f["address"])]
    if _is_loopback(address) and others:  # the coordinator reaches itself by loopback
        address = _route_to(others[0])
    return Hosts(own=names[agreement.rank], leaders=leaders, address=address)


def _own_name() -> str:
    return os.environ.get("MJAX_HOST") or socket.gethostname()


def _names(found: list[dict[str, str]]) -> list[str]:
    """Return the host's name for each process; machines never share a name."""
    boots: dict[str, set[str]] = {}
    for process in found:
        boots.setdefault(process["name"], set()).add(process["boot"])
    return [
        f["name"] if len(boots[f["name"]]) == 1 else f"{f['name']}/{f['boot']}"
        for f in found
    ]


def _route_to(host: str | None) -> str:
    """Return the address of this host from which it would send to another host."""
    if host is None:
        return "127.0.0.1"
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a UDP socket, so nothing is sent
        return probe.getsockname()[0]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
