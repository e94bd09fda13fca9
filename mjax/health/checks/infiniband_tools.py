"""Checks of the InfiniBand tools' output: `ibstat`, `ibv_devinfo`, `perfquery -x`.

/sys has the same information (see `infiniband`, `port_counters`); these tools use the
libraries of a run, and query the performance agent of the port.

Source of the formats: infiniband-diags/ibstat.c (`ca_dump`, `port_dump`),
libibverbs/examples/devinfo.c (`print_hca_cap`), libibmad/fields.c and dump.c
(`mad_dump_perfcounters_ext`), all at https://github.com/linux-rdma/rdma-core
"""

import functools
import re
from collections.abc import Mapping, Sequence

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
from mjax.health.sources import Command

_IBSTAT = Command(("ibstat",))
_DEVINFO = Command(("ibv_devinfo",))
_PERFQUERY = Command(("perfquery", "-x"))
_CA = re.compile(r"[A-Za-z ]+ '([^']+)'")
_CA_PORT = re.compile(r"\tPort ([0-9]{1,4}):")
_CA_FIELD = re.compile(r"\t+([A-Za-z][A-Za-z ]*): (.*)")
_HCA = re.compile(r"hca_id:\s+(\S+)")
_HCA_PORT = re.compile(r"\s+port:\s+([0-9]{1,4})")
_HCA_FIELD = re.compile(r"\s+([a-z_]+):\s+(.*)")
_MTU = re.compile(r"(256|512|1024|2048|4096) \([1-5]\)")
_COUNTER = re.compile(r"([A-Za-z0-9]+):\.*(0x[0-9a-fA-F]{1,16}|[0-9]{1,20})")
_GBPS = re.compile(r"([0-9]{1,5}(?:\.5)?)(?: \(FDR10\))?")
_PER_MILLION = 1_000_000

Fields = Mapping[str, str]
_SHOWN_CHARS = 60


_CABLE = "Reseat and clean the transceiver, then replace the cable."


@functools.lru_cache(4)
def ibstat(text: str) -> Mapping[str, Fields]:
    """Return the fields of each port of `ibstat`, by `DEVICE port NUMBER`.

    Raises:
      UnreadableError: it is not the output of ibstat, or has no port.
    """
    return _cut(text, _CA, _CA_PORT, _CA_FIELD)


@functools.lru_cache(4)
def devinfo(text: str) -> Mapping[str, Fields]:
    """Return the fields of each port of `ibv_devinfo`, by `DEVICE port NUMBER`.

    Raises:
      UnreadableError: it is not the output of ibv_devinfo, or has no port.
    """
    return _cut(text, _HCA, _HCA_PORT, _HCA_FIELD)


def _cut(
    text: str, device: re.Pattern[str], port: re.Pattern[str], field: re.Pattern[str]
) -> Mapping[str, Fields]:
    """Return the fields of each port in a text, by `DEVICE port NUMBER`.

    Args:
      text: output of a tool.
      device: pattern of the line that begins a device; its group is the name.
      port: pattern of the line that begins a port; its group is the number.
      field: pattern of the line of a field; its groups are the name and the value.
    """
    found: dict[str, dict[str, str]] = {}
    name = key = ""
    for line in text.splitlines():
        if not line.strip():
            continue
        if is_new := device.fullmatch(line):
            name, key = is_new[1], ""
        elif name and (is_new := port.fullmatch(line)):
            key = f"{name} port {is_new[1]}"
            if key in found:
                raise UnreadableError(f"{key} appears twice")
            found[key] = {}
        elif name and (is_new := field.fullmatch(line)):
            if key and is_new[1] in found[key]:
                raise UnreadableError(f"{key} has two fields {is_new[1]}")
            if key:
                found[key][is_new[1]] = is_new[2].strip()
        else:
            raise UnreadableError(
                f"expected a device, port or field, got {line[:_SHOWN_CHARS]!r}"
            )
    if not found:
        raise UnreadableError("it has no port")
    return found


def _expected(ports: Mapping[str, Fields], settings: Settings) -> Mapping[str, Fields]:
    """Keep the ports of the devices in `hcas`, if that is in the expectations."""
    wanted = settings.expect.get("hcas")
    if wanted is None:
        return ports
    names = [name.partition(" ")[0] for name in ports]
    missing = [str(name) for name in wanted if str(name) not in names]
    if missing or not wanted:
        raise UnreadableError(f"hcas names {', '.join(missing) or 'no device'}")
    kept = dict(zip(ports, names, strict=True))
    return {p: fields for p, fields in ports.items() if kept[p] in map(str, wanted)}


def _of(ports: Mapping[str, Fields], port: str, name: str) -> str:
    if name not in ports[port]:
        raise UnreadableError(f"{port} has no {name!r}")
    return ports[port][name]


@check("ibstat.ports", source=_IBSTAT, action=_CABLE)
def active(text: str, settings: Settings) -> Verdict:
    """ibstat shows as many active ports as expected."""
    found = _expected(ibstat(text), settings)
    states = {
        p: (_of(found, p, "State"), _of(found, p, "Physical state")) for p in found
    }
    idle = [f"{p} ({s}, {x})" for p, (s, x) in states.items() if not _is_up(s, x)]
    num = len(states) - len(idle)
    wanted = settings.expect.get("ports")
    if wanted is None:
        return unknown(f"{num} are active; ports is not in the expectations")
    if num != wanted:
        others = f"; not active: {', '.join(idle)}" if idle else ""
        return failed(f"{num} ports are active, not {wanted}{others}", num, wanted)
    return ok(num, wanted)


def _is_up(state: str, physical: str) -> bool:
    return (state, physical) == ("Active", "LinkUp")


@check("ibstat.rate", source=_IBSTAT, action=_CABLE)
def rate(text: str, settings: Settings) -> Verdict:
    """ibstat shows the expected rate on every active port."""
    found = _expected(ibstat(text), settings)
    active_ports = [p for p in found if _of(found, p, "State") == "Active"]
    rates = {port: _gbps(_of(found, port, "Rate")) for port in active_ports}
    if not rates:
        raise UnreadableError("no port is active")
    worst = min(rates.values())
    wanted = settings.expect.get("port_rate_gbps")
    if wanted is None:
        return unknown(f"{worst:g} Gb/s; port_rate_gbps is not in the expectations")
    problems = [(p, f"{r:g} Gb/s, not {wanted:g}") for p, r in rates.items()]
    problems = [problem for problem in problems if rates[problem[0]] != wanted]
    return judge_each(problems, f"{worst:g} Gb/s", f"{wanted:g} Gb/s")


def _gbps(text: str) -> float:
    found = _GBPS.fullmatch(text)
    if found is None:
        raise UnreadableError(f"expected a rate, got {text[:_SHOWN_CHARS]!r}")
    return float(found[1])


@check(
    "verbs.mtu",
    source=_DEVINFO,
    action="InfiniBand: set the MTU of the partition; RoCE: that of the interface.",
)
def mtu(text: str, settings: Settings) -> Verdict:
    """Every active port uses its largest possible MTU."""
    found = _expected(devinfo(text), settings)
    used = [p for p in found if _of(found, p, "state") == "PORT_ACTIVE (4)"]
    if not used:
        raise UnreadableError("no port is active")
    sizes = {p: _mtu(found, p, "active_mtu") for p in used}
    problems = []
    for port, has in sizes.items():
        most = _mtu(found, port, "max_mtu")
        if has < most:
            problems.append((port, f"MTU {has} of {most}"))
    return judge_each(problems, f"{min(sizes.values())} bytes")


def _mtu(ports: Mapping[str, Fields], port: str, name: str) -> int:
    text = _of(ports, port, name)
    found = _MTU.fullmatch(text)
    if found is None:
        raise UnreadableError(f"{port}: {name} is {text[:_SHOWN_CHARS]!r}")
    return int(found[1])


@functools.lru_cache(4)
def perfquery(text: str) -> Mapping[str, int]:
    """Return the counters of `perfquery -x`, by name.

    Raises:
      UnreadableError: it is in another format.
    """
    head, *lines = text.splitlines() or [""]
    if not head.startswith("# Port extended counters: "):
        raise UnreadableError(
            f"expected extended counters, got {head[:_SHOWN_CHARS]!r}"
        )
    found: dict[str, int] = {}
    for line in lines:
        field = _COUNTER.fullmatch(line)
        if field is None or field[1] in found:
            raise UnreadableError(
                f"invalid or repeated counter: {line[:_SHOWN_CHARS]!r}"
            )
        found[field[1]] = int(field[2], base=0 if field[2].startswith("0x") else 10)
    return found


@check(
    "perfquery.received",
    source=_PERFQUERY,
    action=f"{_CABLE} Then reset the counters with `perfquery -R`.",
)
def received(text: str, settings: Settings) -> Verdict:
    """Few of the packets received by the first port had an error."""
    names = ["PortRcvErrors", "PortRcvRemotePhysicalErrors"]
    return _ratio(text, settings, "perfquery.received", names, "PortRcvPkts")


@check(
    "perfquery.sent",
    source=_PERFQUERY,
    action="If many hosts have it, suspect the fabric, otherwise this link.",
)
def sent(text: str, settings: Settings) -> Verdict:
    """Few packets of the first port were discarded before they were sent."""
    names = ["PortXmitDiscards", "PortXmitConstraintErrors"]
    return _ratio(text, settings, "perfquery.sent", names, "PortXmitPkts")


def _ratio(
    text: str, settings: Settings, check: str, names: Sequence[str], of: str
) -> Verdict:
    counters = perfquery(text)
    missing = [name for name in (*names, of) if name not in counters]
    if missing:
        raise UnreadableError(f"it has no {', '.join(missing)}")
    most = settings.limit(check, "max_per_million")
    bad, packets = sum(counters[name] for name in names), counters[of]
    rate_of_bad = _PER_MILLION * bad / max(1, packets)
    value, limit = f"{rate_of_bad:.3g} per million", f"at most {most:g}"
    if rate_of_bad > most:
        return failed(f"{bad} of {packets} packets: {', '.join(names)}", value, limit)
    return ok(value, limit)


CHECKS = (
    active,
    rate,
    mtu,
    received,
    sent,
)
