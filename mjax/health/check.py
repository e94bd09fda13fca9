"""Checks of a host, and their execution.

A check is a small pure function over the whole output of one source. Each source is
read once, and several are read concurrently. Each source has a time limit, and all
sources together have one. A truncated output is `incomplete` and is not parsed, and an
output that a parser cannot read is `unknown`: no check becomes `ok` by accident.
"""

import collections
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from mjax.health import accelerators
from mjax.health.findings import (
    Finding,
    State,
    UnreadableError,
    Verdict,
    failed,
    incomplete,
    unknown,
)
from mjax.health.settings import Settings
from mjax.health.sources import Reading, Source

Judge = Callable[[str, Settings], Verdict]
SOURCE_S = 20.0
"""Time limit of one source in seconds. `nvidia-smi -q -x` takes seconds if no process
keeps the driver loaded."""
TOTAL_S = 50.0
"""Time limit of all sources together in seconds. It is less than a minute."""
_NUM_THREADS = 16
"""Number of sources that are read concurrently. A reader mostly waits for its tool."""
_PLAIN = "not judged: this host has no GPU and no RDMA device, and none is expected"
_KILL_S = 1.0
"""Seconds for killed commands to end. A kill takes milliseconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One question about a host."""

    name: str
    """`group.what`, in lower case."""
    what: str
    """One-line statement that is true on a healthy host."""
    source: Source
    judge: Judge
    """Judges the output of the source; raises `UnreadableError` for an unknown
    format."""
    action: str
    """What an operator should do if the check fails."""
    statuses: Collection[int] = (0,)
    """Exit statuses whose output is judged; after any other status the check is
    unknown."""
    needs_idle: bool = False
    """Whether only an idle host can pass the check."""
    for_training: bool = False
    """Whether the check matters only with GPUs or RDMA, and cannot fail other hosts."""
    judge_for_start: Judge | None = None
    """Replaces `judge` in `mjax.doctor`: a run can start on some hosts that are not
    healthy."""
    device: str = ""
    """Kind of device, as in `accelerators.signs`, that this check must reach: on a host
    that has one, it fails where it would be unknown."""
    failing: Mapping[int, str] = MappingProxyType({})
    """Maps each exit status that is itself a fault of the host to its meaning."""

    def __call__(self, text: str, settings: Settings) -> Verdict:
        """Judge an output of the source, as `judge`."""
        return self.judge(text, settings)


def check(
    name: str, *, source: Source, action: str, **fields: Any
) -> Callable[[Judge], Check]:
    """Return a decorator that makes a check of a judge.

    The first line of the judge's docstring is the check's `what`.

    Args:
      name: as in `Check`.
      source: as in `Check`.
      action: as in `Check`.
      **fields: other fields of `Check`.
    """

    def decorate(judge: Judge) -> Check:
        what = (judge.__doc__ or "").partition("\n")[0]
        return Check(
            name=name, what=what, source=source, judge=judge, action=action, **fields
        )

    return decorate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The findings of all checks of a host."""

    findings: Sequence[Finding]
    readings: Mapping[Source, Reading]
    """Readings of the sources of all checks."""
    seconds: float
    is_plain: bool = False
    """Whether the host has no GPU and no RDMA device, and none is expected."""

    @property
    def is_ok(self) -> bool:
        """Whether the host may be used: no check failed or is incomplete."""
        bad = (State.FAILED, State.INCOMPLETE)
        return not any(finding.state in bad for finding in self.findings)


def judge(check: Check, reading: Reading, settings: Settings) -> Finding:
    """Return the finding of a check on a reading."""
    verdict = _verdict(check, reading, settings)
    if verdict.state is State.FAILED and check.for_training and settings.is_plain:
        verdict = unknown(f"{verdict.reason}; {_PLAIN}")
    if verdict.state is State.UNKNOWN and check.device and settings.signs is not None:
        sign = settings.signs.get(check.device)
        if sign is not None:
            verdict = failed(f"{verdict.reason}, although this host has {sign}")
        elif not settings.is_plain and reading.status == 0 and not reading.absent:
            verdict = failed(f"{verdict.reason}, although the tool ran on this host")
    if verdict.state is State.UNKNOWN and settings.require(check.name):
        verdict = failed(f"{verdict.reason}, and this check is required")
    fields = {
        field.name: getattr(verdict, field.name)
        for field in dataclasses.fields(Verdict)
    }
    return Finding(name=check.name, **fields)


def _verdict(check: Check, reading: Reading, settings: Settings) -> Verdict:
    if reading.absent:
        return unknown(reading.absent)
    if reading.cut:
        return incomplete(f"{check.source.shown}: {reading.cut}")
    said = " ".join((reading.error or reading.text[-200:]).split())
    text = f"{check.source.shown} ended with {reading.status}"
    if reading.status is not None and reading.status in check.failing:
        meaning = check.failing[reading.status]
        return failed(f"{text}: {meaning}: {said}" if said else f"{text}: {meaning}")
    if reading.status not in check.statuses:
        return unknown(f"{text}: {said}" if said else text)
    try:
        return check.judge(reading.text, settings)
    except UnreadableError as error:
        return unknown(f"{check.source.shown}: {error}")


def run(
    checks: Sequence[Check],
    settings: Settings,
    *,
    source_s: float = SOURCE_S,
    total_s: float = TOTAL_S,
) -> Report:
    """Read all sources and judge their outputs.

    Args:
      checks: the checks to make.
      settings: limits and expectations; `is_plain` and `signs` are determined here.
      source_s: time limit of one source in seconds.
      total_s: time limit of all sources together in seconds; this function returns
        within one second after it.
    """
    began_s = time.monotonic()
    until_s = began_s + total_s
    sources = [*dict.fromkeys(check.source for check in checks), accelerators.SOURCE]
    readings = _read_all(sources, source_s, until_s)
    plain = accelerators.is_plain(readings[accelerators.SOURCE], settings)
    signs = accelerators.signs(readings[accelerators.SOURCE])
    settings = dataclasses.replace(settings, is_plain=plain, signs=signs)
    findings = [judge(check, readings[check.source], settings) for check in checks]
    return Report(
        findings=findings,
        readings=readings,
        seconds=time.monotonic() - began_s,
        is_plain=plain,
    )


def _read_all(
    sources: Sequence[Source], source_s: float, until_s: float
) -> Mapping[Source, Reading]:
    """Return the reading of each source; its status is None if it took too long."""
    late = Reading(status=None)
    futures = {source: Future[Reading]() for source in sources}
    waiting = collections.deque(futures.items())

    def work() -> None:
        while waiting:
            try:
                source, future = waiting.popleft()
            except IndexError:  # another thread took the last source
                return
            left_s = min(source_s, until_s - time.monotonic())
            try:
                future.set_result(source.read(left_s) if left_s > 0 else late)
            except BaseException as error:  # raised again when the result is read
                future.set_exception(error)

    # A file read, and so its thread, may hang forever (a stale network file system). At
    # exit the interpreter waits for the threads of a pool, but not for daemon threads.
    for _ in range(min(_NUM_THREADS, len(sources))):
        threading.Thread(target=work, name="mjax-check", daemon=True).start()
    left_s = max(0.0, until_s - time.monotonic()) + _KILL_S
    concurrent.futures.wait(futures.values(), timeout=left_s)
    return {
        source: future.result() if future.done() else late
        for source, future in futures.items()
    }
