"""Group the stacks of hung ranks by similarity, and find the ranks that differ.

Input: the text that `faulthandler` wrote for each rank. Output: groups of ranks whose
main threads are at the same point of the code, and the ranks that block the others.
Source: grouping as in ByteRobust, arXiv:2509.16293, section 5.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from mjax.processes.progress import Phase

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x\w+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line \d+ in (?P<function>.+)$')
_DEPTH = 12
"""Number of compared frames, from the innermost."""
_WAITING = re.compile(r"(^|/)(jax/_src|jaxlib|mjax/processes)/")
"""Pattern of files whose functions wait for other ranks, on devices or in an
agreement."""

Frames = tuple[str, ...]
"""`file:function`, innermost first."""


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class Place:
    """Progress of a rank; a smaller value means less progress."""

    step: int
    phase: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The ranks that block a run, and the reason for this verdict."""

    ranks: tuple[int, ...]
    """Blocking ranks, ascending; empty if they are unknown."""
    reason: str


def frames(text: str) -> Frames:
    """Return the innermost frames of the main thread, without line numbers.

    faulthandler writes the main thread last.
    """
    found: list[str] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            found = []
        elif match := _FRAME.match(line):
            found.append(f"{match['file']}:{match['function']}")
    return tuple(found[:_DEPTH])


def groups(stacks: Mapping[int, Frames]) -> list[tuple[Frames, list[int]]]:
    """Return (frames, ranks) for each group of equal frames, largest group first."""
    found: dict[Frames, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        found.setdefault(stack, []).append(rank)
    return sorted(found.items(), key=lambda group: (-len(group[1]), group[1]))


def judge(
    places: Mapping[int, Place],
    stacks: Mapping[int, Frames],
    stopped: Sequence[int],
    mute: Sequence[int] = (),
) -> Verdict:
    """Find the ranks that block the others.

    The first rule that names any ranks decides: ranks that the kernel has stopped;
    ranks without an answer, if others answered; ranks whose interpreter lock is held,
    if it is free in others; ranks whose progress word is behind; ranks that do
    something else while others wait for each other; ranks whose stacks differ from the
    majority.

    A rank that exits while others are in a step has given up, perhaps because of one of
    them. It is compared with no other rank. Of more than two ranks, half or more are
    not behind: they wait in a collective that the others have left.

    Args:
      places: rank -> progress, for all ranks.
      stacks: rank -> frames, for the ranks that answered.
      stopped: ranks whose processes are stopped (SIGSTOP, a debugger).
      mute: ranks whose stacks lack LOCK_ANSWER, so their interpreter lock is held.
    """
    phases = {place.phase for place in places.values()}
    if Phase.EXIT in phases and phases & {Phase.STEP, Phase.EVAL}:
        rest = {r: at for r, at in places.items() if at.phase != Phase.EXIT}
        gone = ", ".join(str(rank) for rank in places if rank not in rest)
        verdict = judge(
            rest,
            {rank: stack for rank, stack in stacks.items() if rank in rest},
            [rank for rank in stopped if rank in rest],
            [rank for rank in mute if rank in rest],
        )
        reason = f"rank {gone} has given up, and the others do not differ"
        return verdict if verdict.ranks else Verdict(ranks=(), reason=reason)
    if stopped and len(stopped) < len(places):
        return Verdict(ranks=tuple(sorted(stopped)), reason="stopped by a signal")
    silent = sorted(places.keys() - stacks.keys())
    if silent and len(silent) < len(places):
        return Verdict(ranks=tuple(silent), reason="no answer to a request for stacks")
    if mute and len(mute) < len(places):
        reason = "the interpreter lock is held"
        return Verdict(ranks=tuple(sorted(mute)), reason=reason)
    furthest = max(places.values())
    behind = sorted(r for r, place in places.items() if place < furthest)
    if behind and len(behind) < len(places):
        least = min(places[rank] for rank in behind)
        last = tuple(rank for rank in behind if places[rank] == least)
        if len(places) == 2 or 2 * len(last) < len(places):
            return Verdict(ranks=last, reason="progress behind the others")
    others = sorted(
        rank
        for rank, frames in stacks.items()
        if frames and not _WAITING.search(frames[0])
    )
    if others and len(others) < len(stacks):
        reason = "does not wait as the others do"
        return Verdict(ranks=tuple(others), reason=reason)
    found = groups(stacks)
    if len(found) > 1 and len(found[0][1]) * 2 > len(stacks):
        odd = sorted(rank for _, ranks in found[1:] for rank in ranks)
        return Verdict(ranks=tuple(odd), reason="stacks differ from the majority")
    reason = "all ranks are at the same place"
    return Verdict(ranks=(), reason="the ranks only wait" if behind else reason)
