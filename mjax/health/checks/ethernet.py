"""Checks of Ethernet interfaces: up, fast, without errors, without flaps.

The checks cover the interfaces in the expectation `interfaces`; without it, all
Ethernet devices (not bridges, tunnels or lo) that are set up (IFF_UP). InfiniBand has
its own checks. Limits of errors are relative to packets, and limits of carrier changes
to the time since boot (see `sysfs`), so that an old count does not fail a host forever.

Sources: Documentation/ABI/testing/sysfs-class-net, sysfs-class-net-statistics and
Documentation/networking/statistics.rst at https://github.com/torvalds/linux; link flaps
as a cause of failed runs: MegaScale (Jiang et al. 2024),
https://www.usenix.org/conference/nsdi24/presentation/jiang-ziheng
"""

import re
from collections.abc import Sequence

from mjax.health.check import check
from mjax.health.checks import sysfs
from mjax.health.checks.sysfs import Tree
from mjax.health.findings import UnreadableError, Verdict, judge_each, unknown
from mjax.health.settings import Settings
from mjax.health.several import Called
from mjax.health.sources import Files

_ROOT = "/sys/class/net"
_FILES = ("type", "flags", "operstate", "speed", "duplex", "mtu", "carrier_changes")
_SOURCE = Called(
    _ROOT,
    Files(
        (
            *(f"{_ROOT}/*/{name}" for name in _FILES),
            f"{_ROOT}/*/statistics/*",
            f"{_ROOT}/*/device/uevent",
            sysfs.UPTIME,
        )
    ),
)
_PATH = re.compile(rf"{_ROOT}/([^/]+)/(.+)")
_FLAGS = re.compile(r"0x[0-9a-f]{1,8}")
_IFF_UP = 0x1
"""include/uapi/linux/if.h"""
_ARPHRD_ETHER = "1"
"""include/uapi/linux/if_arp.h"""
_UP, _FULL = "up", "full"
_STATES = (_UP, "down", "notpresent", "lowerlayerdown", "testing", "dormant")
"""Values of operstate, without "unknown", which gives no information."""
_PER_MILLION = 1_000_000
_MBPS_PER_GBPS = 1000
_SHOWN_CHARS = 60


_CABLE = "Reseat and clean the transceiver, then replace the cable."


@check("ethernet.up", source=_SOURCE, action=f"{_CABLE} Check the switch port.")
def up(text: str, settings: Settings) -> Verdict:
    """Every interface has a link."""
    missing = _missing(sysfs.tree(text), settings)
    if missing:
        return judge_each((name, "there is no such interface") for name in missing)
    files, names = _interfaces(text, settings)
    problems = []
    for name in names:
        state = files.read(f"{_ROOT}/{name}/operstate")
        if state not in _STATES:
            raise UnreadableError(f"{name}: its operstate is {state[:_SHOWN_CHARS]!r}")
        if state != _UP:
            problems.append((name, f"is {state}"))
    return judge_each(problems, f"{len(names)} interfaces", _UP)


@check(
    "ethernet.speed",
    source=_SOURCE,
    action=f"{_CABLE} Check the speed limit of the switch port.",
)
def speed(text: str, settings: Settings) -> Verdict:
    """Every interface is at least as fast as expected."""
    files, names = _interfaces(text, settings)
    gbps = {name: _mbps(files, name) / _MBPS_PER_GBPS for name in names}
    worst, wanted = min(gbps.values()), settings.expect.get("ethernet_gbps")
    if wanted is None:
        return unknown(f"{worst:g} Gb/s; ethernet_gbps is not in the expectations")
    problems = [(n, f"{g:g} of {wanted:g} Gb/s") for n, g in gbps.items() if g < wanted]
    return judge_each(problems, f"{worst:g} Gb/s", f"at least {wanted:g} Gb/s")


@check(
    "ethernet.duplex", source=_SOURCE, action="Turn on autonegotiation at both ends."
)
def duplex(text: str, settings: Settings) -> Verdict:
    """Every interface is full duplex."""
    files, names = _interfaces(text, settings)
    problems = []
    for name in names:
        word = files.read(f"{_ROOT}/{name}/duplex")
        if word not in (_FULL, "half"):
            raise UnreadableError(f"{name}: its duplex is {word[:_SHOWN_CHARS]!r}")
        if word != _FULL:
            problems.append((name, f"is {word} duplex"))
    return judge_each(problems, f"{len(names)} interfaces", _FULL)


@check(
    "ethernet.mtu",
    source=_SOURCE,
    action="Set the MTU in the network configuration, on the switch too.",
)
def mtu(text: str, settings: Settings) -> Verdict:
    """Every interface has the expected MTU."""
    files, names = _interfaces(text, settings)
    found = {name: files.number(f"{_ROOT}/{name}/mtu") for name in names}
    wanted = settings.expect.get("mtu")
    if wanted is None:
        shown = ", ".join(f"{name}: {value}" for name, value in found.items())
        return unknown(f"{shown}; mtu is not in the expectations")
    problems = [(n, f"{v}, not {wanted}") for n, v in found.items() if v != wanted]
    return judge_each(problems, min(found.values()), wanted)


@check("ethernet.errors", source=_SOURCE, action=_CABLE)
def errors(text: str, settings: Settings) -> Verdict:
    """Few packets have errors."""
    return _ratio(text, settings, "ethernet.errors", ["rx_errors", "tx_errors"])


@check("ethernet.crc", source=_SOURCE, action=_CABLE)
def crc(text: str, settings: Settings) -> Verdict:
    """Hardly any packet arrives with a wrong checksum."""
    return _ratio(text, settings, "ethernet.crc", ["rx_crc_errors"])


@check(
    "ethernet.drops",
    source=_SOURCE,
    action="Check the ring sizes (`ethtool -g`), and look for a busy processor.",
)
def drops(text: str, settings: Settings) -> Verdict:
    """Few packets are dropped."""
    names = ["rx_dropped", "tx_dropped", "rx_missed_errors"]
    return _ratio(text, settings, "ethernet.drops", names)


@check(
    "ethernet.collisions",
    source=_SOURCE,
    action="Turn on autonegotiation at both ends.",
)
def collisions(text: str, settings: Settings) -> Verdict:
    """No packets collide."""
    return _ratio(text, settings, "ethernet.collisions", ["collisions"])


@check("ethernet.flaps", source=_SOURCE, action=f"{_CABLE} Check the switch port.")
def flaps(text: str, settings: Settings) -> Verdict:
    """The link does not flap."""
    files, names = _interfaces(text, settings)
    hours = sysfs.hours_up(files)
    most = sysfs.allowed(settings, "ethernet.flaps", hours)
    found = {name: files.number(f"{_ROOT}/{name}/carrier_changes") for name in names}
    problems = [
        (name, f"its carrier changed {value} times in {hours:.1f} h")
        for name, value in found.items()
        if value > most
    ]
    return judge_each(problems, max(found.values()), f"at most {most:.4g}")


def _interfaces(text: str, settings: Settings) -> tuple[Tree, Sequence[str]]:
    """Return the files, and the names of the interfaces that the checks cover.

    Raises:
      UnreadableError: there is no interface, or an expected one is missing.
    """
    files = sysfs.tree(text)
    missing = _missing(files, settings)
    if missing:
        raise UnreadableError(f"there is no {', '.join(missing)}, see interfaces")
    wanted = settings.expect.get("interfaces")
    if wanted is None:
        names = [name for name in _there(files) if _counts(files, name)]
    else:
        names = [str(name) for name in wanted]
    if not names:
        raise UnreadableError("no Ethernet device is set up, or interfaces is empty")
    return files, names


def _there(files: Tree) -> list[str]:
    matches = [m for path in files.paths if (m := _PATH.fullmatch(path))]
    return [*dict.fromkeys(match[1] for match in matches)]


def _missing(files: Tree, settings: Settings) -> list[str]:
    there = _there(files)
    wanted = map(str, settings.expect.get("interfaces", ()))
    return [name for name in wanted if name not in there]


def _counts(files: Tree, name: str) -> bool:
    """Return whether an interface is an Ethernet device that is set up."""
    if not files.has(f"{_ROOT}/{name}/device/uevent"):
        return False
    if files.read(f"{_ROOT}/{name}/type") != _ARPHRD_ETHER:
        return False
    flags = files.read(f"{_ROOT}/{name}/flags")
    if not _FLAGS.fullmatch(flags):
        raise UnreadableError(f"{name}: its flags are {flags[:_SHOWN_CHARS]!r}")
    return bool(int(flags, base=16) & _IFF_UP)


def _mbps(files: Tree, name: str) -> int:
    path = f"{_ROOT}/{name}/speed"
    if files.read(path) == "-1":
        raise UnreadableError(f"{name}: its speed is not known (a virtual machine?)")
    return files.number(path)


def _ratio(text: str, settings: Settings, check: str, names: Sequence[str]) -> Verdict:
    """Compare counters of every interface with its packets."""
    files, interfaces = _interfaces(text, settings)
    most = settings.limit(check, "max_per_million")
    problems, worst = [], 0.0
    for interface in interfaces:
        folder = f"{_ROOT}/{interface}/statistics"
        counts = {name: files.number(f"{folder}/{name}") for name in names}
        packets = sum(files.number(f"{folder}/{x}_packets") for x in ("rx", "tx"))
        ratio = _PER_MILLION * sum(counts.values()) / max(1, packets)
        worst = max(worst, ratio)
        if ratio > most:
            shown = ", ".join(f"{name} {value}" for name, value in counts.items())
            problems.append((interface, f"{shown} of {packets} packets"))
    return judge_each(problems, f"{worst:.3g} per million", f"at most {most:g}")


CHECKS = (
    up,
    speed,
    duplex,
    mtu,
    errors,
    crc,
    drops,
    collisions,
    flaps,
)
