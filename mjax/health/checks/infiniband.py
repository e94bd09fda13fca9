"""Checks of InfiniBand and RoCE ports: present, active, fast and identical.

The checks cover the ports of the devices in the expectation `hcas`, or all ports
without it; see `ports`. Without `hcas`, an unplugged port fails the host: an unused
port cannot be distinguished from a dead one.

Sources: see `ports`; for the rule that all devices must be active, with one rate and
firmware: imbue-ai/cluster-health, health_checks/config.json (`infiniband_status`,
`ib_hcas`, `infiniband_error`) at https://github.com/imbue-ai/cluster-health; for
damaged cables, which run with fewer lanes or slower:
https://docs.nvidia.com/dgx-superpod/design-guide-cabling-data-centers/latest/widths-rates.html
"""

import collections
import re
from collections.abc import Mapping

from mjax.health.check import check
from mjax.health.checks import ports, sysfs
from mjax.health.checks.ports import ROOT, Port
from mjax.health.findings import (
    UnreadableError,
    Verdict,
    failed,
    judge_each,
    ok,
    unknown,
)
from mjax.health.settings import Settings
from mjax.health.several import Called
from mjax.health.sources import Files

_OF_DEVICE = ("fw_ver", "board_id")
_OF_PORT = ("state", "phys_state", "rate", "link_layer", "lid", "sm_lid")
_SOURCE = Called(
    ROOT,
    Files(
        (
            *(f"{ROOT}/*/{name}" for name in _OF_DEVICE),
            *(f"{ROOT}/*/ports/*/{name}" for name in _OF_PORT),
        )
    ),
)
_VERBS = Called(
    "/sys/class/infiniband_verbs",
    Files(
        (f"{ROOT}/*/node_type", "/sys/class/infiniband_verbs/uverbs*/ibdev"),
    ),
)
_LID = re.compile(r"0x[0-9a-f]{1,8}")
_NO_LIDS = (0, 0xFFFF)
"""LIDs that mean "not assigned": 0 until a subnet manager assigns one; 0xffff is the
permissive LID."""
_SHOWN_CHARS = 60


_CABLE = "Reseat and clean the transceiver, then replace the cable."


@check(
    "infiniband.devices",
    source=_SOURCE,
    action="Look for the device in `lspci`; power-cycle, then reseat the card.",
)
def devices(text: str, settings: Settings) -> Verdict:
    """Every device in `hcas` is present and active."""
    wanted = settings.expect.get("hcas")
    found = ports.all_ports(sysfs.tree(text))
    names = dict.fromkeys(port.device for port in found)
    if wanted is None:
        return unknown(f"{', '.join(names)}; hcas is not in the expectations")
    active = {port.device for port in found if _is_active(port)}
    problems = []
    for name in map(str, wanted):
        if name not in names:
            problems.append((name, "there is no such device"))
        elif name not in active:
            problems.append((name, "it has no active port"))
    return judge_each(problems, f"{len(active)} active", f"{len(wanted)} expected")


@check("infiniband.ports", source=_SOURCE, action=_CABLE)
def count(text: str, settings: Settings) -> Verdict:
    """As many ports are active as expected."""
    found = ports.ports(sysfs.tree(text), settings)
    states = {port.name: port.known("state", ports.STATES) for port in found}
    idle = [f"{name} ({s})" for name, s in states.items() if s != ports.ACTIVE]
    num = len(states) - len(idle)
    wanted = settings.expect.get("ports")
    if wanted is None:
        return unknown(f"{num} are active; ports is not in the expectations")
    if num != wanted:
        others = f"; not active: {', '.join(idle)}" if idle else ""
        return failed(f"{num} ports are active, not {wanted}{others}", num, wanted)
    return ok(num, wanted)


@check(
    "infiniband.state",
    source=_SOURCE,
    action="If there is no port, load the driver (mlx5_ib); if it is INIT, check "
    f"the subnet manager. {_CABLE}",
    device="rdma",
)
def state(text: str, settings: Settings) -> Verdict:
    """Every port is active."""
    found = ports.ports(sysfs.tree(text), settings)
    problems = []
    for port in found:
        word = port.known("state", ports.STATES)
        if word != ports.ACTIVE:
            problems.append((port.name, f"is {word}"))
    return judge_each(problems, f"{len(found)} ports", ports.ACTIVE)


@check("infiniband.physical_state", source=_SOURCE, action=_CABLE)
def physical_state(text: str, settings: Settings) -> Verdict:
    """Every port has a link."""
    found = ports.ports(sysfs.tree(text), settings)
    problems = []
    for port in found:
        word = port.known("phys_state", ports.PHYSICAL_STATES)
        if word != ports.LINK_UP:
            problems.append((port.name, f"is {word}"))
    return judge_each(problems, f"{len(found)} ports", ports.LINK_UP)


@check("infiniband.rate", source=_SOURCE, action=_CABLE)
def rate(text: str, settings: Settings) -> Verdict:
    """Every active port has the expected rate."""
    rates = [(port.name, port.rate.gbps) for port in _active(text, settings)]
    worst = min(gbps for _, gbps in rates)
    wanted = settings.expect.get("port_rate_gbps")
    if wanted is None:
        return unknown(f"{worst:g} Gb/s; port_rate_gbps is not in the expectations")
    problems = [(n, f"{g:g} Gb/s, not {wanted:g}") for n, g in rates if g != wanted]
    return judge_each(problems, f"{worst:g} Gb/s", f"{wanted:g} Gb/s")


@check("infiniband.same_rate", source=_SOURCE, action=_CABLE)
def same_rate(text: str, settings: Settings) -> Verdict:
    """Active ports of one link layer have the same rate."""
    found = _active(text, settings)
    fastest: dict[str, float] = {}
    for port in found:
        gbps = port.rate.gbps
        fastest[port.layer] = max(gbps, fastest.get(port.layer, gbps))
    problems = []
    for port in found:
        gbps, best = port.rate.gbps, fastest[port.layer]
        if gbps < best:
            problems.append((port.name, f"{gbps:g} Gb/s, others have {best:g}"))
    worst = min(port.rate.gbps for port in found)
    return judge_each(problems, f"{worst:g} Gb/s")


@check("infiniband.width", source=_SOURCE, action=_CABLE)
def width(text: str, settings: Settings) -> Verdict:
    """Every active InfiniBand port uses all lanes of its cable."""
    least = settings.limit("infiniband.width", "min_lanes")
    active = _active(text, settings)
    lanes = [(p.name, p.rate.lanes) for p in active if p.layer == ports.INFINIBAND]
    if not lanes:
        raise UnreadableError("no active port is InfiniBand")
    problems = [(name, f"{num} of {least} lanes") for name, num in lanes if num < least]
    worst = min(num for _, num in lanes)
    return judge_each(problems, f"{worst} lanes", f"at least {least}")


@check(
    "infiniband.link_layer",
    source=_SOURCE,
    action="Set LINK_TYPE with `mlxconfig` and power-cycle the host.",
)
def link_layer(text: str, settings: Settings) -> Verdict:
    """Ports are InfiniBand or Ethernet, as expected."""
    found = ports.ports(sysfs.tree(text), settings)
    layers = {port.name: port.layer for port in found}
    wanted = settings.expect.get("link_layer")
    if wanted is None:
        shown = ", ".join(f"{name}: {layer}" for name, layer in layers.items())
        return unknown(f"{shown}; link_layer is not in the expectations")
    problems = [(n, f"is {x}, not {wanted}") for n, x in layers.items() if x != wanted]
    return judge_each(problems, f"{len(layers)} ports", wanted)


@check(
    "infiniband.firmware",
    source=_SOURCE,
    action="Burn the expected firmware with `flint`; power-cycle the host.",
)
def firmware(text: str, settings: Settings) -> Verdict:
    """Every device has the expected firmware."""
    return _as_expected(text, settings, "fw_ver", "infiniband_firmware")


@check(
    "infiniband.board",
    source=_SOURCE,
    action="Compare the card with the order; replace it.",
)
def board(text: str, settings: Settings) -> Verdict:
    """Every device is the expected board."""
    return _as_expected(text, settings, "board_id", "infiniband_board")


@check(
    "infiniband.same_firmware",
    source=_SOURCE,
    action="Burn the expected firmware with `flint`; power-cycle the host.",
)
def same_firmware(text: str, settings: Settings) -> Verdict:
    """Devices of one board have the same firmware."""
    versions, boards = _of_devices(text, settings), _boards(text, settings)
    kinds: dict[str, list[str]] = {}
    for name, kind in boards.items():
        kinds.setdefault(kind, []).append(name)
    alike = [names for names in kinds.values() if len(names) >= 2]
    if not alike:
        return unknown("no two devices are the same board: nothing to compare")
    problems = []
    for names in alike:
        common, _ = collections.Counter(versions[n] for n in names).most_common()[0]
        for name in names:
            if versions[name] != common:
                problems.append((name, f"{versions[name]}, others have {common}"))
    return judge_each(problems, ", ".join(dict.fromkeys(versions.values())))


@check(
    "infiniband.subnet_manager",
    source=_SOURCE,
    action="Check the subnet manager (UFM or opensm) and its log.",
)
def subnet_manager(text: str, settings: Settings) -> Verdict:
    """Every InfiniBand port with a link has a LID and a subnet manager."""
    found = ports.of_layer(sysfs.tree(text), settings, ports.INFINIBAND)
    words = ports.PHYSICAL_STATES
    linked = [p for p in found if p.known("phys_state", words) == ports.LINK_UP]
    if not linked:
        raise UnreadableError("no InfiniBand port has a link")
    problems = []
    for port in linked:
        for file, what in (("lid", "no LID"), ("sm_lid", "no subnet manager")):
            if _lid(port, file) in _NO_LIDS:
                problems.append((port.name, what))
    return judge_each(problems, f"{len(linked)} ports")


@check(
    "infiniband.verbs",
    source=_VERBS,
    action="Load ib_uverbs (`modprobe ib_uverbs`); look at dmesg.",
)
def verbs(text: str, settings: Settings) -> Verdict:
    """User programs can open every device."""
    files = sysfs.tree(text)
    opened = {value for path, value in files.values.items() if path.endswith("/ibdev")}
    names = ports.devices(files, settings)
    problems = [(name, "it has no uverbs device") for name in names]
    problems = [problem for problem in problems if problem[0] not in opened]
    return judge_each(problems, f"{len(names)} devices")


def _is_active(port: Port) -> bool:
    return port.known("state", ports.STATES) == ports.ACTIVE


def _active(text: str, settings: Settings) -> list[Port]:
    found = ports.ports(sysfs.tree(text), settings)
    active = [port for port in found if _is_active(port)]
    if not active:
        raise UnreadableError("no port is active")
    return active


def _lid(port: Port, name: str) -> int:
    text = port.read(name)
    if not _LID.fullmatch(text):
        raise UnreadableError(f"{port.path(name)}: {text[:_SHOWN_CHARS]!r}")
    return int(text, base=16)


def _read_of(text: str, settings: Settings, name: str) -> dict[str, str]:
    files = sysfs.tree(text)
    names = ports.devices(files, settings)
    found = {device: files.read(f"{ROOT}/{device}/{name}") for device in names}
    for device, value in found.items():
        if not value.strip():
            raise UnreadableError(f"{ROOT}/{device}/{name} is empty")
    return found


def _of_devices(text: str, settings: Settings) -> Mapping[str, str]:
    return _read_of(text, settings, "fw_ver")


def _boards(text: str, settings: Settings) -> Mapping[str, str]:
    return _read_of(text, settings, "board_id")


def _as_expected(text: str, settings: Settings, name: str, key: str) -> Verdict:
    found = _read_of(text, settings, name)
    wanted = settings.expect.get("versions", {}).get(key)
    shown = ", ".join(dict.fromkeys(found.values()))
    if wanted is None:
        return unknown(f"{shown}; versions.{key} is not in the expectations")
    problems = [(d, f"{v}, not {wanted}") for d, v in found.items() if v != str(wanted)]
    return judge_each(problems, shown, wanted)


CHECKS = (
    devices,
    count,
    state,
    physical_state,
    rate,
    same_rate,
    width,
    link_layer,
    firmware,
    same_firmware,
    board,
    subnet_manager,
    verbs,
)
