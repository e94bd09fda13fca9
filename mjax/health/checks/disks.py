"""Checks of disks and file systems: capacity, free space, inodes, mounts.

`df` queries each mounted file system: if a file server is gone, `df` hangs until its
time limit, and the host is not used.

Sources of the formats: lsblk(8), `df -P` of POSIX, and proc_pid_mounts(5),
https://man7.org/linux/man-pages/man5/proc_pid_mounts.5.html
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence

from mjax import checked_json
from mjax.health.check import check
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
from mjax.health.sources import Command, File

_LSBLK = Command(("lsblk", "-J", "-b", "-d", "-o", "NAME,TYPE,SIZE,TRAN,RO"))
_DF = ("df", "-P", "-x", "squashfs", "-x", "iso9660", "-x", "devtmpfs")
_SPACE = Command((*_DF, "-B1"))
_INODES = Command((*_DF, "-i"))
_MOUNTS = File("/proc/mounts")
_DF_LINE = re.compile(
    r"^(.{1,200}?) +([0-9]{1,20}) +([0-9]{1,20}) +([0-9]{1,20}) +([0-9]{1,3}%|-) (/.*)$"
)
BYTES, INODES = "1-blocks", "Inodes"
_NEVER_WRITTEN = ("squashfs", "iso9660", "erofs", "cramfs")
_BYTES_PER_TB = 10**12


@dataclasses.dataclass(frozen=True)
class BlockDevice:
    """A device in lsblk's output; old versions write numbers and booleans as text."""

    name: str
    type: str
    size: int | str | None
    tran: str | None
    ro: bool | str

    @property
    def num_bytes(self) -> int:
        """Size of the device in bytes."""
        if not re.fullmatch("[0-9]{1,20}", str(self.size)):
            raise UnreadableError(f"{self.name}: expected a size, got {self.size!r}")
        return int(str(self.size))


@dataclasses.dataclass(frozen=True)
class _Devices:
    """The output of lsblk."""

    blockdevices: Sequence[BlockDevice]


@functools.lru_cache(KEPT_TEXTS)
def nvme_disks(text: str) -> Sequence[BlockDevice]:
    """Return the NVMe disks.

    Raises:
      UnreadableError: it is not JSON of lsblk.
    """
    try:
        found: _Devices = checked_json.read(text, _Devices)
    except ValueError as error:
        raise UnreadableError(str(error)) from error
    return [
        device
        for device in found.blockdevices
        if device.type == "disk" and device.name.startswith("nvme")
    ]


@check(
    "disks.nvme_count",
    source=_LSBLK,
    action="Compare `lsblk` with `lspci`; reseat the missing disk.",
)
def nvme_count(text: str, settings: Settings) -> Verdict:
    """The host has as many NVMe disks as expected."""
    has, wanted = len(nvme_disks(text)), settings.expect.get("nvme_disks")
    if wanted is None:
        return unknown(f"{has}; nvme_disks is not in the expectations")
    if has != wanted:
        names = ", ".join(disk.name for disk in nvme_disks(text))
        return failed(f"{has} NVMe disks ({names}), not {wanted}", has, wanted)
    return ok(has, wanted)


@check(
    "disks.capacity",
    source=_LSBLK,
    action="A disk is missing or of the wrong kind: `lsblk -d`.",
)
def capacity(text: str, settings: Settings) -> Verdict:
    """The NVMe disks have the expected capacity."""
    has = sum(disk.num_bytes for disk in nvme_disks(text)) / _BYTES_PER_TB
    wanted = settings.expect.get("nodes_tb")
    if wanted is None:
        return unknown(f"{has:.2f} TB; nodes_tb is not in the expectations")
    if has < wanted:
        return failed(f"{has:.2f} TB of NVMe, not {wanted}", f"{has:.2f} TB", wanted)
    return ok(f"{has:.2f} TB", f"at least {wanted} TB")


@check(
    "disks.write_protected",
    source=_LSBLK,
    action="Copy its data, then replace the disk.",
)
def write_protected(text: str, settings: Settings) -> Verdict:
    """No NVMe disk is read-only."""
    del settings
    disks = nvme_disks(text)
    if not disks:
        return unknown("there is no NVMe disk")
    wrong = {disk.ro for disk in disks} - {True, False, "0", "1"}
    if wrong:
        raise UnreadableError(f"RO is neither 0 nor 1: {wrong}")
    each = [(disk.name, "read-only") for disk in disks if disk.ro in (True, "1")]
    return judge_each(each, f"{len(each)} of {len(disks)}", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileSystem:
    """A file system in the output of df. Its numbers are bytes or inodes."""

    device: str
    size: int
    used: int
    available: int

    @property
    def percent(self) -> float:
        """Used percentage of the usable space."""
        return 100 * self.used / max(1, self.used + self.available)


@functools.lru_cache(KEPT_TEXTS)
def file_systems(text: str, unit: str) -> Mapping[str, FileSystem]:
    """Return the file systems in the output of df, by mount point.

    Args:
      text: output of `df -P`.
      unit: header of its second column: `BYTES` or `INODES`.

    Raises:
      UnreadableError: it is not such an output, or is in another unit.
    """
    lines = text.split("\n")
    if lines[0].split()[:2] != ["Filesystem", unit] or len(lines) < 3 or lines[-1]:
        raise UnreadableError("no header, no file system, or it ends early")
    found = {}
    for line in lines[1:-1]:
        match = _DF_LINE.match(line)
        if match is None:
            raise UnreadableError(f"expected a file system, got {quoted(line)}")
        found[match[6]] = FileSystem(
            device=match[1].strip(),
            size=int(match[2]),
            used=int(match[3]),
            available=int(match[4]),
        )
    return found


def _room(name: str, text: str, unit: str, settings: Settings) -> Verdict:
    most = settings.limit(name, "max_percent")
    found = {
        where: system
        for where, system in file_systems(text, unit).items()
        if system.size > 0 and not system.device.startswith("/dev/loop")
    }
    if not found:
        raise UnreadableError("no file system has a size")
    each = [
        (where, f"{system.percent:.1f}% used")
        for where, system in found.items()
        if system.percent > most
    ]
    worst = max(found, key=lambda where: found[where].percent)
    value = f"{found[worst].percent:.1f}% of {worst}"
    return judge_each(each, value, f"at most {most:g}%")


@check(
    "disks.space",
    source=_SPACE,
    action="Remove old checkpoints and logs there (`du -x`).",
)
def space(text: str, settings: Settings) -> Verdict:
    """No file system is full."""
    return _room("disks.space", text, BYTES, settings)


@check(
    "disks.inodes", source=_INODES, action="Remove folders with many small files there."
)
def inodes(text: str, settings: Settings) -> Verdict:
    """No file system has used up its inodes."""
    return _room("disks.inodes", text, INODES, settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mount:
    """A mount, as a line of /proc/mounts."""

    device: str
    where: str
    type: str
    options: Sequence[str]


@functools.lru_cache(KEPT_TEXTS)
def mounted(text: str) -> Sequence[Mount]:
    """Return the mounts.

    Raises:
      UnreadableError: it is not /proc/mounts.
    """
    found = []
    for line in text.split("\n")[:-1]:
        fields = line.split(" ")
        if len(fields) != 6 or fields[4:] != ["0", "0"]:
            raise UnreadableError(f"expected a mount, got {quoted(line)}")
        device, where, kind, options = (_unescaped(field) for field in fields[:4])
        found.append(
            Mount(device=device, where=where, type=kind, options=options.split(","))
        )
    if not any(mount.where == "/" for mount in found) or not text.endswith("\n"):
        raise UnreadableError("nothing is mounted on /, or it ends early")
    return found


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


@check(
    "disks.mounts",
    source=_MOUNTS,
    action="`mount -a`; check the server of the file system.",
)
def mounts(text: str, settings: Settings) -> Verdict:
    """All required file systems are mounted."""
    wanted = settings.expect.get("mounts")
    if wanted is None:
        return unknown("mounts is not in the expectations")
    has = {mount.where for mount in mounted(text)}
    each = [(where, "not mounted") for where in wanted if where not in has]
    return judge_each(each, f"{len(wanted) - len(each)}", f"{len(wanted)}")


@check(
    "disks.read_only",
    source=_MOUNTS,
    action="Read the kernel log, then unmount and `fsck`.",
)
def read_only(text: str, settings: Settings) -> Verdict:
    """No file system of a disk is read-only.

    The kernel remounts a damaged file system read-only. File systems that are never
    writable (package images) and the mount points that the limits allow are ignored.
    """
    allowed = settings.limit("disks.read_only", "allowed")
    checked = [
        mount
        for mount in mounted(text)
        if mount.device.startswith("/dev/")
        and mount.type not in _NEVER_WRITTEN
        and mount.where not in allowed
    ]
    if not checked:
        return unknown("no file system of a disk is mounted")
    each = [(m.where, f"{m.device} is read-only") for m in checked if "ro" in m.options]
    return judge_each(each, f"{len(each)} of {len(checked)}", "none")


CHECKS = (
    nvme_count,
    capacity,
    write_protected,
    space,
    inodes,
    mounts,
    read_only,
)
