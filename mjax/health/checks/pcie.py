"""Checks of PCI Express: width and speed of links, error counters, IOMMU.

The checks judge the upstream links of network adapters, NVMe disks and PCIe switches.
(GPUs lower the speed of an idle link on purpose; `gpu_pcie` judges them.) The folder of
a device in /sys/devices is inside the folder of the port above it, so the speed of a
link is compared with the maximum of both ends. Counting from the root port, every
second folder is an upstream port.

A slot may be narrower than its device by design: the addresses in the expectation
`pcie_allowed` are not judged.

Sources: the files of links: drivers/pci/pci-sysfs.c; AER counters, which begin at boot:
Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats; types of IOMMU groups:
Documentation/ABI/testing/sysfs-kernel-iommu_groups, all at
https://github.com/torvalds/linux; for failing a host with limited links of adapters:
health_checks.py at https://github.com/imbue-ai/cluster-health; for traffic between
devices that an IOMMU sends through the root complex: section ACS of the NCCL user
guide, docs/userguide/source/troubleshooting at https://github.com/NVIDIA/nccl
"""

import dataclasses
import re
from collections.abc import Sequence

from mjax.health.check import check
from mjax.health.checks import sysfs
from mjax.health.checks.sysfs import Tree
from mjax.health.findings import UnreadableError, Verdict, judge_each, ok
from mjax.health.settings import Settings
from mjax.health.several import Called
from mjax.health.sources import Files

_DEPTH = 8
"""Maximum depth of a PCIe device, the root port included: six below two switches."""
_FILES = (
    "class",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
    "physfn/class",
)
_LINKS = Called(
    "/sys/devices/pci*/**/*_link_*",
    Files(
        tuple(
            f"/sys/devices/pci*{'/*:*:*.*' * depth}/{name}"
            for depth in range(1, _DEPTH + 1)
            for name in _FILES
        )
    ),
)
_BUS = "/sys/bus/pci/devices"
_AER = Called(
    f"{_BUS}/*/aer_dev_*",
    Files(
        (
            *(
                f"{_BUS}/*/aer_dev_{kind}"
                for kind in ("correctable", "nonfatal", "fatal")
            ),
            f"{_BUS}/*/class",
            sysfs.UPTIME,
        )
    ),
)
_GROUPS = "/sys/kernel/iommu_groups"
_IOMMU = Called(
    _GROUPS,
    Files(
        (
            "/proc/cmdline",
            "/sys/kernel/uevent_seqnum",
            f"{_GROUPS}/*/type",
            f"{_GROUPS}/*/devices/*/class",
        )
    ),
)
_ADDRESS = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_FOLDER = re.compile(rf"(/sys/devices/pci[0-9a-f:]{{4,11}}(?:/{_ADDRESS})*)/.+")
_AER_PATH = re.compile(rf"{_BUS}/([^/]+)/aer_dev_(?:correctable|nonfatal|fatal)")
_GROUP_PATH = re.compile(rf"{_GROUPS}/([0-9]{{1,6}})/devices/([^/]+)/class")
_CLASS = re.compile(r"0x[0-9a-f]{6}")
_KINDS = {"0x02": "network", "0x0108": "NVMe", "0x0604": "switch"}
"""Maps the prefix of a class to a kind; include/linux/pci_ids.h."""
_NETWORK = "0x02"
_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9])?) GT/s(?: PCIe)?")
_WIDTHS = (1, 2, 4, 8, 12, 16, 32)
"""Widths in the specification; a device that has fallen off the bus shows 63."""
_COUNT = re.compile(r"([A-Za-z][A-Za-z0-9_ -]*) ([0-9]{1,20})")
_SHOWN_CHARS = 60


_SEAT = "Power-cycle the host; reseat the card or riser; replace it."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """A device and its link to the port above."""

    folder: str
    kind: str
    files: Tree

    @property
    def address(self) -> str:
        """Domain, bus, device and function."""
        return self.folder.rpartition("/")[2]

    @property
    def name(self) -> str:
        """Name for a person."""
        return f"{self.address} ({self.kind})"


def links(files: Tree, settings: Settings) -> list[Link]:
    """Return the links that are judged.

    Raises:
      UnreadableError: there is none.
    """
    allowed = {str(each) for each in settings.expect.get("pcie_allowed", ())}
    matches = [m for path in files.paths if (m := _FOLDER.fullmatch(path))]
    folders = [*dict.fromkeys(match[1] for match in matches)]
    above = {folder.rpartition("/")[0] for folder in folders}
    found = []
    for folder in folders:
        depth = len(re.findall(rf"/{_ADDRESS}", folder))
        kind = _kind(files, folder) if depth % 2 == 0 and depth else ""
        if kind == "switch" and folder not in above:
            continue  # A bridge without devices below it.
        is_virtual = files.has(f"{folder}/physfn/class")
        if kind and not is_virtual:
            found.append(Link(folder=folder, kind=kind, files=files))
    found = [link for link in found if link.address not in allowed]
    if not found:
        raise UnreadableError("no adapter, NVMe disk or switch has a PCIe link")
    return found


def _kind(files: Tree, folder: str) -> str:
    text = files.read(f"{folder}/class")
    if not _CLASS.fullmatch(text):
        raise UnreadableError(f"{folder}/class: {text[:_SHOWN_CHARS]!r}")
    found = [kind for begin, kind in _KINDS.items() if text.startswith(begin)]
    return found[0] if found else ""


@check("pcie.width", source=_LINKS, action=_SEAT)
def width(text: str, settings: Settings) -> Verdict:
    """Links of adapters, disks and switches use all lanes."""
    found = links(sysfs.tree(text), settings)
    problems = []
    for link in found:
        has = link.files.number(f"{link.folder}/current_link_width")
        most = link.files.number(f"{link.folder}/max_link_width")
        if has not in _WIDTHS or most not in _WIDTHS:
            problems.append((link.name, f"width {has} of {most}: it does not answer"))
        elif has < most:
            problems.append((link.name, f"x{has} of x{most}"))
    return judge_each(problems, f"{len(found)} links")


@check(
    "pcie.speed", source=_LINKS, action=f"{_SEAT} Check the link speed set in the BIOS."
)
def speed(text: str, settings: Settings) -> Verdict:
    """Links of adapters, disks and switches have full speed."""
    found = links(sysfs.tree(text), settings)
    problems = []
    for link in found:
        above = link.folder.rpartition("/")[0]
        has = _gts(link.files, f"{link.folder}/current_link_speed")
        ends = (f"{folder}/max_link_speed" for folder in (link.folder, above))
        most = min(_gts(link.files, path) for path in ends)
        if has < most:
            problems.append((link.name, f"{has:g} of {most:g} GT/s"))
    return judge_each(problems, f"{len(found)} links")


def _gts(files: Tree, path: str) -> float:
    text = files.read(path)
    found = _SPEED.fullmatch(text)
    if found is None:
        raise UnreadableError(f"{path}: {text[:_SHOWN_CHARS]!r}")
    return float(found[1])


@check("pcie.aer_correctable", source=_AER, action=_SEAT)
def aer_correctable(text: str, settings: Settings) -> Verdict:
    """PCIe links repeat few packets."""
    total = "TOTAL_ERR_COR"
    return _aer(text, settings, "pcie.aer_correctable", "correctable", total)


@check(
    "pcie.aer_nonfatal",
    source=_AER,
    action=f"Look at dmesg and at the device above, too. {_SEAT}",
)
def aer_nonfatal(text: str, settings: Settings) -> Verdict:
    """No PCIe device has had an uncorrected error."""
    total = "TOTAL_ERR_NONFATAL"
    return _aer(text, settings, "pcie.aer_nonfatal", "nonfatal", total)


@check(
    "pcie.aer_fatal",
    source=_AER,
    action=f"Look at dmesg and at the device above, too. {_SEAT}",
)
def aer_fatal(text: str, settings: Settings) -> Verdict:
    """No PCIe link has had a fatal error since boot."""
    return _aer(text, settings, "pcie.aer_fatal", "fatal", "TOTAL_ERR_FATAL")


def _aer(text: str, settings: Settings, check: str, kind: str, total: str) -> Verdict:
    files = sysfs.tree(text)
    hours = sysfs.hours_up(files)
    most = sysfs.allowed(settings, check, hours)
    matches = [m for path in files.paths if (m := _AER_PATH.fullmatch(path))]
    devices = dict.fromkeys(match[1] for match in matches)
    if not devices:
        raise UnreadableError("no device has AER counters")
    found = {d: _counts(files, f"{_BUS}/{d}/aer_dev_{kind}", total) for d in devices}
    problems = []
    for device, counts in found.items():
        if counts[total] > most:
            others = [f"{k} {n}" for k, n in counts.items() if n and k != total]
            said = f"{counts[total]} in {hours:.1f} h ({', '.join(others)})"
            problems.append((f"{device} {files.read(f'{_BUS}/{device}/class')}", said))
    worst = max(counts[total] for counts in found.values())
    return judge_each(problems, worst, f"at most {most:.4g}")


def _counts(files: Tree, path: str, total: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in files.read(path).splitlines():
        field = _COUNT.fullmatch(line)
        if field is None or field[1] in found:
            raise UnreadableError(
                f"{path}: invalid or repeated counter: {line[:_SHOWN_CHARS]!r}"
            )
        found[field[1]] = int(field[2])
    if total not in found:
        raise UnreadableError(f"{path} has no {total}")
    return found


@check(
    "pcie.iommu",
    source=_IOMMU,
    action="Boot with iommu=pt, or turn off VT-d or AMD-Vi in the BIOS.",
    for_training=True,
)
def iommu(text: str, settings: Settings) -> Verdict:
    """No IOMMU translates addresses between adapters and other devices.

    `gpudirect.iommu` checks the same for GPUs.
    """
    files = sysfs.tree(text)
    options = files.read("/proc/cmdline").split()
    files.number("/sys/kernel/uevent_seqnum")  # /sys/kernel exists and is not hidden.
    matches = [m for path in files.paths if (m := _GROUP_PATH.fullmatch(path))]
    if not matches:
        if {"intel_iommu=on", "amd_iommu=on", "iommu.passthrough=0"} & {*options}:
            raise UnreadableError("an IOMMU is turned on, but there are no groups")
        return ok("off")
    adapters = [m for m in matches if files.read(m[0]).startswith(_NETWORK)]
    if not adapters:
        raise UnreadableError("no IOMMU group has an adapter")
    fine = settings.limit("pcie.iommu", "allowed")
    problems = []
    for match in adapters:
        kind = files.read(f"{_GROUPS}/{match[1]}/type")
        if kind not in fine:
            problems.append((match[2], f"IOMMU group {match[1]} is {kind}"))
    return judge_each(problems, f"{len(adapters)} adapters", _listed(fine))


def _listed(words: Sequence[str]) -> str:
    return " or ".join(map(str, words))


CHECKS = (
    width,
    speed,
    aer_correctable,
    aer_nonfatal,
    aer_fatal,
    iommu,
)
