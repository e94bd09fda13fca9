"""Checks of IPv4 routes: a host with several interfaces replies on the right one.

With two interfaces in one subnet, Linux sends all packets of that subnet through one of
them, answers ARP for any address on any of them, and may drop packets that arrive on
the "wrong" one. Transfers between hosts then use one interface of several, or fail.
Every address that shares a subnet needs a rule and a routing table of its own, and the
sysctls that keep ARP to the interface that has the address.

Sources: https://www.systemfabricworks.com/double-double-packet-trouble-too-many-nics-too-many-problems-in-three-acts/,
https://losslessnetwork.com/learn/host-networking/multi-rail-source-routing and
https://instinct.docs.amd.com/projects/system-acceptance/en/latest/network/configuration.html
(a table and a rule for each interface); the sysctls:
https://www.kernel.org/doc/Documentation/networking/ip-sysctl.txt; the JSON of `ip`:
output of iproute2 6.1.
"""

import dataclasses
import functools
import ipaddress
import re
from collections.abc import Sequence
from typing import Any

from mjax import checked_json
from mjax.health import several
from mjax.health.check import check
from mjax.health.checks import sysfs
from mjax.health.findings import UnreadableError, Verdict, failed, judge_each, ok
from mjax.health.settings import Settings
from mjax.health.several import Called, Several
from mjax.health.sources import Command, Files

_ADDRESSES = Command(("ip", "-j", "addr"))
_ROUTES = Command(("ip", "-4", "-j", "route", "show", "table", "all"))
_RULES = Command(("ip", "-4", "-j", "rule"))
_CONF = "/proc/sys/net/ipv4/conf"
_SYSCTLS = ("rp_filter", "arp_ignore", "arp_announce")
_POLICY = Several((_ADDRESSES, _ROUTES, _RULES))
_FILTERS = Called(_CONF, Files(tuple(f"{_CONF}/*/{name}" for name in _SYSCTLS)))
_ARP = Several((_ADDRESSES, _FILTERS))
_MODE = re.compile(r"[0-9]{1,3}")
_STRICT = 1
"""Value of rp_filter that drops packets whose reply would leave through another
interface."""
_PLAIN_RULE = {"priority", "src", "srclen", "table", "protocol"}
_HOST_BITS = 32

Object = dict[str, Any]
_SHOWN_CHARS = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
    """An IPv4 or IPv6 address of an interface."""

    interface: str
    network: ipaddress.IPv4Interface | ipaddress.IPv6Interface
    has_failed: bool
    """Whether another host has the same address."""

    @property
    def text(self) -> str:
        """The address alone."""
        return str(self.network.ip)


@functools.lru_cache(8)
def objects(text: str) -> Sequence[Object]:
    """Return the objects printed by `ip -j`.

    Raises:
      UnreadableError: it is not a list of objects.
    """
    try:
        found: list[Object] = checked_json.read(text, list[dict[str, Any]])
    except ValueError as error:
        raise UnreadableError(f"ip: {error}") from error
    # With a filter, iproute2 prints {} for each object that it leaves out.
    return [each for each in found if each]


def _field(each: Object, name: str, kind: Any) -> Any:
    try:
        return checked_json.check(each.get(name), kind, name)
    except ValueError as error:
        raise UnreadableError(f"ip: {error}") from error


def addresses(text: str) -> list[Address]:
    """Return the addresses that other hosts can use, of interfaces that are up.

    Raises:
      UnreadableError: the text is not the output of `ip -j addr`, or has no address.
    """
    found = []
    for link in objects(text):
        name, flags = _field(link, "ifname", str), _field(link, "flags", list[str])
        if "UP" not in flags or "LOOPBACK" in flags:
            continue
        for each in _field(link, "addr_info", list[dict[str, Any]]):
            if each and _field(each, "scope", str) == "global":
                found.append(_address(name, each))
    if not found:
        raise UnreadableError("no interface has an address")
    return found


def _address(name: str, each: Object) -> Address:
    text = f"{_field(each, 'local', str)}/{_field(each, 'prefixlen', int)}"
    try:
        network = ipaddress.ip_interface(text)
    except ValueError as error:
        raise UnreadableError(f"ip: {name}: {error}") from error
    has_failed = _field(each, "dadfailed", bool | None) or False
    return Address(interface=name, network=network, has_failed=has_failed)


def sharing(found: Sequence[Address]) -> list[Address]:
    """Return the IPv4 addresses whose subnet another interface shares."""
    v4: list[tuple[Address, ipaddress.IPv4Network]] = []
    holders: dict[ipaddress.IPv4Network, set[str]] = {}
    for each in found:
        network = each.network.network
        is_v4 = isinstance(network, ipaddress.IPv4Network)
        if is_v4 and network.prefixlen < network.max_prefixlen:
            v4.append((each, network))
            holders.setdefault(network, set()).add(each.interface)
    shared: set[ipaddress.IPv4Network] = set()
    for network, names in holders.items():
        for length in range(network.prefixlen + 1):
            around = network.supernet(new_prefix=length)
            if len(names | holders.get(around, set())) > 1:
                shared |= {network, around}
    return [each for each, network in v4 if network in shared]


@check(
    "routes.default",
    source=_ROUTES,
    action="Compare the configuration of the network with a healthy host's.",
)
def default(text: str, settings: Settings) -> Verdict:
    """There is one default route, or metrics decide which one is used."""
    del settings
    found = [
        (_field(route, "metric", int | None) or 0, _field(route, "dev", str | None))
        for route in objects(text)
        if _field(route, "dst", str) == "default" and _table(route) == "main"
    ]
    if not found:
        return failed("there is no default route")
    best = min(metric for metric, _ in found)
    used = [dev or "several" for metric, dev in found if metric == best]
    if len(used) > 1:
        return failed(f"{' and '.join(used)} have default routes of metric {best}")
    return ok(used[0])


@check(
    "routes.link_down",
    source=_ROUTES,
    action="Check the interface (`ip link`) and its cable.",
)
def link_down(text: str, settings: Settings) -> Verdict:
    """No route goes through a link that is down."""
    del settings
    routes = objects(text)
    if not routes:
        raise UnreadableError("there is no route")
    problems = []
    for route in routes:
        hops = _field(route, "nexthops", list[dict[str, Any]] | None) or []
        for hop in (route, *hops):
            flags = _field(hop, "flags", list[str] | None) or []
            bad = [flag for flag in flags if flag in ("dead", "linkdown")]
            if bad:
                name = _field(hop, "dev", str | None) or "?"
                problems.append((name, f"{_field(route, 'dst', str)} is {bad[0]}"))
    return judge_each(problems, f"{len(routes)} routes")


@check(
    "routes.duplicates",
    source=_ADDRESSES,
    action="Give one of the interfaces another address.",
)
def duplicates(text: str, settings: Settings) -> Verdict:
    """No address is used twice."""
    del settings
    found = addresses(text)
    problems = [
        (a.interface, f"another host uses {a.text}") for a in found if a.has_failed
    ]
    first: dict[str, str] = {}
    for each in found:
        holder = first.setdefault(each.text, each.interface)
        if holder != each.interface:
            problems.append((each.interface, f"{holder} has {each.text} too"))
    return judge_each(problems, f"{len(found)} addresses")


@check(
    "routes.asymmetric",
    source=_POLICY,
    action="Give each address a rule and a table (`ip rule add from ...`).",
    for_training=True,
)
def asymmetric(text: str, settings: Settings) -> Verdict:
    """Interfaces that share a subnet reply on the addressed interface."""
    del settings
    shown, routes_text, rules_text = map(several.present, several.parts(text, 3))
    routes, rules = objects(routes_text), objects(rules_text)
    main = [r for r in rules if _field(r, "table", str | None) == "main"]
    if not main:
        raise UnreadableError("no rule refers to the table main")
    before = min(_field(rule, "priority", int) for rule in main)
    found = sharing(addresses(shown))
    problems = []
    for each in found:
        table = _own_table(each, rules, before)
        if table is None:
            problems.append((each.interface, f"no rule for packets from {each.text}"))
            continue
        devices = {_field(r, "dev", str | None) for r in routes if _table(r) == table}
        if devices != {each.interface}:
            through = ", ".join(sorted(map(str, devices))) or "nothing"
            problems.append((each.interface, f"table {table} leads through {through}"))
    return judge_each(problems, f"{len(found)} addresses share a subnet")


def _own_table(each: Address, rules: Sequence[Object], before: int) -> str | None:
    """Return the table for packets from an address; None if no rule selects one.

    Args:
      each: the address.
      rules: rules of `ip rule`.
      before: priority of the rule for the table main; only rules with a smaller number
        count, because they are tried first.
    """
    for rule in rules:
        is_own = (
            rule.keys() <= _PLAIN_RULE
            and _field(rule, "src", str) == each.text
            and _field(rule, "srclen", int | None) in (None, _HOST_BITS)
            and _field(rule, "priority", int) < before
        )
        if is_own:
            return _field(rule, "table", str)
    return None


@check(
    "routes.arp",
    source=_ARP,
    action="Set net.ipv4.conf.all.arp_ignore=1 and arp_announce=2.",
    for_training=True,
)
def arp(text: str, settings: Settings) -> Verdict:
    """Interfaces that share a subnet answer ARP only for their own address."""
    found, files = _arp_parts(text)
    limits = {
        name: settings.limit("routes.arp", name)
        for name in ("arp_ignore", "arp_announce")
    }
    problems = []
    for interface in found:
        for name, modes in limits.items():
            mode = _mode(files, interface, name)
            if mode not in modes:
                wanted = " or ".join(map(str, modes))
                problems.append((interface, f"{name} is {mode}, not {wanted}"))
    return judge_each(problems, f"{len(found)} interfaces share a subnet")


@check(
    "routes.rp_filter",
    source=_ARP,
    action="Set net.ipv4.conf.all.rp_filter=2.",
    for_training=True,
)
def rp_filter(text: str, settings: Settings) -> Verdict:
    """Interfaces that share a subnet do not use strict rp_filter."""
    del settings
    found, files = _arp_parts(text)
    modes = {interface: _mode(files, interface, "rp_filter") for interface in found}
    problems = [
        (interface, f"rp_filter is {mode} (strict)")
        for interface, mode in modes.items()
        if mode == _STRICT
    ]
    return judge_each(problems, f"{len(found)} interfaces share a subnet")


def _arp_parts(text: str) -> tuple[Sequence[str], sysfs.Tree]:
    shown, sysctls = map(several.present, several.parts(text, 2))
    names = dict.fromkeys(each.interface for each in sharing(addresses(shown)))
    return [*names], sysfs.tree(sysctls)


def _mode(files: sysfs.Tree, interface: str, name: str) -> int:
    """Return a sysctl of an interface.

    The kernel uses the larger of the values for the interface and for "all".
    """
    found = []
    for folder in ("all", interface):
        text = files.read(f"{_CONF}/{folder}/{name}")
        if not _MODE.fullmatch(text):
            raise UnreadableError(f"{_CONF}/{folder}/{name}: {text[:_SHOWN_CHARS]!r}")
        found.append(int(text))
    return max(found)


def _table(route: Object) -> str:
    return _field(route, "table", str | None) or "main"


CHECKS = (
    default,
    link_down,
    duplicates,
    asymmetric,
    arp,
    rp_filter,
)
