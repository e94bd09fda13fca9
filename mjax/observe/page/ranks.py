"""The state of single ranks for the page: progress, and whether they are alive.

Input: a process as read by the feed, and the time. Output: objects for viewers. The
objects come from the spans of the process. To find out whether a process on this
machine is alive, /proc is read too. `stacks` reads the stacks from the work dir.
"""

from pathlib import Path
from typing import Any

from mjax.observe import seen
from mjax.observe.page.model import Process

_LIVE_S = 600.0
"""Seconds of silence after which a rank on another machine counts as dead. It is longer
than evaluations and compilations of large models."""
_FRESH_S = 10.0
"""A rank that reported within this many seconds is alive, whatever other records say.
"""
_STACK_BYTES = 100_000


def is_live(newest: list[Process], now_ns: int) -> bool:
    """Return whether a run is still running according to its records."""
    for process in newest:
        if process.code is not None:
            continue
        age_s = (now_ns - process.progress_ns) / 1e9
        if age_s < _FRESH_S:
            return True
        state = seen.process_state(process.header, now_ns)
        if state not in ("gone", "?") or (state == "?" and age_s < _LIVE_S):
            return True
    return False


def described(process: Process) -> dict[str, Any]:
    """Return the rank, host, pid, devices, generation and exit code of a process."""
    header = process.header
    return {
        "rank": header.rank,
        "host": header.host,
        "pid": header.pid,
        "devices": [*header.devices],
        "generation": header.generation,
        "ended": process.code,
    }


def where(process: Process, now_ns: int) -> dict[str, Any]:
    """Return a rank's newest step and span, the time since then, and its exit code."""
    return {
        "rank": process.header.rank,
        "step": process.newest_step,
        "span": process.span.name if process.span else None,
        "age_s": _age_s(process, now_ns),
        "ended": process.code,
    }


def last(process: Process, now_ns: int) -> dict[str, Any]:
    """Return a rank's newest step and span, and the time since then."""
    span = process.span
    return {
        "step": process.newest_step,
        "span": span.name if span else None,
        "kind": span.kind if span else None,
        "age_s": _age_s(process, now_ns),
    }


def _age_s(process: Process, now_ns: int) -> float:
    """Return seconds since the last span of a process; host clocks may differ."""
    return round(max(0.0, (now_ns - process.progress_ns) / 1e9), 3)


def error(process: Process, told: list[dict[str, Any]], now_ns: int) -> str | None:
    """Return the problem of a rank; None if no problem is known."""
    generation = process.header.generation
    worst = [e for e in told if e["severity"] == "error" and e["source"] == "process"]
    if worst and worst[-1]["generation"] == generation:
        return f"{worst[-1]['kind']}: {worst[-1]['text']}"
    if process.code:
        return f"it has ended with exit code {process.code}"
    if process.code is None:
        age_s = (now_ns - process.progress_ns) / 1e9
        state = seen.process_state(process.header, now_ns)
        if state == "gone" and age_s > _FRESH_S:
            return "its process is gone without a last line: it was killed"
    return None


def stacks(work_dir: Path, process: Process) -> str | None:
    """Return the newest stacks that a rank wrote; None if it wrote none."""
    name = Path(process.where).name.partition(".jsonl")[0]
    launches = sorted((work_dir / "launch").glob("generation-*"))
    paths = [work_dir / "stacks" / f"{name}.txt"]
    paths += [each / f"stacks-{process.header.rank}.txt" for each in launches[-1:]]
    texts = []
    for path in paths:
        try:
            texts.append((path.stat().st_mtime, path.read_bytes()[-_STACK_BYTES:]))
        except OSError:
            continue
    if not texts:
        return None
    return max(texts)[1].decode("utf-8", "replace") or None
