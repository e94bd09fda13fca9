"""Checks of the firmware and model of the host (DMI) and of its PCIe switches.

Source: /sys/class/dmi/id, Documentation/ABI/testing/sysfs-firmware-dmi-tables of the
kernel. A virtual machine may have no DMI table; the checks are then unknown.

PCIe switches of Microchip (Switchtec) report their version to the kernel:
Documentation/ABI/testing/sysfs-class-switchtec and drivers/pci/switch/switchtec.c at
https://github.com/torvalds/linux. Switches of Broadcom (PEX) do not: lspci shows the
revision of the chip, and only the vendor's tools and the BMC show the firmware.
"""

import re

from mjax.health.check import check
from mjax.health.checks import sysfs
from mjax.health.checks.versions import compared
from mjax.health.findings import (
    UnreadableError,
    Verdict,
    failed,
    judge_each,
    ok,
    unknown,
)
from mjax.health.settings import Settings
from mjax.health.small_files import values
from mjax.health.sources import Files

_DMI = "/sys/class/dmi/id"
_SOURCE = Files((f"{_DMI}/bios_version", f"{_DMI}/product_name", f"{_DMI}/sys_vendor"))
_SWITCHES = Files(("/sys/class/switchtec/*/fw_version",))
_HEX = re.compile(r"[0-9a-f]{8}")
_NOTHING = ("", "To Be Filled By O.E.M.", "Default string", "Not Specified")


def _value(text: str, name: str) -> str:
    found = values(text).get(f"{_DMI}/{name}", "")
    if found in _NOTHING:
        raise UnreadableError(f"{name} is {found!r}")
    return found


@check(
    "firmware.bios",
    source=_SOURCE,
    action="Update the firmware to the version of the other hosts.",
)
def bios(text: str, settings: Settings) -> Verdict:
    """The firmware has the expected version."""
    return compared("bios", _value(text, "bios_version"), settings)


@check(
    "firmware.product",
    source=_SOURCE,
    action="Correct the cluster file, or the address of the host.",
)
def product(text: str, settings: Settings) -> Verdict:
    """The host is of the expected model."""
    has = f"{_value(text, 'sys_vendor')} {_value(text, 'product_name')}"
    wanted = settings.expect.get("product")
    if wanted is None:
        return unknown(f"{has}; product is not in the expectations")
    if has != wanted:
        return failed(f"it is a {has}, not a {wanted}", has, wanted)
    return ok(has, wanted)


@check(
    "firmware.pcie_switches",
    source=_SWITCHES,
    action="`switchtec fw-update` with the image of the other hosts, then restart.",
)
def pcie_switches(text: str, settings: Settings) -> Verdict:
    """Microchip PCIe switches run the expected version."""
    files = sysfs.tree(text)
    versions = {path.split("/")[-2]: files.read(path) for path in files.paths}
    if not versions or not all(map(_HEX.fullmatch, versions.values())):
        raise UnreadableError(f"expected versions, got {versions}")
    shown = ", ".join(sorted({*versions.values()}))
    wanted = settings.expect.get("versions", {}).get("pcie_switch")
    if wanted is None:
        return compared("pcie_switch", shown, settings)
    problems = [(n, f"it runs {has}") for n, has in versions.items() if has != wanted]
    return judge_each(problems, f"{len(versions)} switches", str(wanted))


CHECKS = (
    bios,
    product,
    pcie_switches,
)
