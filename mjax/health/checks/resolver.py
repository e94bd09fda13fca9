"""Checks of name resolution: the host resolves its own name to a reachable address.

Processes of a run find each other by host name. A name that resolves to 127.0.0.1 on
its own host works only there.

Sources: hostname(1), `-i`; hosts(5); resolv.conf(5). Only `hostname -i` may use the
network.
"""

import ipaddress
from collections.abc import Iterator

from mjax.health.check import check
from mjax.health.findings import (
    UnreadableError,
    Verdict,
    failed,
    judge_each,
    ok,
    unknown,
)
from mjax.health.settings import Settings
from mjax.health.sources import Command, File

_HOSTNAME = Command(("hostname", "-i"))
_HOSTS = File("/etc/hosts")
_RESOLV = File("/etc/resolv.conf")
_NOT_FOUND = 1
"""Exit status of `hostname -i` if the name has no address."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_SHOWN_CHARS = 60


def _address(text: str) -> Address:
    try:
        return ipaddress.ip_address(text)
    except ValueError as error:
        raise UnreadableError(
            f"expected an address, got {text[:_SHOWN_CHARS]!r}"
        ) from error


@check(
    "resolver.own_name",
    source=_HOSTNAME,
    action="Correct the line of this host in /etc/hosts (127.0.1.1 does not work).",
    statuses=(0, _NOT_FOUND),
)
def own_name(text: str, settings: Settings) -> Verdict:
    """The host's name resolves to an address that others can reach."""
    del settings
    found = [_address(word) for word in text.split()]
    if not found:
        return failed("the name of this host has no address")
    shown = " ".join(map(str, found))
    for address in found:
        if address.is_loopback:
            # Not a fault of a host that trains alone; a cluster requires this check.
            return unknown(
                f"the name of this host resolves to a loopback address: {shown}"
            )
        if address.is_unspecified:
            return failed(
                f"the name of this host resolves to an unspecified address: {shown}",
                shown,
            )
    return ok(shown)


def _lines(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words:
            yield words


@check(
    "resolver.hosts_file",
    source=_HOSTS,
    action="Remove the wrong line from /etc/hosts.",
)
def hosts_file(text: str, settings: Settings) -> Verdict:
    """No name in /etc/hosts has two addresses."""
    del settings
    first: dict[tuple[int, str], Address] = {}
    problems = []
    for number, *names in _lines(text):
        address = _address(number)
        if not names:
            raise UnreadableError(f"{number} has no name")
        if address.is_loopback:
            continue
        for name in dict.fromkeys(name.lower() for name in names):
            had = first.setdefault((address.version, name), address)
            if had != address:
                problems.append((name, f"is {had} and {address}"))
    return judge_each(problems, f"{len(first)} names")


@check(
    "resolver.servers",
    source=_RESOLV,
    action="Compare /etc/resolv.conf with a healthy host's.",
)
def servers(text: str, settings: Settings) -> Verdict:
    """A name server is configured.

    Lines that begin with ; are comments too: their first word is not `nameserver`.
    """
    del settings
    found = [words for words in _lines(text) if words[0] == "nameserver"]
    addresses = [str(_address(words[1])) for words in found if len(words) == 2]
    if len(addresses) != len(found):
        raise UnreadableError("a nameserver has no address, or several")
    if not addresses:
        return failed("/etc/resolv.conf has no nameserver")
    return ok(" ".join(addresses))


CHECKS = (
    own_name,
    hosts_file,
    servers,
)
