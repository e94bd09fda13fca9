"""Checks of the capabilities in `lspci`: ACS, payload, lost devices.

Needs root: without it, lspci shows "Capabilities: <access denied>", and the checks are
unknown.

ACS on PCI bridges sends traffic between devices through the root complex. Virtual
machines need ACS: leave the check out there.

Sources: for ACS: "PCI Access Control Services", NCCL user guide,
docs/userguide/source/troubleshooting at https://github.com/NVIDIA/nccl; for the layout:
pciutils, tests/cap-exp-lnkcap2,
https://gitverse.ru/githubmirror/pciutils/content/master/tests/cap-exp-lnkcap2
"""

import dataclasses
import functools
import re
from collections.abc import Sequence

from mjax.health.check import check
from mjax.health.findings import UnreadableError, Verdict, judge_each
from mjax.health.settings import Settings
from mjax.health.sources import Command

_SOURCE = Command(("lspci", "-D", "-vv", "-nn"))
_HEADER = re.compile(
    r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) .*?\[([0-9a-f]{4})\]: (.*)"
)
_BRIDGE, _NETWORK = "0604", "02"
_VIRTUAL = "Virtual Function"
"""Part of the title of a virtual function, whose size fields are 0: the sizes of the
physical function apply."""
_DENIED = "<access denied>"
_FLAG = re.compile(r"([A-Za-z]+)([+-])")
_REDIRECTS = ("SrcValid", "ReqRedir", "CmpltRedir")
"""ACS controls that prevent packets between two devices from taking the direct path."""
_CONTROL = re.compile(
    r"\s+(?:DevCtl:.*)?MaxPayload ([0-9]{2,4}) bytes, MaxReadReq ([0-9]{2,4}) bytes"
)
_LOST = ("(rev ff)", "Unknown header type 7f")
_SHOWN_CHARS = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """The output of lspci for a device."""

    address: str
    number: str
    """Class code, four hexadecimal digits."""
    title: str
    lines: Sequence[str]

    def is_readable(self) -> bool:
        """Return whether the capabilities are shown."""
        found = [line for line in self.lines if line.startswith("\tCapabilities: ")]
        return bool(found) and not any(_DENIED in line for line in found)


@functools.lru_cache(2)
def devices(text: str) -> Sequence[Device]:
    """Return the devices.

    Raises:
      UnreadableError: it is not the output of `lspci -D -vv -nn`, or has no device.
    """
    heads: list[re.Match[str]] = []
    bodies: list[list[str]] = []
    for line in text.splitlines():
        head = _HEADER.fullmatch(line)
        if head:
            heads.append(head)
            bodies.append([])
        elif heads and (not line.strip() or line.startswith("\t")):
            bodies[-1].append(line)
        else:
            raise UnreadableError(f"expected a device, got {line[:_SHOWN_CHARS]!r}")
    if not heads:
        raise UnreadableError("it has no device")
    return [
        Device(address=h[1], number=h[2], title=h[3], lines=lines)
        for h, lines in zip(heads, bodies, strict=True)
    ]


def _of_class(text: str, begin: str) -> list[Device]:
    """Return the devices of a class; all must show their capabilities."""
    found = [d for d in devices(text) if d.number.startswith(begin)]
    if not found:
        raise UnreadableError(f"no device has a class that begins with {begin}")
    hidden = [device.address for device in found if not device.is_readable()]
    if hidden:
        raise UnreadableError(f"no capabilities of {hidden[0]} are shown: run as root")
    return found


@check(
    "pcie.lost",
    source=_SOURCE,
    action="Power-cycle the host; reseat or replace the card.",
)
def lost(text: str, settings: Settings) -> Verdict:
    """Every PCI device responds."""
    del settings
    found = devices(text)
    problems = []
    for device in found:
        if any(
            word in line for line in (device.title, *device.lines) for word in _LOST
        ):
            problems.append((device.address, f"it does not answer: {device.title}"))
    return judge_each(problems, f"{len(found)} devices")


@check(
    "pcie.acs",
    source=_SOURCE,
    action="Turn off ACS (or VT-d) in the BIOS, or with setpci at each boot.",
    for_training=True,
)
def acs(text: str, settings: Settings) -> Verdict:
    """No bridge has ACS turned on."""
    del settings
    bridges = _of_class(text, _BRIDGE)
    problems = []
    for bridge in bridges:
        controls = [x for x in bridge.lines if x.lstrip().startswith("ACSCtl:")]
        capable = [x for x in bridge.lines if "Access Control Services" in x]
        if len(controls) != len(capable):
            raise UnreadableError(f"{bridge.address}: ACS without its ACSCtl")
        flags = dict(_FLAG.findall(" ".join(controls)))
        if controls and not flags.keys() >= {*_REDIRECTS}:
            raise UnreadableError(
                f"{bridge.address}: {controls[0].strip()[:_SHOWN_CHARS]!r}"
            )
        on = [name for name in _REDIRECTS if flags.get(name) == "+"]
        if on:
            problems.append((bridge.address, f"ACS is on: {', '.join(on)}"))
    return judge_each(problems, f"{len(bridges)} bridges")


@check(
    "pcie.payload",
    source=_SOURCE,
    action="Set the maximum payload in the BIOS; boot with pci=pcie_bus_perf.",
)
def payload(text: str, settings: Settings) -> Verdict:
    """The maximum PCIe payload of adapters is large enough."""
    least = settings.limit("pcie.payload", "min_bytes")
    return _control(text, 0, "MaxPayload", least)


@check(
    "pcie.read_request",
    source=_SOURCE,
    action="Set the maximum read request in the BIOS, or with setpci.",
)
def read_request(text: str, settings: Settings) -> Verdict:
    """The maximum PCIe read request of adapters is large enough."""
    least = settings.limit("pcie.read_request", "min_bytes")
    return _control(text, 1, "MaxReadReq", least)


def _control(text: str, group: int, what: str, least: int) -> Verdict:
    found = _of_class(text, _NETWORK)
    adapters = [each for each in found if _VIRTUAL not in each.title]
    if not adapters:
        raise UnreadableError("all adapters are virtual functions")
    sizes = {each.address: _sizes(each)[group] for each in adapters}
    problems = [
        (address, f"{what} is {size} bytes")
        for address, size in sizes.items()
        if size < least
    ]
    return judge_each(problems, f"{min(sizes.values())} bytes", f"at least {least}")


def _sizes(device: Device) -> tuple[int, int]:
    found = [m for line in device.lines if (m := _CONTROL.fullmatch(line))]
    if len(found) != 1:
        raise UnreadableError(f"{device.address} has {len(found)} MaxPayload lines")
    return int(found[0][1]), int(found[0][2])


CHECKS = (
    lost,
    acs,
    payload,
    read_request,
)
