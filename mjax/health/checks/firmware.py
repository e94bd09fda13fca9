"""Checks of the host's firmware and model, as the firmware tells them (DMI).

Source: /sys/class/dmi/id, Documentation/ABI/testing/sysfs-firmware-dmi-tables of the
kernel. A virtual machine may have none: unknown there.
"""

from mjax.health.check import Check
from mjax.health.checks.versions import compared
from mjax.health.findings import UnreadableError, Verdict, failed, ok, unknown
from mjax.health.settings import Settings
from mjax.health.small_files import values
from mjax.health.sources import Files

_DMI = "/sys/class/dmi/id"
_SOURCE = Files((f"{_DMI}/bios_version", f"{_DMI}/product_name", f"{_DMI}/sys_vendor"))
_NOTHING = ("", "To Be Filled By O.E.M.", "Default string", "Not Specified")


def _value(text: str, name: str) -> str:
    found = values(text).get(f"{_DMI}/{name}", "")
    if found in _NOTHING:
        raise UnreadableError(f"{name} is {found!r}")
    return found


def bios(text: str, settings: Settings) -> Verdict:
    """The firmware has the version that is expected."""
    return compared("bios", _value(text, "bios_version"), settings)


def product(text: str, settings: Settings) -> Verdict:
    """The host is of the model that is expected."""
    has = f"{_value(text, 'sys_vendor')} {_value(text, 'product_name')}"
    wanted = settings.expect.get("product")
    if wanted is None:
        return unknown(f"{has}; product is not in the expectations")
    if has != wanted:
        return failed(f"it is a {has}, not a {wanted}", has, wanted)
    return ok(has, wanted)


CHECKS = (
    Check(
        name="firmware.bios",
        what="The firmware has the version that is expected.",
        source=_SOURCE,
        judge=bios,
        action="Update the firmware, as on the other hosts.",
    ),
    Check(
        name="firmware.product",
        what="The host is of the model that is expected.",
        source=_SOURCE,
        judge=product,
        action="Correct the cluster file, or the address of the host.",
    ),
)
