"""Checks of the NVLink fabric: its manager, and its state on each GPU.

Input: `systemctl show nvidia-fabricmanager.service`, `nv-fabricmanager --version`, and
`nvidia-smi -q -x`. Output: verdicts. On hosts without NVSwitches, which have no manager
and no fabric, these checks are unknown, or failed if the service is expected.
Sources:
https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/contents.html,
https://docs.nvidia.com/deploy/nvml-api/group__nvmlFabricDefs.html (health), and
systemctl(1), https://www.unix.com/man-page/v7/1/SYSTEMCTL (show).
"""

import re
from collections.abc import Mapping

from mjax.health.check import check
from mjax.health.checks.nvidia_smi import Gpu, Seen, judge_gpus, smi_check
from mjax.health.findings import UnreadableError, Verdict, failed, ok, unknown
from mjax.health.settings import Settings
from mjax.health.sources import Command

_UNIT = "nvidia-fabricmanager.service"
_PROPERTIES = ("LoadState", "ActiveState", "SubState")
SERVICE = Command(("systemctl", "show", _UNIT, f"--property={','.join(_PROPERTIES)}"))
VERSION = Command(("nv-fabricmanager", "--version"))

_GOOD: Mapping[str, str] = {
    "summary": "healthy",
    "bandwidth": "full",
    "route_recovery_in_progress": "false",
    "route_unhealthy": "false",
    "access_timeout_recovery": "false",
    "incorrect_configuration": "none",
}
"""Fields of the fabric's health, with their good values in lower case; drivers before
580 have only the bandwidth."""


_RESTART = (
    "Drain the host; restart nvidia-fabricmanager; reset all GPUs together or reboot."
)


@check(
    "fabric_manager.active",
    source=SERVICE,
    action=f"Read /var/log/fabricmanager.log. {_RESTART}",
)
def active(text: str, settings: Settings) -> Verdict:
    """The fabric manager of the NVSwitches is running."""
    found = dict(re.findall(r"^([A-Za-z]+)=(.*)$", text, re.MULTILINE))
    if sorted(found) != sorted(_PROPERTIES) or len(text.splitlines()) != len(found):
        raise UnreadableError(f"it does not have {', '.join(_PROPERTIES)}")
    services = settings.expect.get("services", ())
    is_expected = _UNIT in services or _UNIT.removesuffix(".service") in services
    state = f"{found['ActiveState']} ({found['SubState']})"
    if found["LoadState"] == "not-found":
        if is_expected:
            return failed(f"{_UNIT} is not installed", "not-found", "active")
        return unknown(f"{_UNIT} is not installed")
    if found["LoadState"] != "loaded":
        return failed(f"{_UNIT} is {found['LoadState']}", state, "active (running)")
    if state != "active (running)":
        return failed(f"{_UNIT} is {state}", state, "active (running)")
    return ok(state, limit="active (running)")


@check(
    "fabric_manager.version",
    source=VERSION,
    action="Install the fabric manager in the driver's version.",
)
def version(text: str, settings: Settings) -> Verdict:
    """The fabric manager has the same version as the driver."""
    found = re.findall(
        r"^\s*Fabric Manager version is : ([0-9.]{1,40})\s*$", text, re.M
    )
    if len(found) != 1:
        raise UnreadableError("it does not say which version it is")
    versions = settings.expect.get("versions", {})
    if "nvidia_driver" not in versions:
        return unknown(f"{found[0]}; versions.nvidia_driver is not in the expectations")
    wanted = str(versions["nvidia_driver"])
    if found[0] != wanted:
        reason = f"the fabric manager is {found[0]}, the driver {wanted}"
        return failed(reason, found[0], wanted)
    return ok(found[0], wanted)


@smi_check("gpu.fabric_state", action=f"After boot, wait two minutes. {_RESTART}")
def fabric_state(text: str, settings: Settings) -> Verdict:
    """Each GPU is registered with the NVLink fabric."""
    del settings
    states = ("Completed", "In Progress", "Not Started")

    def look(gpu: Gpu) -> Seen:
        state = gpu.word(states, "fabric/state")
        if state != "Completed":
            return Seen(value=state, bad=f"its registration is {state}")
        status = gpu.text("fabric/status")
        if status != "Success":
            return Seen(value=status, bad=f"its registration ended with {status}")
        return Seen(value=state)

    return judge_gpus(text, look, limit="Completed")


@smi_check("gpu.fabric_health", action=_RESTART)
def fabric_health(text: str, settings: Settings) -> Verdict:
    """No GPU reports a problem of the NVLink fabric."""
    del settings

    def look(gpu: Gpu) -> Seen:
        bad = []
        if not any(
            gpu.has(f"fabric/health/{name}") for name in ("summary", "bandwidth")
        ):
            raise UnreadableError(f"{gpu.label}: it reports no fabric health")
        for name, good in _GOOD.items():
            path = f"fabric/health/{name}"
            if not gpu.has(path):
                continue
            value = gpu.text(path)
            if value.lower() != good:
                bad.append(f"{name} is {value}")
        return Seen(value=", ".join(bad) or "healthy", bad=", ".join(bad))

    return judge_gpus(text, look, limit="healthy")


CHECKS = (
    active,
    version,
    fabric_state,
    fabric_health,
)
