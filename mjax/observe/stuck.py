"""`python -m mjax.observe stuck`: which ranks block a run, and who waits for them.

    python -m mjax.observe stuck --work-dir DIR [--step-s S] [--eval-s S] [--save-s S]
                                 [--json] [--out FILE]

Input: a work dir. Output: the ranks to blame, with host, phase and step, the reason,
the members of their groups, and their stacks. Exit codes: 0 done, 2 bad input.

Sources for each rank, the best first: its beats, with its progress, the stack of its
main thread, and whether it is alive; its progress word, which `python -m mjax.launch`
requests; the last line of its spans; its stacks, from the launcher or from the watchdog
of slow steps; the state of its process, if it runs on this machine. Reasons are ordered
as in MegaScale (arXiv 2402.15627, section 5.2: the rank without a log is the one that
hangs), then as in `mjax.launch.stacks`. No process is signalled.
"""

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mjax.cli.flags.standard import ArgumentParser
from mjax.launch import stacks
from mjax.launch.config import LimitsConfig
from mjax.observe import beats, output
from mjax.observe import seen as seen_
from mjax.observe.seen import Records, Seen
from mjax.observe.spans import Header, SpanFile
from mjax.processes.progress import LOCK_ANSWER, Phase

_NUM_STEPS = 256
"""Number of last steps from which the usual time is computed, as in the launcher."""
_MOST_SHOWN = 8
_BEFORE_S = 5.0
"""A rank that made no progress for this many seconds before others ended is to blame.
Beats come every second, and a rank that waits for a killed one stops later."""
_LIMITED = {"step": "a step", "eval": "a batch of an evaluation", "save": "a save"}
"""Phases whose time limit is a flag, with a description of what is limited."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Result of the command."""

    is_stuck: bool
    ranks: tuple[int, ...]
    reason: str
    seen: Mapping[int, Seen]
    limits_s: Mapping[int, float]
    """Seconds without progress that each rank may take; infinite if it has ended."""
    groups: Mapping[str, Sequence[int]]
    """Ranks that share a group with the ranks to blame, by axis."""
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
    parser = ArgumentParser(
        prog="python -m mjax.observe stuck",
        description="Show which ranks block a run, and who waits for them.",
    )
    add = parser.add_argument
    add("--work-dir", type=Path, required=True, help="work dir of the run")
    for name, what in _LIMITED.items():
        add(f"--{name}-s", type=float, help=f"longest time for {what}, in seconds")
    add("--json", action="store_true", help="print one JSON object")
    add("--out", type=Path, help="also write the JSON object to this file")
    args = parser.parse_args(argv)
    try:
        given = {name: getattr(args, f"{name}_s") for name in _LIMITED}
        limits_s = {name: limit for name, limit in given.items() if limit is not None}
        found = report(args.work_dir, limits_s=limits_s)
        answer = json.dumps(found.to_json())
        if args.out is not None:
            output.write(args.out, answer + "\n")
    except ValueError as error:
        return output.refuse(error)
    print(answer if args.json else _text(found))
    return 0


def report(
    work_dir: Path,
    spans: Sequence[SpanFile] | None = None,
    limits_s: Mapping[str, float] | None = None,
) -> Report:
    """Find the ranks that block the newest start of a run.

    If some ranks seem to block it, this waits some seconds for the next beats.

    Args:
      work_dir: work dir of the run.
      spans: span files, if already read: the newest lines of each rank, and 256 steps
        of the lowest rank.
      limits_s: time limits of `step`, `eval` and `save`; absent ones are replaced by
        the launcher's limits.
    Raises:
      ValueError: there is no record of a run, or a limit is not a positive finite
        number.
    """
    limits_s = limits_s or {}
    for name, limit_s in limits_s.items():
        if not 0 < limit_s < math.inf:
            raise ValueError(
                f"--{name}-s must be finite and above 0, got {limit_s:g}; give the "
                f"longest time for {_LIMITED[name]}, in seconds"
            )
    records = seen_.read(work_dir, spans)
    usual_s = 0.0 if "step" in limits_s else _p99_s(records.spans)
    limits = LimitsConfig(**{f"{name}_s": limit for name, limit in limits_s.items()})
    seen = seen_.see(records)
    if records.beats and _late(seen, limits, usual_s) and not _is_over(seen):
        records = seen_.look_again(work_dir, records)
        seen = seen_.see(records)
    traces, mute = _stacks(work_dir, records, seen)
    seen = {
        rank: dataclasses.replace(one, stack=traces.get(rank, ""))
        for rank, one in seen.items()
    }
    late = _late(seen, limits, usual_s)
    is_stuck, ranks, reason = False, (), "all ranks make progress"
    if _is_over(seen):
        is_killed = any(one.code is None for one in seen.values())
        told = "ended, or disappeared without a last line" if is_killed else "ended"
        reason = f"all ranks have {told}"
    elif late:
        is_stuck, (ranks, reason) = True, _blame(seen, traces, mute)
        if ranks and all(seen[r].code is None and r not in late for r in ranks):
            # The blocking rank is within its own limit.
            limit_s = _limit_s(seen[ranks[0]], limits, usual_s)
            is_stuck, reason, ranks = False, _patience(seen, ranks, limit_s), ()
    return Report(
        is_stuck=is_stuck,
        ranks=tuple(ranks),
        reason=reason,
        seen=seen,
        limits_s={rank: _limit_s(one, limits, usual_s) for rank, one in seen.items()},
        groups=_groups(records.headers, ranks),
        problems=records.problems,
    )


def _late(
    seen: Mapping[int, Seen], limits: LimitsConfig, usual_s: float
) -> tuple[int, ...]:
    """Return the ranks that should have made progress by now.

    Ranks do not write their first records at the same time. A rank without records is
    late only if others are late or have ended.
    """
    late = tuple(
        rank for rank, one in seen.items() if one.age_s > _limit_s(one, limits, usual_s)
    )
    waits = any(math.isfinite(seen[rank].age_s) for rank in late)
    return late if waits or any(one.code is not None for one in seen.values()) else ()


def _is_over(seen: Mapping[int, Seen]) -> bool:
    return all(one.code is not None or one.state == "gone" for one in seen.values())


def _patience(seen: Mapping[int, Seen], ranks: Sequence[int], limit_s: float) -> str:
    """Describe which rank the others wait for, although it is not late."""
    first = seen[ranks[0]]
    named = ", ".join(map(str, ranks[:_MOST_SHOWN]))
    return (
        f"the others wait for rank {named}, which has been in "
        f"{first.phase.name.lower()} for {first.age_s:.1f} s, within its limit of "
        f"{limit_s:.3g} s"
    )


def _limit_s(one: Seen, limits: LimitsConfig, usual_s: float) -> float:
    """Return the allowed seconds without progress of a rank, as in the launcher."""
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
    """Return the 99th percentile of the last step times of the lowest rank with steps.

    0 if no rank has steps.
    """
    for _, found in sorted(files.items()):
        steps = [s for line in found.lines for s in line.spans if s.name == "step"]
        if steps:
            times = [(s.end_ns - s.start_ns) / 1e9 for s in steps[-_NUM_STEPS:]]
            return float(np.quantile(times, 0.99, method="higher"))
    return 0.0


def _stacks(
    work_dir: Path, records: Records, seen: Mapping[int, Seen]
) -> tuple[dict[int, str], list[int]]:
    """Return each rank's newest stacks, and the ranks with a held interpreter lock."""
    shown: dict[int, str] = {}
    folder = records.launch
    for rank in seen if folder else ():
        text = _fresh(folder / f"stacks-{rank}.txt", seen[rank]) if folder else ""
        if text:
            shown[rank] = text
    if shown:
        return shown, [rank for rank, text in shown.items() if LOCK_ANSWER not in text]
    for rank, header in records.headers.items():
        beat = records.beats.get(rank)
        # The watchdog works without the interpreter lock; a beat needs it.
        path = work_dir / "stacks" / f"{beats.stem(header)}.txt"
        text = _fresh(path, seen[rank])
        if beat is not None and beat.stack and (seen[rank].is_beating or not text):
            text = beat.stack
        if text:
            shown[rank] = text
    return shown, []


def _fresh(path: Path, one: Seen) -> str:
    """Return the stacks of a rank that were written after its last progress."""
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
    silent = [rank for rank, one in alive.items() if one.is_beating is False]
    if silent and len(silent) == len(alive):  # no rank is left to wait for others
        return (
            (),
            "no rank shows a sign of life: all have ended, were killed or are lost",
        )
    if before := _stood_before(seen):
        before = [rank for rank in before if rank in silent] or before
        if len(before) > 1 and len(before) == len(alive):
            ended = ", ".join(str(rank) for rank in seen if rank not in alive)
            return (), (
                f"all other ranks stopped before rank {ended} ended, and none of them "
                "differs"
            )
        is_stopped = all(seen[rank].state in "Tt" for rank in before)
        reason = "stopped by a signal" if is_stopped else "it made no progress"
        return before, f"{reason}, and others ended later"
    for ranks, reason in (
        (failed, "ended while the others wait"),
        ([r for r, one in alive.items() if one.state == "gone"], "its process is gone"),
        ([r for r, one in alive.items() if one.age_s == math.inf], "it has no record"),
        (
            [rank for rank, one in seen.items() if one.code == 0],
            "ended while the others run",
        ),
    ):
        if ranks and len(ranks) < len(seen):
            return ranks, reason
    stopped = [rank for rank, one in alive.items() if one.state in "Tt"]
    if silent and not stopped:
        return silent, (
            "it shows no sign of life: its interpreter lock is held, or it is stopped "
            "or lost"
        )
    places = {rank: _place(one) for rank, one in alive.items()}
    if any(one.entered is None for one in alive.values()):
        places = {r: stacks.Place(step=s.step, phase=s.phase) for r, s in alive.items()}
    found = {rank: stacks.frames(traces[rank]) for rank in alive if rank in traces}
    # Watchdogs write at different times, so a missing stack means something only if all
    # others exist.
    usable = found if len(found) == len(alive) else {}
    verdict = stacks.judge(places, usable, stopped, [r for r in mute if r in usable])
    return verdict.ranks, verdict.reason


def _stood_before(seen: Mapping[int, Seen]) -> list[int]:
    """Return live ranks that stopped well before the first of the others ended.

    Ranks that wait for another one give up after a time and end with an error. A rank
    is returned if it is silent, or if it has begun fewer operations than all ended
    ranks.
    """
    ended = [one for one in seen.values() if one.code or one.state == "gone"]
    places = [one.entered for one in ended if one.entered is not None]
    quiet_s = [one.quiet_s for one in ended if one.quiet_s is not None]
    if not ended or len(places) < len(ended) or len(quiet_s) < len(ended):
        return []
    found = []
    for rank, one in seen.items():
        if one.code is not None or one.state == "gone" or one.entered is None:
            continue
        stands_s = one.quiet_s if one.is_beating is False else one.age_s
        is_behind = one.is_beating is False or one.entered < min(places)
        if is_behind and stands_s is not None and stands_s > max(quiet_s) + _BEFORE_S:
            found.append(rank)
    return found


def _place(one: Seen) -> stacks.Place:
    """Return the progress of a rank with beats, comparable as in the launcher."""
    entered, microstep = one.entered or (0, 0)
    return stacks.Place(step=entered, phase=microstep)


def _groups(
    headers: Mapping[int, Header], ranks: Sequence[int]
) -> dict[str, list[int]]:
    """Return, by axis, the other ranks in the groups of the ranks to blame."""
    if not headers:
        return {}
    header = next(iter(headers.values()))
    names = list(header.mesh)
    rank_of = {d: rank for rank, h in headers.items() for d in h.devices}
    shape = tuple(header.mesh.values())
    per_rank = len(header.devices)
    groups: dict[str, set[int]] = {}
    for rank in ranks:
        own = headers[rank].devices if rank in headers else ()
        # The devices of a rank without spans follow from its number.
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
        "doing": one.doing,
        "is_beating": one.is_beating,
        "age_s": None if math.isinf(one.age_s) else round(one.age_s, 3),
        "state": one.state,
        "code": one.code,
    }


def _text(found: Report) -> str:
    """Return the report as text for people."""
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
        lines.append(f"stuck; the rank to blame is unknown: {found.reason}")
        return "\n".join(lines)
    for rank in found.ranks[:_MOST_SHOWN]:
        one = found.seen[rank]
        doing = f" ({one.doing})" if one.doing else ""
        # A rank that has ended has no limit.
        limit_s = found.limits_s[rank]
        limit = f", the limit is {limit_s:.3g} s" if 0 < limit_s < math.inf else ""
        age = "nothing" if math.isinf(one.age_s) else f"{one.age_s:.1f} s ago"
        lines.append(
            f"rank {rank} on {one.host or 'an unknown host'} in "
            f"{one.phase.name.lower()}, step {one.step}{doing}: {found.reason}; last "
            f"progress: {age}{limit}"
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
