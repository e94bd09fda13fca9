"""Checks of versions against the expected ones: the hosts of a run must match.

An expected version matches if it is the whole version or its beginning up to a
separator: 6.8 matches 6.8.0-45-generic, but not 6.80.

Sources of the formats: /proc/version (proc_version(5)), os-release(5), `nvcc --version`
and `nvidia-ctk --version` of NVIDIA, `getconf GNU_LIBC_VERSION` of glibc.
"""

import importlib.metadata
import re
from dataclasses import dataclass

from mjax.health.check import check
from mjax.health.findings import (
    UnreadableError,
    Verdict,
    failed,
    judge_each,
    ok,
    quoted,
    unknown,
)
from mjax.health.settings import Settings
from mjax.health.sources import Command, File, Reading

_KERNEL = re.compile(r"^Linux version (\S{1,100}) ")
_CUDA = re.compile(r"release [0-9.]{1,10}, V([0-9]{1,4}(?:\.[0-9]{1,4}){1,3})\n")
_GLIBC = re.compile(r"^glibc ([0-9]{1,3}\.[0-9]{1,4}(?:\.[0-9]{1,4})?)\n$")
_TOOLKIT = re.compile(
    r"^NVIDIA Container Toolkit CLI version ([0-9][\w.+~-]{1,40})\n", re.MULTILINE
)
_OS = re.compile(r'^(ID|VERSION_ID)="?([\w.-]{1,40})"?$', re.MULTILINE)
_PACKAGE = re.compile(r"^([a-z0-9](?:[a-z0-9-]{0,80}[a-z0-9])?)==(\S{1,60})$")


def fits(has: str, wanted: str) -> bool:
    """Return whether a version is the expected one or refines it."""
    return has == wanted or (
        has.startswith(wanted) and has[len(wanted)] in ".-+_~ " and wanted != ""
    )


def compared(name: str, has: str, settings: Settings) -> Verdict:
    """Compare a version with the expectation of the same name."""
    wanted = settings.expect.get("versions", {}).get(name)
    if wanted is None:
        return unknown(f"{has}; the expectations have no {name} in table [versions]")
    if not fits(has, str(wanted)):
        return failed(f"{name} is {has}, not {wanted}", has, wanted)
    return ok(has, wanted)


def _only(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    if found is None:
        raise UnreadableError(f"expected a version, got {quoted(text)}")
    return found[1]


@check(
    "versions.kernel",
    source=File("/proc/version"),
    action="Install the kernel of the other hosts and boot it.",
)
def kernel(text: str, settings: Settings) -> Verdict:
    """The kernel has the expected version."""
    return compared("kernel", _only(_KERNEL, text), settings)


@check(
    "versions.os",
    source=File("/etc/os-release"),
    action="Reinstall the host from the image of the cluster.",
)
def distribution(text: str, settings: Settings) -> Verdict:
    """The distribution is the expected one."""
    fields = dict(_OS.findall(text))
    if fields.keys() != {"ID", "VERSION_ID"}:
        raise UnreadableError("it has no ID, or no VERSION_ID")
    return compared("os", f"{fields['ID']} {fields['VERSION_ID']}", settings)


@check(
    "versions.cuda",
    source=Command(("nvcc", "--version")),
    action="Install it; check whether PATH contains another one.",
)
def cuda(text: str, settings: Settings) -> Verdict:
    """The CUDA toolkit has the expected version."""
    return compared("cuda", _only(_CUDA, text), settings)


@check(
    "versions.glibc",
    source=Command(("getconf", "GNU_LIBC_VERSION")),
    action="Reinstall the host from the image of the cluster.",
)
def glibc(text: str, settings: Settings) -> Verdict:
    """The C library has the expected version."""
    return compared("glibc", _only(_GLIBC, text), settings)


@check(
    "versions.container_toolkit",
    source=Command(("nvidia-ctk", "--version")),
    action="Install the expected version of nvidia-container-toolkit.",
)
def container_toolkit(text: str, settings: Settings) -> Verdict:
    """NVIDIA's container toolkit has the expected version."""
    return compared("container_toolkit", _only(_TOOLKIT, text), settings)


@dataclass(frozen=True)
class Packages:
    """The Python packages of this interpreter, as lines `name==version`."""

    @property
    def shown(self) -> str:
        """Name of the source, for a person."""
        return "packages of Python"

    def read(self, limit_s: float) -> Reading:
        """List the packages."""
        del limit_s
        found = {
            re.sub(r"[-_.]+", "-", found.name).lower(): found.version
            for found in importlib.metadata.distributions()
            if found.name and found.version
        }
        lines = [f"{name}=={version}\n" for name, version in sorted(found.items())]
        return Reading(text="".join(lines), num_bytes=sum(map(len, lines)))


@check(
    "versions.packages",
    source=Packages(),
    action="Recreate the environment from the list of versions.",
)
def packages(text: str, settings: Settings) -> Verdict:
    """The Python packages have the expected versions."""
    wanted = settings.expect.get("packages")
    if not wanted:
        return unknown("the expectations have no entry in table [packages]")
    has = {}
    for line in text.split("\n")[:-1]:
        found = _PACKAGE.match(line)
        if found is None:
            raise UnreadableError(f"expected a package, got {quoted(line)}")
        has[found[1]] = found[2]
    each = []
    for name, version in wanted.items():
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key not in has:
            each.append((name, "not installed"))
        elif not fits(has[key], str(version)):
            each.append((name, f"{has[key]}, not {version}"))
    return judge_each(each, f"{len(wanted) - len(each)}", f"{len(wanted)}")


CHECKS = (
    kernel,
    distribution,
    cuda,
    glibc,
    container_toolkit,
    packages,
)
