"""Rules for log lines that report a fault, and readers of new lines.

Input: the logs of the ranks of a host, and the kernel's log (/dev/kmsg). Output: lines
that match a rule, with the name of the rule. A match never ends a run. If a rank ends
or hangs, matches in the logs of this generation may explain why
(`failures.explained`).

The table of `mjax.health.kernel_rules` lists the kernel lines that mean a fault, with
sources. Corrected errors, Xids caused by programs, and transient faults do not explain
a failure. `RULES` match error texts of CUDA, NCCL, JAX and file systems.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path

from mjax.health import kernel_rules
from mjax.launch.messages import Match
from mjax.launch.policy import Cause
from mjax.launch.thunks import Reader

KERNEL_LOG = Path("/dev/kmsg")
_MOST_BYTES = 2**20
"""Maximum number of bytes of a log read at a time; older unread bytes are skipped."""
_MOST_LINES = 3
"""Maximum number of matches reported per rule and log, because a broken host logs the
same line again and again."""
_SHOWN_CHARS = 400
_RECORD_BYTES = 8192  # maximum size; each read of the kernel's log returns one record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A pattern of log lines and its meaning."""

    name: str
    pattern: str
    """Regular expression to search for in a line."""
    cause: Cause | None
    """Cause of a failure on the host that wrote the line; None if the line explains no
    failure and is only reported."""


RULES = (
    Rule(
        name="GPU memory",
        pattern=r"CUDA_ERROR_ECC_UNCORRECTABLE|uncorrectable (?:NVLink|ECC) error",
        cause=Cause.GPU_FAULT,
    ),
    Rule(
        name="GPU is gone",
        pattern=r"CUDA_ERROR_NO_DEVICE|GPU is lost",
        cause=Cause.GPU_FAULT,
    ),
    Rule(
        name="network",
        pattern=r"ncclSystemError|ncclRemoteError|IBV_WC_RETRY_EXC_ERR|ibv_\w+ failed",
        cause=Cause.NETWORK,
    ),
    Rule(
        name="GPU out of memory",
        pattern=r"RESOURCE_EXHAUSTED: Out of memory",
        cause=Cause.OUT_OF_MEMORY,
    ),
    Rule(
        name="file system",
        pattern=r"Stale file handle|Input/output error|Read-only file system",
        cause=Cause.STORE,
    ),
)
_COMPILED = [(rule, re.compile(rule.pattern)) for rule in RULES]
XID, XID_OF_A_PROGRAM = "Xid", "Xid of a program"
_XIDS_OF_HARDWARE = ("reset", "reboot", "support")
"""Actions of `kernel_rules` for Xids that are caused by hardware."""
_OF_CHECK = {
    "kernel.xid": XID,
    "kernel.sxid": "SXid",
    "kernel.gpu_driver": "GPU driver",
    "kernel.aer": "PCIe",
    "kernel.machine_check": "machine check",
    "kernel.memory_errors": "machine check",
}
"""Name of a health check of the kernel's log -> rule name. Lines of other checks, such
as the check for slow disks, do not explain the end of a rank."""
CAUSES = {rule.name: rule.cause for rule in RULES} | {
    XID: Cause.GPU_FAULT,
    XID_OF_A_PROGRAM: None,
    "SXid": Cause.GPU_FAULT,
    "GPU driver": Cause.GPU_FAULT,
    "PCIe": Cause.HOST_FAULT,
    "machine check": Cause.HOST_FAULT,
}
"""Rule name -> cause of a failure of the host."""


def match(line: str, rank: int | None = None) -> Match | None:
    """Return the match of the first rule that fits a line; None if none fits."""
    name = _of_kernel(line)
    if name is None:
        found = (rule.name for rule, pattern in _COMPILED if pattern.search(line))
        name = next(found, None)
    if name is None:
        return None
    return Match(rule=name, line=line.strip()[:_SHOWN_CHARS], rank=rank)


def _of_kernel(line: str) -> str | None:
    """Return the name of the rule for a kernel line that means a fault."""
    rules = kernel_rules.shipped()
    found = rules.match(line)
    if found is None:
        return None
    rule = rules.rules[found.rule]
    if rule.kind == "xid":
        kind = rules.xids.get(int(found.code))
        return XID if kind in _XIDS_OF_HARDWARE else XID_OF_A_PROGRAM
    return _OF_CHECK.get(rule.check) if rule.kind == "fatal" else None


class LogReader:
    """Finds matches in new lines of a rank's log."""

    def __init__(self, descriptor: int, rank: int) -> None:
        """Start at the beginning of the log, an open file."""
        self._descriptor, self._rank = descriptor, rank
        self.thunks = Reader()
        self._place, self._rest = 0, b""
        self._told: dict[str, int] = {}

    def read(self, *, is_over: bool = False) -> list[Match]:
        """Return the matches since the last call.

        Args:
          is_over: whether the log is complete, so an unterminated last line counts.
        Raises:
          OSError: the disk fails.
        """
        size = os.fstat(self._descriptor).st_size
        if size < self._place:  # the log was rotated
            self._place, self._rest = 0, b""
        self._place = max(self._place, size - _MOST_BYTES)
        new = os.pread(self._descriptor, _MOST_BYTES, self._place)
        self._place += len(new)
        text, _, rest = (self._rest + new).rpartition(b"\n")
        self._rest = rest[-_MOST_BYTES:]
        if is_over:
            text, self._rest = text + b"\n" + self._rest, b""
        lines = text.decode(errors="replace").splitlines()
        for line in lines:
            self.thunks.feed(line)
        return _few((match(line, self._rank) for line in lines), self._told)


class KernelLog:
    """Finds matches in new lines of the kernel's log."""

    def __init__(self, path: Path = KERNEL_LOG) -> None:
        """Open the log if permitted."""
        self._descriptor: int | None = None
        self._told: dict[str, int] = {}
        with contextlib.suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._descriptor, 0, os.SEEK_END)

    @property
    def access(self) -> str:
        """Text that says if the kernel's log can be read; most hosts refuse."""
        return "unknown: not readable" if self._descriptor is None else "read"

    def read(self) -> list[Match]:
        """Return the matches since the last call."""
        lines = []
        while self._descriptor is not None:
            try:
                record = os.read(self._descriptor, _RECORD_BYTES)
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:
                break
            if not record:
                break
            # "priority,number,microseconds,flags;text"
            lines += record.decode(errors="replace").splitlines()
        return _few((match(line) for line in lines), self._told)


def _few(found: Iterable[Match | None], told: dict[str, int]) -> list[Match]:
    """Drop None, and keep only the first `_MOST_LINES` matches of each rule."""
    few = []
    for one in found:
        if one is not None and told.setdefault(one.rule, 0) < _MOST_LINES:
            told[one.rule] += 1
            few.append(one)
    return few
