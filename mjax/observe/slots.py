"""The slots of a pipeline in a run: whether and when each one ran.

Input: some steps of all ranks on one clock, profiler windows of these steps, and the
schedule that the run recorded. Output: a bar for each slot, the transfers between
stages, and every disagreement between stamps, windows and schedule.

A stamp gives the start of a tick. The schedule gives the work of a stage in the tick.
If a step was recorded with the profiler, its operations show which slots ran, and when.
An idle slot that is skipped has no operations. An idle slot that is computed
(`--pipeline.idle compute`) has the same operations as a used one, so windows do not
distinguish them.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from mjax.observe import schedule as schedules
from mjax.observe.merged import Merged, Rank
from mjax.observe.places import coordinates, device_of
from mjax.observe.schedule import DIRECTIONS, Direction, Schedule, Slot, Work
from mjax.observe.spans import Header, Span
from mjax.observe.windows import folders
from mjax.observe.windows.placed import Placed
from mjax.observe.windows.read import read

PIPELINE = "pp"
"""Axis of the mesh, and the role of communication between stages."""
_ROLES: tuple[Literal["pp", "dp"], ...] = ("pp", "dp")
TICK = "tick"
"""Name of the spans of ticks."""
APART_NS = 2_000_000
"""Operations may lie this far outside of the stamps of their tick. A stamp on a CPU is
a callback that takes half a millisecond, or more if the cores are busy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """A slot of a device in a step."""

    rank: int
    device: int
    step: int
    slot: Slot
    work: Work | None
    """Work by the schedule; None: the slot is idle."""
    start_ns: int
    end_ns: int
    is_measured: bool
    """Whether the times are those of its operations; otherwise they are those of its
    tick."""

    @property
    def name(self) -> str:
        """Name of the slot, for people."""
        return schedules.label(self.slot, self.work)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """Time in a tick in which a device communicates or waits for its partners."""

    rank: int
    device: int
    step: int
    tick: int
    direction: Direction
    role: Literal["pp", "dp"]
    """`pp`: communication with another stage; `dp`: gathers of weights and reductions
    of gradients over the replicas."""
    start_ns: int
    end_ns: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
    """The slots of one device in one recorded step, by its operations alone."""

    rank: int
    device: int
    stage: int
    step: int
    ran: Mapping[tuple[Direction, int], tuple[int, int]]
    """Start and end of each slot that ran, by direction and tick."""
    ticks: Mapping[int, tuple[int, int]]
    """(start of the first operation, end of the last one) of each tick."""
    transfers: tuple[Transfer, ...]
    is_computed: bool
    """Whether idle slots are computed too; then operations do not show which are
    idle."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """The slots of some steps."""

    schedule: Schedule | None
    bars: tuple[Bar, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    problems: tuple[str, ...] = ()


def stage_of(device: int, mesh: Mapping[str, int]) -> int:
    """Return the stage of a device."""
    return coordinates(device, mesh).get(PIPELINE, 0)


def find(work_dir: Path, found: Merged) -> Slots:
    """Find the slots of merged steps.

    Raises:
      ValueError: the record of the schedule, or a window, cannot be read.
    """
    known = schedules.read(work_dir, found.generation)
    ticks = dict(_ticks(found))
    if known is None:
        problem = (
            f"{schedules.path_of(work_dir, found.generation)} is absent: the run has "
            "not recorded its schedule, so slots and transfers are not shown"
        )
        return Slots(schedule=None, problems=(problem,) * bool(ticks))
    problems = _misfit(known, found)
    if problems:
        return Slots(schedule=None, problems=tuple(problems))
    recorded = {(r.step, r.device): r for r in recorded_slots(work_dir, found)}
    owners = {d: rank.header for rank in found.ranks for d in rank.header.devices}
    bars: list[Bar] = []
    transfers: list[Transfer] = []
    for step, device in sorted({*ticks, *recorded}):
        spans, ran = ticks.get((step, device)), recorded.get((step, device))
        if spans is not None and len(spans) != known.num_ticks:
            problems.append(
                f"device {device}, step {step}: {len(spans)} ticks, the schedule has "
                f"{known.num_ticks}; its slots are not shown"
            )
            continue
        if ran is not None:
            problems += disagreements(known, ran)
            problems += outside_ticks(ran, spans) if spans is not None else []
            transfers += ran.transfers
        bars += _bars(known, owners[device], device, step, spans, ran)
    return Slots(
        schedule=known,
        bars=tuple(bars),
        transfers=tuple(transfers),
        problems=tuple(problems),
    )


def _bars(
    known: Schedule,
    owner: Header,
    device: int,
    step: int,
    spans: Sequence[Span] | None,
    ran: Recorded | None,
) -> Iterator[Bar]:
    """Yield the slots of a device in a step, as far as their times are known."""
    for slot in known.slots(stage_of(device, owner.mesh)):
        work = known.work(slot)
        own = None
        if work is not None and ran is not None:
            own = ran.ran.get((slot.direction, slot.tick))
        times = _of_tick(slot.tick, spans, ran) if own is None else own
        if times is not None:
            yield Bar(
                rank=owner.rank,
                device=device,
                step=step,
                slot=slot,
                work=work,
                start_ns=times[0],
                end_ns=times[1],
                is_measured=own is not None,
            )


def _ticks(found: Merged) -> Iterator[tuple[tuple[int, int], list[Span]]]:
    """Yield ((step, device), spans of its ticks), the spans in order of time."""
    first, last = found.steps
    every = collections.defaultdict(list)
    for rank in found.ranks:
        for step, span in rank.spans:
            device = device_of(span.stream)
            if span.name == TICK and device is not None and first <= step <= last:
                every[step, device].append(span)
    for key, spans in every.items():
        yield key, sorted(spans, key=lambda span: span.start_ns)


def _misfit(known: Schedule, found: Merged) -> list[str]:
    """Describe why a schedule cannot belong to the run."""
    stages = found.ranks[0].header.mesh.get(PIPELINE, 1)
    if known.run != found.run or known.generation != found.generation:
        return [
            f"the schedule is that of run {known.run}, start {known.generation}, not "
            f"of run {found.run}, start {found.generation}; slots are not shown"
        ]
    if known.num_stages != stages:
        return [
            f"the schedule has {known.num_stages} stages and the mesh {stages}; slots "
            "are not shown"
        ]
    return []


def _of_tick(
    tick: int, spans: Sequence[Span] | None, ran: Recorded | None
) -> tuple[int, int] | None:
    """Return start and end of a tick, by its stamps or else by its operations.

    None if neither exists.
    """
    if spans is not None:
        return spans[tick].start_ns, spans[tick].end_ns
    return None if ran is None else ran.ticks.get(tick)


# ------------------------------------------------------------------ recorded steps


def recorded_slots(work_dir: Path, found: Merged) -> list[Recorded]:
    """Return the slots in the windows of merged steps.

    Raises:
      ValueError: a window cannot be read.
    """
    ranks = {rank.header.rank: rank for rank in found.ranks}
    first, last = found.steps
    every = []
    for folder in folders.find(work_dir)[0]:
        window = folders.read_window(folder)
        is_meant = window.generation == found.generation and window.rank in ranks
        if is_meant and first <= window.step <= last:
            every += _read(folder, ranks[window.rank])
    return every


def _read(folder: Path, rank: Rank) -> Iterator[Recorded]:
    """Yield the slots of the devices of a process in one window."""
    reading = read(folder)
    if reading.offset_ns is None:
        return
    # From the window's clock to its host's clock, then to that of the lowest rank.
    ahead_ns = round(reading.offset_ns) - rank.offset_ns
    for device, events in reading.by_device.items():
        of_ticks = [p for p in events if p.tick is not None]
        slots = [p for p in of_ticks if p.is_slot and p.phase in DIRECTIONS]
        yield Recorded(
            rank=rank.header.rank,
            device=device,
            stage=stage_of(device, rank.header.mesh),
            step=reading.window.step,
            ran={
                (direction, tick): _extent(some, ahead_ns)
                for direction in DIRECTIONS
                for tick, some in _by_tick(
                    p for p in slots if p.is_chosen and p.phase == direction
                )
            },
            ticks={tick: _extent(some, ahead_ns) for tick, some in _by_tick(of_ticks)},
            transfers=tuple(
                Transfer(
                    rank=rank.header.rank,
                    device=device,
                    step=reading.window.step,
                    tick=tick,
                    direction=direction,
                    role=role,
                    start_ns=start_ns,
                    end_ns=end_ns,
                )
                for role in _ROLES
                for direction in DIRECTIONS
                for tick, some in _by_tick(
                    p for p in of_ticks if p.role == role and p.phase == direction
                )
                for start_ns, end_ns in (_extent((p,), ahead_ns) for p in some)
            ),
            is_computed=any(not p.is_chosen for p in slots),
        )


def _by_tick(events: Iterable[Placed]) -> Iterator[tuple[int, list[Placed]]]:
    """Yield each tick with its events."""
    found: dict[int, list[Placed]] = collections.defaultdict(list)
    for placed in events:
        if placed.tick is not None:
            found[placed.tick].append(placed)
    yield from sorted(found.items())


def _extent(events: Sequence[Placed], ahead_ns: int) -> tuple[int, int]:
    """Return the start of the first event and the end of the last, plus `ahead_ns`."""
    start_ns = min(placed.event.start_ns for placed in events)
    stop_ns = max(placed.event.stop_ns for placed in events)
    return round(start_ns) + ahead_ns, round(stop_ns) + ahead_ns


# -------------------------------------------------------------------- disagreements


def disagreements(known: Schedule, ran: Recorded) -> list[str]:
    """Describe idle slots that ran, and used slots that did not run.

    If idle slots are computed, all slots run, so nothing is reported.
    """
    if ran.is_computed:
        return []
    slots = {slot for slot in known.slots(ran.stage) if known.work(slot) is not None}
    seen = {Slot(direction, tick, ran.stage) for direction, tick in ran.ran}
    where = f"device {ran.device}, step {ran.step}"
    return [
        *(
            f"{where}: {_name(s)} ran, but is idle by the schedule"
            for s in seen - slots
        ),
        *(
            f"{where}: {_name(s)} did not run, but is in the schedule"
            for s in slots - seen
        ),
    ]


def _name(slot: Slot) -> str:
    return f"{slot.direction} slot of tick {slot.tick}"


def outside_ticks(ran: Recorded, spans: Sequence[Span]) -> list[str]:
    """Describe slots with operations outside of the stamps of their tick.

    Stamps and the profiler read different clocks, so `APART_NS` is tolerated.
    """
    found = []
    for (direction, tick), (start_ns, end_ns) in sorted(ran.ran.items()):
        begin_ns, stop_ns = spans[tick].start_ns, spans[tick].end_ns
        over_ns = max(begin_ns - start_ns, end_ns - stop_ns)
        if over_ns > APART_NS:
            found.append(
                f"device {ran.device}, step {ran.step}: the {direction} slot of tick "
                f"{tick} is {over_ns / 1e6:.1f} ms outside of its stamps"
            )
    return found
