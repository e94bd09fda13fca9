"""Lines of logs that tell what is broken: one table, and a reader of what is new.

Enters: the logs of the ranks of a host, and the kernel's (/dev/kmsg). Leaves: lines
that match a rule of `RULES`, with its name. Nothing here ends a run: when a rank has
ended or hangs, the rules that its host has matched in this generation may explain it
(`failures.explained`).

Sources: NVIDIA, "Xid Errors" (docs.nvidia.com/deploy/xid-errors); JAX and NCCL by the
texts of their errors.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path

from mjax.launch.messages import Match
from mjax.launch.policy import Cause
from mjax.launch.thunks import Reader

KERNEL_LOG = Path("/dev/kmsg")
_MOST_BYTES = 2**20
"""Read of a log at a time; of more, the last."""
_MOST_LINES = 3
"""Told of each rule and log; a broken host says the same thousands of times."""
_SHOWN_CHARS = 400
_RECORD_BYTES = 8192  # of the kernel's log: a read gives one record, and no part of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What a line means."""

    name: str
    pattern: str
    """Regular expression that is searched for in a line."""
    cause: Cause | None
    """Of a failure of this host; None: the line is told, and decides nothing."""


def _xids(numbers: str) -> str:
    return rf"NVRM: Xid \([^)]*\): (?:{numbers})\b"


RULES = (
    # Uncorrectable memory (48, 63 and 64 where rows cannot be mapped, 94, 95), NVLink
    # (74), off the bus (79), the firmware on the GPU (61, 62, 119, 120), fabric (143).
    Rule(
        name="Xid",
        pattern=_xids("48|61|62|64|74|79|92|94|95|119|120|140|143"),
        cause=Cause.GPU_FAULT,
    ),
    # Those that a program may cause by itself, such as 13 and 31.
    Rule(name="Xid of a program", pattern=_xids(r"\d+"), cause=None),
    Rule(name="SXid", pattern=r"nvidia-nvswitch\d+: SXid", cause=Cause.GPU_FAULT),
    Rule(
        name="GPU memory",
        pattern=r"CUDA_ERROR_ECC_UNCORRECTABLE|uncorrectable (?:NVLink|ECC) error",
        cause=Cause.GPU_FAULT,
    ),
    Rule(
        name="GPU is gone",
        pattern=r"CUDA_ERROR_NO_DEVICE|GPU is lost|fallen off the bus",
        cause=Cause.GPU_FAULT,
    ),
    Rule(
        name="machine check",
        pattern=r"mce: \[Hardware Error\]|EDAC .*\bUE\b|PCIe Bus Error: severity=Unc",
        cause=Cause.HOST_FAULT,
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
        name="OOM killer", pattern=r"Out of memory: Killed process", cause=None
    ),  # counted by the kernel, see `ranks.oom_kills`
    Rule(
        name="file system",
        pattern=r"Stale file handle|Input/output error|Read-only file system",
        cause=Cause.STORE,
    ),
)
_COMPILED = [(rule, re.compile(rule.pattern)) for rule in RULES]
CAUSES = {rule.name: rule.cause for rule in RULES}


def match(line: str, rank: int | None = None) -> Match | None:
    """Return the first rule that a line matches."""
    for rule, pattern in _COMPILED:
        if pattern.search(line):
            text = line.strip()[:_SHOWN_CHARS]
            return Match(rule=rule.name, line=text, rank=rank)
    return None


class LogReader:
    """Finds matches in what is appended to the log of a rank."""

    def __init__(self, path: Path, rank: int) -> None:
        """Begin at its first line."""
        self._path, self._rank = path, rank
        self.thunks = Reader()
        self._place, self._rest = 0, b""
        self._told: dict[str, int] = {}

    def read(self, *, is_over: bool = False) -> list[Match]:
        """Return the matches since the last call.

        Args:
          is_over: nothing more is written: a last line without an end counts.
        """
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._place:  # it was rotated
                    self._place, self._rest = 0, b""
                self._place = max(self._place, size - _MOST_BYTES)
                file.seek(self._place)
                new = file.read()
        except OSError:
            return []
        self._place += len(new)
        text, _, self._rest = (self._rest + new).rpartition(b"\n")
        if is_over:
            text, self._rest = text + b"\n" + self._rest, b""
        lines = text.decode(errors="replace").splitlines()
        for line in lines:
            self.thunks.feed(line)
        return _few((match(line, self._rank) for line in lines), self._told)


class KernelLog:
    """Finds matches in the kernel's log, from now on."""

    def __init__(self, path: Path = KERNEL_LOG) -> None:
        """Open it, if that is allowed."""
        self._descriptor: int | None = None
        self._told: dict[str, int] = {}
        with contextlib.suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._descriptor, 0, os.SEEK_END)

    @property
    def access(self) -> str:
        """Whether the kernel's log can be read; it needs a privilege on most hosts."""
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
    """Leave out None, and the fourth line of a rule and all after it."""
    few = []
    for one in found:
        if one is not None and told.setdefault(one.rule, 0) < _MOST_LINES:
            told[one.rule] += 1
            few.append(one)
    return few
