"""Checks of priority flow control (PFC) on RoCE ports: on, rarely used, without loss.

A switch with full buffers sends pause packets to the ports that fill them, and an
adapter with full buffers sends them to its switch. A few pauses are normal. A port that
is often paused is connected to a congested switch. A port that often pauses its switch
has a slow PCIe link, a slow NUMA node or a stuck process behind it, and slows down the
hosts that send to it. Only mlx5 adapters are read, through the interfaces of their RDMA
devices (those in the expectation `hcas`, or all). InfiniBand has flow control of its
own.

The counters begin when the driver is loaded, which is assumed to be at boot:
after a reload of the driver the shares of paused time are too small until the host
restarts.

Source of the names and their meaning, and of the fact that the pause counters of a
priority exist only if PFC is on for it:
Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst and
drivers/net/ethernet/mellanox/mlx5/core/en_stats.c at https://github.com/torvalds/linux;
of the format: ethtool(8).
"""

import functools
import re
from collections.abc import Mapping

from mjax.health import several
from mjax.health.check import check
from mjax.health.checks import sysfs
from mjax.health.checks.ports import ETHERNET, ROOT
from mjax.health.findings import (
    KEPT_TEXTS,
    UnreadableError,
    Verdict,
    judge_each,
    quoted,
    unknown,
)
from mjax.health.settings import Settings
from mjax.health.several import Several
from mjax.health.small_files import Each, outputs
from mjax.health.sources import Files

_NET = f"{ROOT}/*/device/net"
_SOURCE = Several(
    (
        Each(("ethtool", "-S"), f"{_NET}/*", folder=""),
        Files((f"{_NET}/*/type", sysfs.UPTIME)),
    )
)
_TITLE = "NIC statistics:"
_COUNTER = re.compile(r" +(\S(?:.{0,78}\S)?) ?: ([0-9]{1,20})")
_TYPE_PATH = re.compile(rf"{ROOT}/([^/]+)/device/net/([^/]+)/type")
_ARPHRD_ETHER = "1"
"""include/uapi/linux/if_arp.h"""
_PACKETS = "rx_packets_phy"
_DURATION = re.compile(r"(rx|tx)_(prio[0-7]|global)_pause_duration")
_STORMS = "tx_pause_storm_error_events"
_US_PER_HOUR = 3600e6
_PER_MILLION = 1_000_000
_PERCENT = 100

Counters = Mapping[str, int]


_RECEIVER = (
    "Check the PCIe link of the adapter and its NUMA node, and look for stuck "
    "processes; compare with the other hosts of the rack."
)


@functools.lru_cache(KEPT_TEXTS)
def _all_counters(text: str) -> Mapping[str, Counters]:
    """Return the counters of each interface, by name, from the output of ethtool."""
    found = {}
    for path, output in outputs(text):
        name, lines = path.removeprefix("/"), output.splitlines()
        if not lines or lines[0] != _TITLE or len(lines) == 1:
            raise UnreadableError(f"{name}: expected statistics, got {quoted(output)}")
        matches = [_COUNTER.fullmatch(line) for line in lines[1:]]
        counters = {m[1]: int(m[2]) for m in matches if m is not None}
        if len(counters) != len(lines) - 1:
            raise UnreadableError(f"{name}: a line is not a counter, or is repeated")
        found[name] = counters
    return found


def _interfaces(text: str, settings: Settings) -> tuple[Mapping[str, Counters], float]:
    """Return the counters of each RoCE interface, by name, and the hours since boot.

    Raises:
      UnreadableError: there is no RoCE interface, one is not of mlx5, or an RDMA device
        has no interface.
    """
    statistics, small = map(several.present, several.parts(text, 2))
    files, counters = sysfs.tree(small), _all_counters(statistics)
    matches = [m for path in files.paths if (m := _TYPE_PATH.fullmatch(path))]
    owners = {m[2]: m[1] for m in matches if files.read(m[0]) == _ARPHRD_ETHER}
    wanted = settings.expect.get("hcas")
    if wanted is not None:
        owners = {name: hca for name, hca in owners.items() if hca in wanted}
        missing = sorted(set(map(str, wanted)) - set(owners.values()))
        if missing and settings.expect.get("link_layer") == ETHERNET:
            raise UnreadableError(f"{', '.join(missing)}: no Ethernet interface")
    if not owners:
        raise UnreadableError("no RDMA device has an Ethernet interface")
    for name in owners:
        if _PACKETS not in counters.get(name, {}):
            raise UnreadableError(f"{name}: it has no {_PACKETS}: not a port of mlx5")
    return {name: counters[name] for name in owners}, sysfs.hours_up(files)


@check(
    "pfc.enabled",
    source=_SOURCE,
    action="`mlnx_qos -i INTERFACE --pfc 0,0,0,1,0,0,0,0` for priority 3.",
)
def enabled(text: str, settings: Settings) -> Verdict:
    """Flow control is on for the priority of RoCE."""
    found, _ = _interfaces(text, settings)
    priority = settings.expect.get("roce_priority")
    if priority is None:
        shown = ", ".join(f"{n}: {' '.join(_paused(c))}" for n, c in found.items())
        return unknown(f"{shown}; roce_priority is not in the expectations")
    problems = [
        (name, f"flow control is on for {' '.join(_paused(counters))}")
        for name, counters in found.items()
        if f"prio{priority}" not in _paused(counters)
    ]
    return judge_each(problems, f"{len(found)} interfaces", f"priority {priority}")


def _paused(counters: Counters) -> list[str]:
    """Return the priorities with flow control (prio3, global, ...), or ["nothing"]."""
    matches = [m for name in counters if (m := _DURATION.fullmatch(name))]
    return [*dict.fromkeys(match[2] for match in matches)] or ["nothing"]


@check(
    "pfc.received",
    source=_SOURCE,
    action="Look for a slow receiver behind the same switches, and at their ECN.",
)
def received(text: str, settings: Settings) -> Verdict:
    """The switch rarely pauses a RoCE port."""
    return _share(text, settings, "pfc.received", "rx")


@check("pfc.sent", source=_SOURCE, action=_RECEIVER)
def sent(text: str, settings: Settings) -> Verdict:
    """A RoCE port rarely pauses its switch."""
    return _share(text, settings, "pfc.sent", "tx")


def _share(text: str, settings: Settings, check: str, direction: str) -> Verdict:
    """Compare the pause time of each priority with the time since boot."""
    found, hours = _interfaces(text, settings)
    most = settings.limit(check, "max_percent")
    problems, shares = [], []
    for name, counters in found.items():
        for counter, value in counters.items():
            match = _DURATION.fullmatch(counter)
            if match is None or match[1] != direction:
                continue
            percent = _PERCENT * value / max(1.0, _US_PER_HOUR * hours)
            shares.append(percent)
            if percent > most:
                problems.append((name, f"{match[2]} {percent:.3g}% of {hours:.1f} h"))
    if not shares:
        return unknown("no interface has flow control, so none counts pauses")
    return judge_each(problems, f"{max(shares):.3g}%", f"at most {most:g}%")


@check("pfc.storms", source=_SOURCE, action=_RECEIVER)
def storms(text: str, settings: Settings) -> Verdict:
    """No adapter paused its switch until its firmware stopped the pauses."""
    found, hours = _interfaces(text, settings)
    most = sysfs.allowed(settings, "pfc.storms", hours)
    if any(_STORMS not in counters for counters in found.values()):
        names = [name for name, counters in found.items() if _STORMS not in counters]
        return unknown(f"{', '.join(names)}: the adapter has no {_STORMS}")
    problems = [
        (name, f"{counters[_STORMS]} storms of pauses in {hours:.1f} h")
        for name, counters in found.items()
        if counters[_STORMS] > most
    ]
    worst = max(counters[_STORMS] for counters in found.values())
    return judge_each(problems, worst, f"at most {most:.4g}")


@check(
    "pfc.discards",
    source=_SOURCE,
    action=f"Check that PFC is on at both ends. {_RECEIVER}",
)
def discards(text: str, settings: Settings) -> Verdict:
    """Hardly any packet is dropped because the adapter has no buffer left."""
    found, _ = _interfaces(text, settings)
    most = settings.limit("pfc.discards", "max_per_million")
    problems, worst = [], 0.0
    for name, counters in found.items():
        if "rx_discards_phy" not in counters:
            raise UnreadableError(f"{name}: it has no rx_discards_phy")
        lost, packets = counters["rx_discards_phy"], counters[_PACKETS]
        ratio = _PER_MILLION * lost / max(1, packets + lost)
        worst = max(worst, ratio)
        if ratio > most:
            problems.append((name, f"{lost} lost, {packets} received"))
    return judge_each(problems, f"{worst:.3g} per million", f"at most {most:g}")


CHECKS = (
    enabled,
    received,
    sent,
    storms,
    discards,
)
