"""Assign events of a window to layers, ticks and microbatches.

Input: the events of a window, and the table of places of the step. Output: each event
with its place and the indices of the loop iterations in which it ran.

An instruction in a loop has one event per iteration. On one device, iteration k of a
loop begins at the earliest of the k-th events of all instructions that run in every
iteration. Instructions inside a conditional run only in some iterations; for their
events, the start times of the iterations show which.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mjax.observe.windows.places import UNKNOWN, Place, Table
from mjax.observe.windows.trace import Event


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """An event and its place."""

    event: Event
    phase: str
    """One of `scopes.PHASES`, or `unknown`."""
    role: str
    """One of `places.ROLES`."""
    is_recomputed: bool
    layer: int | None
    """Layer of the iteration in which it ran; None: it ran outside of the loop, or XLA
    unrolled the loop."""
    tick: int | None
    microbatch: int | None
    is_slot: bool
    """Whether the event is work of a pipeline slot."""
    is_chosen: bool
    """Whether the event ran under a conditional, as for slots that may be skipped."""


def place_events(
    events: Iterable[Event], tables: Sequence[Table], *, is_gpu: bool
) -> list[Placed]:
    """Assign each event its place.

    Args:
      events: events of one window, in the order of their starts.
      tables: tables of the modules that may have run.
      is_gpu: whether the devices are GPUs. On a GPU, events of loops and calls are
        memory copies of their conditions, and are kept; on a CPU they are wrappers
        around the events inside, and are left out.
    Returns:
      All events except those wrappers; an event in no table has the phase `unknown`.
    """
    of_module = {table.module: table for table in tables}
    found: list[Placed] = []
    by_device: dict[tuple[int, str], list[Event]] = collections.defaultdict(list)
    for event in events:
        by_device[event.device, event.module].append(event)
    for (_, module), some in by_device.items():
        table = of_module.get(module)
        if table is None:
            found += [_nowhere(event) for event in some]
        else:
            found += _place_some(some, table, is_gpu=is_gpu)
    return sorted(found, key=lambda placed: placed.event.start_ns)


def _place_some(events: list[Event], table: Table, *, is_gpu: bool) -> list[Placed]:
    """Place the events of one module on one device."""
    turns = _turns(events, table)
    seen: collections.Counter[str] = collections.Counter()
    found = []
    for event in events:
        place = table.ops.get(event.name)
        if place is None:
            found.append(_nowhere(event))
            continue
        number = seen[event.name]
        seen[event.name] += 1
        if place.is_container and not is_gpu:
            continue
        units = _units(event, place, number, table, turns)
        found.append(
            Placed(
                event=event,
                phase=place.phase,
                role=place.role,
                is_recomputed=place.is_recomputed,
                layer=units.get("layers"),
                tick=units.get("ticks"),
                microbatch=units.get("microbatches"),
                is_slot=place.is_slot,
                is_chosen=place.is_chosen,
            )
        )
    return found


def _nowhere(event: Event) -> Placed:
    return Placed(
        event=event,
        phase=UNKNOWN,
        role="compute",
        is_recomputed=False,
        layer=None,
        tick=None,
        microbatch=None,
        is_slot=False,
        is_chosen=False,
    )


def _turns(events: Sequence[Event], table: Table) -> dict[str, np.ndarray]:
    """Find the starts of the iterations in the window, in ns, by loop."""
    starts: dict[str, dict[str, list[float]]] = {key: {} for key in table.loops}
    for event in events:
        place = table.ops.get(event.name)
        if place is not None and place.loops and place.is_direct:
            own = starts[place.loops[-1]]
            own.setdefault(event.name, []).append(event.start_ns)
    found = {}
    for key, times in starts.items():
        if times:
            # Most instructions agree on the number of iterations.
            counts = collections.Counter(map(len, times.values()))
            [(num, _)] = counts.most_common(1)
            rows = [row for row in times.values() if len(row) == num]
            found[key] = np.min(np.array(rows), axis=0)
    return found


def _units(
    event: Event,
    place: Place,
    number: int,
    table: Table,
    turns: Mapping[str, np.ndarray],
) -> dict[str, int]:
    """Return the known numbers of layer, tick and microbatch.

    Args:
      event: event to place.
      place: place of its instruction.
      number: number of earlier events of the instruction.
      table: table of its module.
      turns: start times of the iterations of each loop on this device.
    """
    units = {**place.singles}
    for depth, key in enumerate(place.loops):
        loop = table.loops[key]
        if loop.unit is None or loop.trip_count is None or key not in turns:
            continue
        is_innermost = depth == len(place.loops) - 1
        if is_innermost and place.is_direct and number < len(turns[key]):
            turn = number
        else:
            turn = int(np.searchsorted(turns[key], event.start_ns, "right")) - 1
        if turn >= 0:
            units[loop.unit] = loop.start + loop.step * (turn % loop.trip_count)
    if "layers" in units and any(table.loops[k].unit == "layers" for k in place.loops):
        units["layers"] += place.place
    return units
