"""Checks of systemd's units and of Docker.

Sources of the formats: systemctl(1), `list-units --plain --no-legend` has the columns
unit, load, active, sub, description; `docker info --format '{{json .}}'` is one object,
https://docs.docker.com/reference/cli/docker/system/info/
"""

import functools
import re
from collections.abc import Mapping
from typing import Any

from mjax import checked_json
from mjax.health.check import check
from mjax.health.checks.versions import fits
from mjax.health.findings import (
    KEPT_TEXTS,
    UnreadableError,
    Verdict,
    failed,
    judge_each,
    ok,
    quoted,
    unknown,
)
from mjax.health.settings import Settings
from mjax.health.sources import Command

_UNITS = Command(
    ("systemctl", "list-units", "--all", "--plain", "--no-legend", "--no-pager", "-q")
)
_DOCKER = Command(("docker", "info", "-f", "{{json .}}"))
_UNIT = re.compile(
    r"^(\S{1,255}\.[a-z]{4,9}) +([a-z-]{4,20}) +([a-z-]{4,20}) +([a-z-]{4,30})(?: .*)?$"
)


@functools.lru_cache(KEPT_TEXTS)
def units(text: str) -> Mapping[str, tuple[str, str]]:
    """Return (active state, sub-state) of each unit, by name.

    Raises:
      UnreadableError: it is not an output of `systemctl list-units`.
    """
    found = {}
    for line in text.split("\n")[:-1]:
        match = _UNIT.match(line.rstrip())
        if match is None:
            raise UnreadableError(f"expected a unit, got {quoted(line)}")
        found[match[1]] = (match[3], match[4])
    if not text.endswith("\n"):
        raise UnreadableError("it is empty, or ends early")
    return found


@check(
    "services.failed",
    source=_UNITS,
    action="`systemctl status UNIT`; restart it, or `systemctl reset-failed`.",
)
def failed_units(text: str, settings: Settings) -> Verdict:
    """No unit of systemd has failed."""
    allowed = settings.limit("services.failed", "allowed")
    each = [
        (unit, sub)
        for unit, (active, sub) in units(text).items()
        if active == "failed" and unit not in allowed
    ]
    return judge_each(each, f"{len(each)} of {len(units(text))} units", "none")


@check(
    "services.expected",
    source=_UNITS,
    action="`systemctl restart UNIT`; read `journalctl -u UNIT`.",
)
def expected(text: str, settings: Settings) -> Verdict:
    """All required services are running."""
    wanted = settings.expect.get("services")
    if not wanted:
        return unknown("services is not in the expectations")
    found, each = units(text), []
    for name in wanted:
        unit = name if "." in name else f"{name}.service"
        active, sub = found.get(unit, ("not there", "-"))
        if active != "active":
            each.append((unit, f"{active} ({sub})"))
    return judge_each(each, f"{len(wanted) - len(each)}", f"{len(wanted)} active")


@functools.lru_cache(KEPT_TEXTS)
def _docker(text: str) -> Mapping[str, Any]:
    try:
        found: dict[str, Any] = checked_json.read(text, dict[str, Any])
    except ValueError as error:
        raise UnreadableError(str(error)) from error
    if not isinstance(found.get("ServerVersion", ""), str):
        raise UnreadableError("ServerVersion is not text")
    return found


@check(
    "services.docker",
    source=_DOCKER,
    action="Install the expected version of docker; restart its daemon.",
)
def docker(text: str, settings: Settings) -> Verdict:
    """Docker's daemon responds, and has the expected version."""
    found = _docker(text)
    said, version = found.get("ServerErrors") or [], found.get("ServerVersion")
    wanted = settings.expect.get("versions", {}).get("docker", "")
    if said or not version:
        return unknown(f"the daemon does not answer: {quoted(str(said))}")
    if wanted and not fits(version, str(wanted)):
        return failed(f"docker is {version}, not {wanted}", version, wanted)
    return ok(version, wanted)


@check(
    "services.docker_runtime",
    source=_DOCKER,
    action="`nvidia-ctk runtime configure --runtime=docker`; restart docker.",
    for_training=True,
)
def docker_runtime(text: str, settings: Settings) -> Verdict:
    """Docker can pass GPUs to containers."""
    wanted = settings.limit("services.docker_runtime", "runtime")
    runtimes = _docker(text).get("Runtimes")
    if not isinstance(runtimes, dict) or not runtimes:
        raise UnreadableError(f"Runtimes is {quoted(str(runtimes))}")
    shown = " ".join(sorted(runtimes))
    if wanted not in runtimes:
        return failed(f"there is no runtime {wanted}, only {shown}", shown, wanted)
    return ok(shown, wanted)


@check(
    "services.docker_cgroups",
    source=_DOCKER,
    action="`native.cgroupdriver=systemd` in /etc/docker/daemon.json.",
)
def docker_cgroups(text: str, settings: Settings) -> Verdict:
    """Docker and systemd use the same tree of control groups."""
    wanted = settings.limit("services.docker_cgroups", "driver")
    has = _docker(text).get("CgroupDriver")
    if not isinstance(has, str) or not has:
        raise UnreadableError(f"CgroupDriver is {has!r}")
    if has != wanted:
        return failed(f"the driver of control groups is {has}", has, wanted)
    return ok(has, wanted)


CHECKS = (
    failed_units,
    expected,
    docker,
    docker_runtime,
    docker_cgroups,
)
