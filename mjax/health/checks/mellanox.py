"""Checks of the driver of NVIDIA (Mellanox) adapters against the expectations.

`infiniband` checks the firmware. A driver that is part of the kernel has no version
file; its check is then unknown.

Sources: Documentation/ABI/stable/sysfs-module at https://github.com/torvalds/linux;
/proc/modules, which omits built-in drivers: proc_modules(5); the output of
`ofed_info -s`: "Host Driver Version" in health_checks/config.json at
https://github.com/imbue-ai/cluster-health
"""

import re

from mjax.health.check import check
from mjax.health.checks import gpudirect
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

_DRIVER = File("/sys/module/mlx5_core/version")
_OFED = Command(("ofed_info", "-s"))
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z._+:-]{0,60}")
_LIVE = "Live"
_OFED_VERSION = re.compile(r"(?:MLNX_OFED_LINUX|OFED-internal|DOCA|OFED)-(\S+?):?")
_SHOWN_CHARS = 60


@check(
    "mellanox.driver", source=_DRIVER, action="Install the expected driver, and reboot."
)
def driver(text: str, settings: Settings) -> Verdict:
    """The driver mlx5_core has the expected version."""
    version = text.strip()
    if not _VERSION.fullmatch(version):
        raise UnreadableError(f"expected a version, got {text[:_SHOWN_CHARS]!r}")
    return _compared(version, settings, "mlx5_core")


@check("mellanox.ofed", source=_OFED, action="Install the expected OFED, and reboot.")
def ofed(text: str, settings: Settings) -> Verdict:
    """OFED has the expected version."""
    found = _OFED_VERSION.fullmatch(text.strip())
    if found is None:
        raise UnreadableError(f"expected a version, got {text[:_SHOWN_CHARS]!r}")
    return _compared(found[1], settings, "ofed")


def _compared(version: str, settings: Settings, key: str) -> Verdict:
    wanted = settings.expect.get("versions", {}).get(key)
    if wanted is None:
        return unknown(f"{version}; versions.{key} is not in the expectations")
    if version != str(wanted):
        return failed(f"{key} is {version}, not {wanted}", version, wanted)
    return ok(version, wanted)


@check(
    "mellanox.modules",
    source=gpudirect.MODULES,
    action="Load the module with `modprobe`; look at dmesg.",
)
def loaded(text: str, settings: Settings) -> Verdict:
    """The kernel modules of InfiniBand are loaded."""
    states = gpudirect.modules(text)
    needed = [str(name) for name in settings.limit("mellanox.modules", "needed")]
    problems = [
        (name, states.get(name, "not loaded"))
        for name in needed
        if states.get(name) != _LIVE
    ]
    if problems and not settings.expect.keys() & {"hcas", "ports"}:
        shown = ", ".join(f"{name}: {state}" for name, state in problems)
        return unknown(f"{shown}; neither hcas nor ports is in the expectations")
    return judge_each(problems, f"{len(needed)} modules", _LIVE)


CHECKS = (
    driver,
    ofed,
    loaded,
)
