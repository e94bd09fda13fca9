"""Where the wall time of a launched run went, from the events of its driver alone.

Enters: the events of `events.jsonl`. Leaves: seconds by part, and what no event
explains. The driver's states tile the time of the run. While rank 0 runs, the time is
that of the rank, by the clock of its own host: the phases that it counted in its
progress word. What is left between the two is reported as `unexplained`.

Steps after the newest saved step of a generation that failed are lost: of the time in
steps their share counts as lost. The time since the last mark of a rank that hung, or
that waited for one, is no step. In its exit a rank says nothing for seconds: that is a
hang only if the driver asked for stacks.
"""

import collections
import sys
from collections.abc import Mapping, Sequence

import msgspec

from mjax.observe.events import DRIVER, Event

GATHERING = "waiting for hosts"
RUNNING = "running"
STACKS = "collecting stacks"
STOPPING = "ending the ranks"
ENDED = "ended"
"""These are texts of events of kind `state`, see `mjax.launch.supervisor.State`."""
_RANKS_LIVE = (RUNNING, STACKS, STOPPING)
_START = ("import", "init", "build", "compile", "restore")
_HUNG_S = 1.0
"""A rank that has said nothing for longer hung. Chosen: it says something several times
a second, but in one long step; that its last step may have been a long one is rare."""


class _Spent(msgspec.Struct, frozen=True, kw_only=True):
    """Data of an event of kind `times`, see `mjax.launch.times`."""

    spent_s: dict[str, float]
    phase: str
    age_s: float
    silent_s: float
    start_step: int
    step: int


def has_ended(events: Sequence[Event]) -> bool:
    """Say whether the driver has ended the run, and no further launch has begun."""
    states = [event.text for event in events if event.kind == "state"]
    return bool(states) and states[-1] == ENDED


def seconds(events: Sequence[Event]) -> dict[str, float]:
    """Return the seconds of a run that has ended, by part; they add up to its time.

    Args:
      events: of one work dir, oldest first; those of others than the driver are passed
        over.
    Raises:
      ValueError: there are no states, or events of two journals.
    """
    events = [event for event in events if event.source == DRIVER]
    spent = _rank_times(events)
    _check(events)
    parts, live_s = _driver_times(events)
    kept = kept_steps({number: of.start_step for number, of in spent.items()})
    asked = {e.generation for e in events if e.kind == "state" and e.text == STACKS}
    for number, of in spent.items():
        found = _of_rank(of, number, kept, may_exit=number not in asked)
        live_s[number] -= sum(found.values())
        for part, part_s in found.items():
            parts[part] += part_s
    parts["unexplained"] = sum(live_s.values())
    return dict(parts)


def kept_steps(begins: Mapping[int, int]) -> dict[int, int]:
    """Return, by start, the last step whose work was kept.

    That is where the earliest of all later starts that took steps has begun.

    Args:
      begins: by start: the step that its state had seen; -1 if it took none.
    """
    kept, following = {}, sys.maxsize
    for number in sorted(begins, reverse=True):
        kept[number] = following
        if begins[number] >= 0:
            following = min(following, begins[number])
    return kept


def _check(events: Sequence[Event]) -> None:
    if not any(event.kind == "state" for event in events):
        raise ValueError("events.jsonl has no event of kind state; no launch ran there")
    newest = 0
    for event in events:
        if event.generation < newest:
            raise ValueError(
                f"events.jsonl goes back from generation {newest} to "
                f"{event.generation}: it has two launches, each with a journal of its "
                "own; move the events of the older one to another folder"
            )
        newest = event.generation


def _rank_times(events: Sequence[Event]) -> dict[int, _Spent]:
    """Return what rank 0 counted, by generation."""
    found = {}
    for event in events:
        if event.kind == "times":
            try:
                found[event.generation] = msgspec.convert(event.data, _Spent)
            except msgspec.ValidationError as error:
                raise ValueError(
                    f"events.jsonl, generation {event.generation}: the event times "
                    f"cannot be read ({error}); use the mjax that wrote it"
                ) from error
    return found


def _driver_times(
    events: Sequence[Event],
) -> tuple[dict[str, float], dict[int, float]]:
    """Return the seconds by state, and those by generation in which rank 0 ran."""
    parts: dict[str, float] = collections.defaultdict(float)
    live_s: dict[int, float] = collections.defaultdict(float)
    state, since_ns, generation = GATHERING, events[0].time_ns, 0
    has_rank_0 = False
    for event in events:
        is_end = event.kind == "rank_end" and event.rank == 0
        if not is_end and event.kind not in ("state", "end"):
            continue
        state_s = (event.time_ns - since_ns) / 1e9
        if state in _RANKS_LIVE and has_rank_0:
            live_s[generation] += state_s
        elif state in _RANKS_LIVE:
            parts[f"driver: {STOPPING}"] += state_s
        else:
            parts[f"driver: {state}"] += state_s
        since_ns, generation = event.time_ns, event.generation
        if event.kind == "state":
            state = event.text
        has_rank_0 = not is_end and (has_rank_0 or state == RUNNING)
        has_rank_0 &= state in _RANKS_LIVE
    return parts, live_s


def _of_rank(
    found: _Spent, generation: int, kept: Mapping[int, int], *, may_exit: bool
) -> dict[str, float]:
    """Return the seconds of rank 0 in one generation, by part."""
    spent = collections.defaultdict(float, found.spent_s)
    parts = {}
    kind = "start" if generation == min(kept) else "restart"
    for phase in _START:
        parts[f"{kind}: {phase}"] = spent.pop(phase, 0.0)
    is_exit = found.phase == "exit" and may_exit
    if found.age_s > _HUNG_S and found.phase in spent and not is_exit:
        spent[found.phase] -= found.age_s
        parts["hung"] = found.age_s
    if found.silent_s:
        parts["host silent"] = found.silent_s
    first, last = found.start_step, found.step
    num_taken, num_lost = last - first, max(0, last - max(first, kept[generation]))
    share = num_lost / num_taken if num_taken > 0 else 0.0
    step_s = spent.pop("step", 0.0)
    parts |= {"lost steps": share * step_s, "productive steps": (1 - share) * step_s}
    return parts | spent
