"""`python -m mjax.observe stuck`: which ranks hold up a run, and who waits for them.

    python -m mjax.observe stuck --work-dir DIR [--step-s S] [--json] [--out FILE]

Enters: a work dir. Leaves: ranks, host, phase and step of those to blame, the reason,
the members of their groups, and their stacks. Exit codes: 0 done, 2 bad input.

What is read of a rank, the best first: its progress word, which `python -m mjax.launch`
asks for; the last line of its spans; its stacks, from the launcher or from the watchdog
of slow steps; the state of its process, if that runs on this machine. The order of the
reasons is that of MegaScale (arXiv 2402.15627, section 5.2: the rank without a log is
the one that hangs), then that of `mjax.launch.stacks`. Nothing is sent to a process.
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mjax.launch import stacks
from mjax.launch.config import LimitsConfig
from mjax.observe import output
from mjax.observe.spans import FOLDER, Header, SpanFile, paths, read_run
from mjax.processes import progress
from mjax.processes.progress import LOCK_ANSWER, Phase, Word

_SAME_BOOT_S = 2.0
"""Difference of wall and monotonic clock that is one boot of one machine. Chosen: more
than what NTP corrects at once, far less than between two boots."""
_NUM_STEPS = 256
"""Last steps that say what is usual; as many as the launcher takes."""
_MOST_SHOWN = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What can be read of one rank."""

    rank: int
    host: str | None
    phase: Phase
    step: int
    age_s: float
    """Since it last made progress; infinite if nothing of it can be read."""
    has_stepped: bool
    """Its first step has ended."""
    code: int | None = None
    """Exit code, if it has ended orderly."""
    state: str = "?"
    """Letter of /proc/PID/stat, "gone" if there is no such process, "?" elsewhere."""
    stack: str = ""
    devices: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What the command says."""

    is_stuck: bool
    ranks: tuple[int, ...]
    reason: str
    seen: Mapping[int, Seen]
    groups: Mapping[str, Sequence[int]]
    """By axis, the ranks that share a group with those to blame."""
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        blamed = [self.seen[rank] for rank in self.ranks]
        hosts = sorted({one.host for one in blamed if one.host})
        first = min(blamed, key=lambda one: (one.step, one.rank), default=None)
        return {
            "ranks": [*self.ranks],
            "host": hosts[0] if len(hosts) == 1 else None,
            "phase": first.phase.name.lower() if first else None,
            "step": first.step if first else None,
            "is_stuck": self.is_stuck,
            "reason": self.reason,
            "hosts": hosts,
            "groups": {axis: [*ranks] for axis, ranks in self.groups.items()},
            "stacks": {str(one.rank): one.stack for one in blamed if one.stack},
            "seen": [_row(one) for one in self.seen.values()],
            "problems": [*self.problems],
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m mjax.observe stuck", description="Who holds up a run."
    )
    add = parser.add_argument
    add("--work-dir", type=Path, required=True, help="of the run")
    add("--step-s", type=float, default=30.0, help="a step may take so many seconds")
    add("--json", action="store_true", help="print one JSON object")
    add("--out", type=Path, help="write the JSON object there too")
    args = parser.parse_args(argv)
    try:
        if not 0 < args.step_s < math.inf:
            raise ValueError(
                f"--step-s must be finite and above 0, got {args.step_s:g}; name the "
                "seconds that a step may take"
            )
        found = report(args.work_dir, args.step_s)
        answer = json.dumps(found.to_json())
        if args.out is not None:
            output.write(args.out, answer + "\n")
    except ValueError as error:
        return output.refuse(error)
    print(answer if args.json else _text(found))
    return 0


def report(work_dir: Path, step_s: float = 30.0) -> Report:
    """Say who holds up the newest start of a run.

    Args:
      work_dir: of the run.
      step_s: that a step may take, at least.
    Raises:
      ValueError: nothing of a run is there.
    """
    files, words, folder, problems = _read(work_dir)
    num = _num_ranks(files, words)
    limits = LimitsConfig(step_s=step_s)
    now_ns = time.time_ns()
    seen = {
        rank: _see(rank, files.get(rank), words.get(rank), bool(words), now_ns)
        for rank in range(num)
    }
    traces, mute = _stacks(work_dir, folder, files, seen)
    seen = {
        rank: dataclasses.replace(one, stack=traces.get(rank, ""))
        for rank, one in seen.items()
    }
    usual_s = _p99_s(files)
    late = [one for one in seen.values() if one.age_s > _limit_s(one, limits, usual_s)]
    is_over = all(one.code is not None or one.state == "gone" for one in seen.values())
    ranks, reason = (), "all ranks go on"
    if is_over:
        is_killed = any(one.code is None for one in seen.values())
        told = "ended, or are gone without a last line" if is_killed else "ended"
        reason = f"all ranks have {told}"
    if late and not is_over:
        ranks, reason = _blame(seen, traces, mute)
    return Report(
        is_stuck=bool(late) and not is_over,
        ranks=tuple(ranks),
        reason=reason,
        seen=seen,
        groups=_groups(files, ranks),
        problems=tuple(problems),
    )


def _read(
    work_dir: Path,
) -> tuple[dict[int, SpanFile], dict[int, Word], Path | None, list[str]]:
    """Return spans, words and launch folder of the newest start."""
    if not work_dir.is_dir():
        raise ValueError(f"--work-dir must be a folder of a run, got {work_dir}")
    files: list[SpanFile] = []
    problems: list[str] = []
    if paths(work_dir / FOLDER):
        files, problems = read_run(work_dir)
    newest = max((found.header.generation for found in files), default=-1)
    last = {f.header.rank: f for f in files if f.header.generation == newest}
    folder = max((work_dir / "launch").glob("generation-*"), default=None)
    if folder is not None and last and any(f.header.launch for f in last.values()):
        number = int(folder.name.rpartition("-")[2])
        of_last = {f.header.launch.generation for f in last.values() if f.header.launch}
        if number not in of_last:  # a newer start, which has not begun its spans
            last = {}
    words = {}
    for path in sorted(folder.glob("progress-*")) if folder else ():
        rank = path.name.removeprefix("progress-")
        if not rank.isdigit():
            continue
        try:
            word = progress.read(path)
        except ValueError as error:
            problems.append(str(error))
            continue
        if word is not None:
            words[int(rank)] = word
    if not last and not words:
        raise ValueError(
            f"{work_dir} has no spans and no progress words; name the work dir of a "
            "run with --work-dir, one that was not started with --observe.no-spans"
        )
    return last, words, folder, problems


def _num_ranks(files: Mapping[int, SpanFile], words: Mapping[int, Word]) -> int:
    """Return how many ranks there should be."""
    num = max([*files, *words]) + 1
    for found in files.values():
        devices = math.prod(found.header.mesh.values())
        num = max(num, devices // max(1, len(found.header.devices)))
    return num


def _see(
    rank: int,
    found: SpanFile | None,
    word: Word | None,
    have_words: bool,
    now_ns: int,
) -> Seen:
    """Return what can be read of a rank."""
    header = found.header if found else None
    host = header.host if header else None
    code = found.lines[-1].end if found and found.lines else None
    if word is not None:
        said_ns = _wall_ns(header, word.monotonic_ns, now_ns)
        phase, step, first = word.phase, word.step, word.first_step_ns > 0
    elif found is not None and not have_words:
        steps = [line.step for line in found.lines]
        ends_ns = [span.end_ns for line in found.lines for span in line.spans]
        last_ns = max(ends_ns, default=found.header.monotonic_ns)
        said_ns = _wall_ns(header, last_ns, now_ns)
        # The line of a step is written after it, so the next one is under way.
        phase, step, first = Phase.STEP, max([*steps, 0]) + 1, max([*steps, 0]) > 0
    else:
        said_ns, phase, step, first = None, Phase.IMPORT, 0, False
    return Seen(
        rank=rank,
        host=host,
        phase=Phase.EXIT if code is not None else phase,
        step=step,
        age_s=math.inf if said_ns is None else max(0.0, (now_ns - said_ns) / 1e9),
        has_stepped=first,
        code=code,
        state=_state(header, now_ns) if header else "?",
        devices=header.devices if header else (),
    )


def _wall_ns(header: Header | None, monotonic_ns: int, now_ns: int) -> int:
    """Return a time of a host's monotonic clock by the wall clock."""
    if header is None:  # not begun its spans: taken for a process of this machine
        return now_ns - (time.monotonic_ns() - monotonic_ns)
    return header.wall_ns + monotonic_ns - header.monotonic_ns


def _state(header: Header, now_ns: int) -> str:
    """Return the state of the process, if it runs on this machine."""
    own_ns = now_ns - time.monotonic_ns()
    if abs(own_ns - (header.wall_ns - header.monotonic_ns)) > _SAME_BOOT_S * 1e9:
        return "?"
    try:
        text = Path(f"/proc/{header.pid}/stat").read_text()
    except OSError:
        return "gone" if Path("/proc/self/stat").exists() else "?"
    state = text.rpartition(")")[2].split()[0]
    return "gone" if state in "ZX" else state


def _limit_s(one: Seen, limits: LimitsConfig, usual_s: float) -> float:
    """Return how long a rank may be without progress, as the launcher does."""
    if one.code is not None:
        return math.inf
    if one.state == "gone":
        return 0.0
    if one.phase is not Phase.STEP:
        return getattr(limits, f"{one.phase.name.lower()}_s")
    if not one.has_stepped:
        return max(limits.first_step_s, limits.step_s)
    return max(limits.step_s, limits.factor * usual_s)


def _p99_s(files: Mapping[int, SpanFile]) -> float:
    """Return the 99th percentile of the last steps of the first rank with any."""
    for _, found in sorted(files.items()):
        steps = [s for line in found.lines for s in line.spans if s.name == "step"]
        if steps:
            times = [(s.end_ns - s.start_ns) / 1e9 for s in steps[-_NUM_STEPS:]]
            return float(np.quantile(times, 0.99, method="higher"))
    return 0.0


def _stacks(
    work_dir: Path,
    folder: Path | None,
    files: Mapping[int, SpanFile],
    seen: Mapping[int, Seen],
) -> tuple[dict[int, str], list[int]]:
    """Return the newest stacks of each rank, and ranks whose lock is held."""
    shown: dict[int, str] = {}
    for rank in seen if folder else ():
        text = _fresh(folder / f"stacks-{rank}.txt", seen[rank]) if folder else ""
        if text:
            shown[rank] = text
    if shown:
        return shown, [rank for rank, text in shown.items() if LOCK_ANSWER not in text]
    for rank, found in files.items():
        path = work_dir / "stacks" / f"{found.path.stem}.txt"
        if text := _fresh(path, seen[rank]):
            shown[rank] = text
    return shown, []


def _fresh(path: Path, one: Seen) -> str:
    """Return what was written after the last progress of a rank."""
    try:
        if path.stat().st_mtime < time.time() - one.age_s:
            return ""
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    return text[max(0, text.rfind("Timeout (")) :]


def _blame(
    seen: Mapping[int, Seen], traces: Mapping[int, str], mute: Sequence[int]
) -> tuple[Sequence[int], str]:
    """Return the ranks that the others wait for, and why."""
    alive = {rank: one for rank, one in seen.items() if one.code is None}
    failed = [rank for rank, one in seen.items() if one.code]
    for ranks, reason in (
        (failed, "ended while the others wait"),
        ([r for r, one in alive.items() if one.state == "gone"], "its process is gone"),
        ([r for r, one in alive.items() if one.age_s == math.inf], "it has no record"),
        (
            [rank for rank, one in seen.items() if one.code == 0],
            "ended while the others go on",
        ),
    ):
        if ranks and len(ranks) < len(seen):
            return ranks, reason
    places = {r: stacks.Place(step=s.step, phase=s.phase) for r, s in alive.items()}
    found = {rank: stacks.frames(traces[rank]) for rank in alive if rank in traces}
    # Watchdogs write at times of their own: without the stacks of all, whose are
    # missing says nothing.
    usable = found if len(found) == len(alive) else {}
    stopped = [rank for rank, one in alive.items() if one.state in "Tt"]
    verdict = stacks.judge(places, usable, stopped, [r for r in mute if r in usable])
    return verdict.ranks, verdict.reason


def _groups(
    files: Mapping[int, SpanFile], ranks: Sequence[int]
) -> dict[str, list[int]]:
    """Return by axis the other ranks in groups of those to blame."""
    if not files:
        return {}
    header = next(iter(files.values())).header
    names = list(header.mesh)
    rank_of = {d: rank for rank, f in files.items() for d in f.header.devices}
    shape = tuple(header.mesh.values())
    per_rank = len(header.devices)
    groups: dict[str, set[int]] = {}
    for rank in ranks:
        own = files[rank].header.devices if rank in files else ()
        # A rank without spans has the devices that its number says.
        for device in own or range(rank * per_rank, (rank + 1) * per_rank):
            at = list(np.unravel_index(device, shape))
            for index, name in enumerate(names):
                numbers = np.arange(math.prod(shape)).reshape(shape)
                line = numbers[(*at[:index], slice(None), *at[index + 1 :])]
                members = {rank_of.get(int(d), int(d) // per_rank) for d in line}
                groups.setdefault(name, set()).update(members - set(ranks))
    return {name: sorted(members) for name, members in groups.items() if members}


def _row(one: Seen) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "host": one.host,
        "phase": one.phase.name.lower(),
        "step": one.step,
        "age_s": None if math.isinf(one.age_s) else round(one.age_s, 3),
        "state": one.state,
        "code": one.code,
    }


def _text(found: Report) -> str:
    """Say it to people."""
    lines = [*found.problems]
    if not found.is_stuck:
        oldest = max(found.seen.values(), key=lambda one: one.age_s)
        lines.append(
            f"not stuck: {found.reason}; the oldest progress is that of rank "
            f"{oldest.rank} in {oldest.phase.name.lower()}, step {oldest.step}, "
            f"{oldest.age_s:.1f} s ago"
        )
        return "\n".join(lines)
    if not found.ranks:
        lines.append(f"stuck, and no rank is to blame: {found.reason}")
        return "\n".join(lines)
    for rank in found.ranks[:_MOST_SHOWN]:
        one = found.seen[rank]
        age = "nothing" if math.isinf(one.age_s) else f"{one.age_s:.1f} s ago"
        lines.append(
            f"rank {rank} on {one.host or 'an unknown host'} in "
            f"{one.phase.name.lower()}, step {one.step}: {found.reason}; last "
            f"progress: {age}"
        )
    more = len(found.ranks) - _MOST_SHOWN
    lines += [f"and {more} more"] if more > 0 else []
    for axis, ranks in found.groups.items():
        told = ", ".join(map(str, ranks[:_MOST_SHOWN]))
        rest = f" and {len(ranks) - _MOST_SHOWN} more" if len(ranks) > 8 else ""
        lines.append(f"waiting for them in {axis}: rank {told}{rest}")
    for rank in found.ranks[:_MOST_SHOWN]:
        if stack := found.seen[rank].stack:
            lines += ["", f"stack of rank {rank}:", stack.rstrip()]
    return "\n".join(lines)
