"""Account for the wall time of a launched run from the events of its driver.

Input: the events of `events.jsonl`. Output: seconds by part, and the time that no
event explains. The events of kind `state` cover the time from the start of the first
driver process.

In each generation one rank is counted. This is rank 0, unless the driver knows no state
of rank 0 when the generation ends; then it is the lowest rank whose state the driver
knows. While the counted rank runs, its progress word records the seconds of each phase,
by the clock of the rank's host. The driver sees the rank run for longer, because two
messages take time:

- the order of the driver to start the rank. The delay of the order ends when the host
  requests the start of the rank. The driver knows an upper bound of that time;
- the report of the host that the rank has ended. The delay of the report is the rest of
  the difference between the two durations.

A delay that is negative, or longer than `_MESSAGE_S`, is `unexplained`.

Steps after the newest saved step of a failed generation are lost. The spans of these
steps give the lost time. Without spans, all steps of a generation are assumed to take
equally long. Spans also show what a rank did while its host was out of contact. If a
rank hung or waited for a rank that hung, the time since its last report is `hung`, not
step time. While a rank exits, it reports nothing for seconds. This silence counts as a
hang only if the driver asked for stacks.
"""

import collections
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec

from mjax.observe import event_clock
from mjax.observe.event_clock import BEGAN, Timed
from mjax.observe.events import DRIVER, Event

GATHERING = "waiting for hosts"
RUNNING = "running"
STACKS = "collecting stacks"
STOPPING = "ending the ranks"
ENDED = "ended"
"""Texts of events of kind `state`, see `mjax.launch.supervisor.State`."""
_RANKS_LIVE = (RUNNING, STACKS, STOPPING)
ALONE = "no driver"
"""Name of the part in which no driver ran, and either no rank ran, or ranks had ended
and no driver noticed it."""
UNEXPLAINED = "unexplained"
MOST_UNEXPLAINED = 0.005
"""Largest unexplained share of the wall time that is not reported as a problem. The
benchmark of the ledger has the same bound (docs/benchmarks/observe_ledger.md)."""
_CLOSED = "closed"
_SILENT = "host silent"
_KEPT, _LOST = "productive steps", "lost steps"
_START = ("import", "init", "build", "compile", "restore")
_HUNG_S = 1.0
"""Seconds of silence after which a rank counts as hung. A rank reports several times a
second, except during a long step. A rank that ends during a long step is wrongly
counted as hung; this is rare."""
_STARTING = "driver: starting"
_MESSAGE_S = 1.0
"""Longest usual delay of an order to start a rank, or of the report that a rank has
ended. It is twice the pause after which an agent tries again to connect to its driver.
A longer delay has another cause."""


type Seen = Callable[[float], Mapping[str, float]]
"""Function of a time t: part -> seconds that the part took in the first t seconds after
the first span of a start."""


class _Spent(msgspec.Struct, frozen=True, kw_only=True):
    """Data of an event of kind `times`, see `mjax.launch.times`."""

    spent_s: dict[str, float]
    phase: str
    age_s: float
    silent_s: float
    start_step: int
    step: int
    asked_s: float | None = None
    """Upper bound of the time at which the rank's start was requested on its host, by
    the driver's monotonic clock."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted:
    """Wall time of a run by part."""

    parts: Mapping[str, float]
    """Seconds by part."""
    num_starts: int
    """Number of starts of the ranks."""
    num_lost_steps: int
    """Number of steps that a later start repeated. A step that was lost twice counts
    twice."""
    problems: tuple[str, ...]


@dataclasses.dataclass(kw_only=True)
class _Life:
    """The time in which the counted rank of a generation ran, as seen by the driver.

    All times are in seconds, on the clock of `event_clock`.
    """

    first_s: float
    last_s: float = 0.0
    total_s: float = 0.0
    gaps: list[tuple[str, float, float]] = dataclasses.field(default_factory=list)
    """(part, start, end) of each period in which no driver could notice the end of a
    rank."""


def has_ended(events: Sequence[Event]) -> bool:
    """Return whether the driver has ended the run and no later launch has begun."""
    told = [event for event in events if event.source == DRIVER]
    states = [event.text for event in told if event.kind in ("state", BEGAN)]
    return bool(states) and states[-1] == ENDED


def counted(events: Sequence[Event], seen: Mapping[int, Seen] | None = None) -> Counted:
    """Return the wall time of an ended run by part; the parts add up to the total.

    Args:
      events: events of one work dir, oldest first; only those of the driver are used.
      seen: by generation, the times that spans of a rank show; a generation without
        spans is absent.
    Raises:
      ValueError: there is no event of kind `state`, or the events are from two
        journals.
    """
    events = [event for event in events if event.source == DRIVER]
    _check(events)
    timed, problems = event_clock.timed(events)
    spent = _rank_times(timed)
    parts, lives = _driver_times(timed, {n: one.event.rank for n, one in spent.items()})
    found = {number: _spent(one.event) for number, one in spent.items()}
    kept = kept_steps({number: of.start_step for number, of in found.items()})
    asked = {e.generation for e in events if e.kind == "state" and e.text == STACKS}
    unexplained: dict[int, float] = {}
    for number, life in lives.items():
        own: dict[str, float] = {}
        asked_s = None
        if number in found:
            of = found[number]
            own = _of_rank(of, number, kept, may_exit=number not in asked)
            if seen is not None and number in seen:
                own = _with_spans(own, seen[number], is_first=number == min(kept))
            asked_s = spent[number].place_s(of.asked_s)
        own |= _on_the_way(life, sum(own.values(), 0.0), asked_s)
        unexplained[number] = abs(own[UNEXPLAINED])
        for part, part_s in own.items():
            parts[part] += part_s
    if sum(unexplained.values()) > MOST_UNEXPLAINED * sum(parts.values()):
        worst = max(unexplained, key=unexplained.__getitem__)
        problems.append(
            f"{unexplained[worst]:.1f} s of generation {worst} are not explained: an "
            "event is missing, or the clock jumped"
        )
    problems += [
        f"generation {number} has no event of its start: its steps are not counted"
        for number in sorted(found.keys() - lives.keys())
    ]
    return Counted(
        parts=dict(parts),
        num_starts=len(lives),
        num_lost_steps=sum(_num_lost(of, kept[n]) for n, of in found.items()),
        problems=tuple(problems),
    )


def kept_steps(begins: Mapping[int, int]) -> dict[int, int]:
    """Return, by start, the last step whose work was kept.

    A later start repeats all steps after its initial step. So the last kept step is the
    smallest initial step of all later starts that ran steps. Without such a later
    start, all steps are kept, and the result is `sys.maxsize`.

    Args:
      begins: for each start, the step of its initial state; -1 if it ran no steps.
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
        if event.generation is None:
            raise ValueError(
                f"events.jsonl, event {event.number}: a driver's event needs a "
                "generation, got null; restore the file, or move it away"
            )
        if event.generation < newest:
            raise ValueError(
                f"events.jsonl goes back from generation {newest} to "
                f"{event.generation}: it has two launches, each with a journal of its "
                "own; move the events of the older one to another folder"
            )
        newest = event.generation


def _generation(event: Event) -> int:
    """Return the generation of an event that `_check` has accepted."""
    assert event.generation is not None
    return event.generation


def _rank_times(timed: Sequence[Timed]) -> dict[int, Timed]:
    """Return by generation the event with the times that the counted rank reported."""
    return {_generation(of.event): of for of in timed if of.event.kind == "times"}


def _spent(event: Event) -> _Spent:
    try:
        return msgspec.convert(event.data, _Spent)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"events.jsonl, generation {event.generation}: the event times "
            f"cannot be read ({error}); use the mjax that wrote it"
        ) from error


def _driver_times(
    timed: Sequence[Timed], ranks: Mapping[int, int | None]
) -> tuple[dict[str, float], dict[int, _Life]]:
    """Return the seconds in which no counted rank ran, and those in which one ran.

    Args:
      timed: the events.
      ranks: the counted rank by generation; if absent or None, rank 0 is counted.
    Returns:
      seconds without a counted rank, by part; and the life of the counted rank, by
      generation.
    """
    parts: dict[str, float] = collections.defaultdict(float)
    lives: dict[int, _Life] = {}
    ended: set[int] = set()
    state, since_s, generation = GATHERING, timed[0].began_s, 0
    heard_s = since_s  # the last time at which a driver was known to run
    for one in timed:
        event = one.event
        number = _generation(event)
        is_end = event.kind == "rank_end" and event.rank == (ranks.get(number) or 0)
        if is_end or event.kind in ("state", "end", BEGAN, _CLOSED):
            lives_on = state in _RANKS_LIVE and generation not in ended
            lives_on &= generation in lives
            if lives_on:
                life = lives[generation]
                life.last_s = one.at_s
                life.total_s += one.at_s - since_s
                if event.kind == BEGAN:
                    life.gaps.append((ALONE, heard_s, one.began_s))
                    life.gaps.append((_STARTING, one.began_s, one.at_s))
            elif event.kind == BEGAN:
                parts[_part(state)] += heard_s - since_s
                parts[ALONE] += one.began_s - heard_s
                parts[_STARTING] += one.at_s - one.began_s
            elif event.kind == _CLOSED:
                parts["driver: leaving"] += one.at_s - since_s
            else:
                parts[_part(state)] += one.at_s - since_s
            since_s, generation = one.at_s, number
            if event.kind == "state":
                state = event.text
            if is_end:
                ended.add(number)
            elif state == RUNNING and number not in lives:
                lives[number] = _Life(first_s=one.at_s)
        heard_s = one.at_s
    return parts, lives


def _part(state: str) -> str:
    """Return the part for a driver's state while no counted rank runs."""
    return f"driver: {STOPPING if state in _RANKS_LIVE else state}"


def _on_the_way(life: _Life, known_s: float, asked_s: float | None) -> dict[str, float]:
    """Return, by part, the seconds of a rank's life that the rank did not report.

    Args:
      life: the rank's life as the driver saw it.
      known_s: time that the rank reported, by the clock of its own host.
      asked_s: upper bound of the time of the start request; None: unknown.
    """
    left_s = life.total_s - known_s
    if asked_s is None:
        return {UNEXPLAINED: left_s}
    # `asked_s` is an upper bound, because the rank's first report also took time.
    order_s = min(max(0.0, asked_s - life.first_s), max(0.0, left_s))
    news_s = left_s - order_s
    ended_s = life.last_s - news_s
    found = {ALONE: 0.0, _STARTING: 0.0, UNEXPLAINED: 0.0}
    for part, begin_s, end_s in life.gaps:
        gap_s = max(0.0, end_s - max(begin_s, ended_s))
        found[part] += gap_s
        news_s -= gap_s
    for part, part_s in (("order", order_s), ("news of an end", news_s)):
        is_usual = 0.0 <= part_s <= _MESSAGE_S
        found[f"driver: {part} on its way"] = part_s if is_usual else 0.0
        found[UNEXPLAINED] += 0.0 if is_usual else part_s
    return found


def _with_spans(
    own: dict[str, float], seen: Seen, *, is_first: bool
) -> dict[str, float]:
    """Refine the parts by the spans of a start; the sum stays the same.

    A rank keeps running while its host is out of contact, and the spans show what the
    rank did meanwhile. Spans also give the duration of each step. Step time after the
    last kept step is lost, including the time of steps that had not ended.
    """
    kind = "start: " if is_first else "restart: "

    def until(limit_s: float) -> dict[str, float]:
        return {
            kind + part.partition(": ")[2] if ": " in part else part: part_s
            for part, part_s in seen(limit_s).items()
            if part != UNEXPLAINED
        }

    all_s = until(math.inf)
    if _SILENT in own:
        importing = f"{kind}import"
        # Spans do not cover the start of the process.
        before_s = max(0.0, own[importing] - all_s.get(importing, 0.0))
        total_s = sum(own.values())
        found = until(total_s - before_s)
        found[importing] = found.get(importing, 0.0) + before_s
        left_s = total_s - sum(found.values())
        return found | {_SILENT: left_s} if left_s <= own[_SILENT] else own
    kept_s = all_s.get(_KEPT, 0.0)
    step_s = own[_KEPT] + own[_LOST]
    if own[_LOST] and kept_s:
        kept_s = min(kept_s, step_s)
        return own | {_KEPT: kept_s, _LOST: step_s - kept_s}
    return own


def _num_lost(found: _Spent, kept: int) -> int:
    if found.start_step < 0:
        return 0
    return max(0, found.step - max(found.start_step, kept))


def _of_rank(
    found: _Spent, generation: int, kept: Mapping[int, int], *, may_exit: bool
) -> dict[str, float]:
    """Return, by part, the seconds of the counted rank in one generation."""
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
        parts[_SILENT] = found.silent_s
    num_taken = found.step - found.start_step
    num_lost = _num_lost(found, kept[generation])
    share = num_lost / num_taken if num_taken > 0 else 0.0
    step_s = spent.pop("step", 0.0)
    parts |= {_LOST: share * step_s, _KEPT: (1 - share) * step_s}
    return parts | spent
