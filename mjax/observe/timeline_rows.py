"""Rows of a timeline, their titles, and the arrows of a pipeline.

Input: merged steps and the slots of a pipeline. Output: the streams of each rank in
order, names for people, and the transfers from slot to slot.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence

from mjax.observe.merged import Rank
from mjax.observe.places import View, coordinates, device_of, device_place
from mjax.observe.schedule import DIRECTIONS, Slot
from mjax.observe.slots import PIPELINE, Bar, Slots

TRANSFERS = "transfers"
"""Suffix of the row of transfers, which is below a device's rows of slots."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrow:
    """A transfer from a slot to the slot that receives its output."""

    sent: Bar
    received: Bar

    @property
    def received_ns(self) -> int:
        """Earliest possible time of arrival, limited to the receiving slot.

        A slot may begin before its input has arrived.
        """
        there_ns = max(self.sent.end_ns, self.received.start_ns)
        return max(self.received.start_ns, min(there_ns, self.received.end_ns - 1))


def arrows(slots: Slots, ranks: Sequence[Rank]) -> list[Arrow]:
    """Return the transfers of slots to other stages, in the order of the slots."""
    if slots.schedule is None or not ranks:
        return []
    mesh = ranks[0].header.mesh
    bars = {(bar.step, bar.device, bar.slot): bar for bar in slots.bars}
    drawn = []
    for bar in slots.bars:
        there = slots.schedule.receiver(bar.slot)
        if there is None:
            continue
        device = _beside(bar.device, mesh, there)
        received = bars.get((bar.step, device, there))
        if received is not None:
            drawn.append(Arrow(sent=bar, received=received))
    return drawn


def _beside(device: int, mesh: dict[str, int], slot: Slot) -> int:
    """Return the device on the stage of `slot`, with all other coordinates the same."""
    number = 0
    for axis, place in coordinates(device, mesh).items():
        number = number * mesh[axis] + (slot.stage if axis == PIPELINE else place)
    return number


def streams(rank: Rank, view: View, slots: Slots) -> list[str]:
    """Return the streams of a rank: the host, then devices in the order of a view.

    A device with slots but without stamps has a stream without spans.
    """
    names = {span.stream for _, span in rank.spans}
    drawn = (*slots.bars, *slots.transfers)
    names |= {f"device:{x.device}" for x in drawn if x.rank == rank.header.rank}

    def key(name: str) -> tuple[int, tuple[int, ...], str]:
        device = device_of(name)
        if device is None:
            return (0 if name == "host" else 1, (), name)
        return (2, device_place(device, rank.header.mesh, view), name)

    return sorted(names, key=key)


def lanes(ranks: Sequence[Rank], view: View, slots: Slots) -> dict[int, list[str]]:
    """Return the rows of each rank: its streams; below a device, its slots.

    Args:
      ranks: ranks with their spans.
      view: order of the devices.
      slots: slots of a pipeline. Those of device 3 get the rows `device:3 forward`,
        `device:3 backward` and `device:3 transfers`, if there are any.
    """
    more: dict[str, set[str]] = collections.defaultdict(set)
    for bar in slots.bars:
        more[f"device:{bar.device}"].add(bar.slot.direction)
    for sent in slots.transfers:
        more[f"device:{sent.device}"].add(TRANSFERS)
    found = {}
    for rank in ranks:
        names: list[str] = []
        for stream in streams(rank, view, slots):
            below = [x for x in (*DIRECTIONS, TRANSFERS) if x in more[stream]]
            names += [stream, *(f"{stream} {name}" for name in below)]
        found[rank.header.rank] = names
    return found


def title(rank: Rank) -> str:
    """Return the name of a rank, with its coordinates on axes larger than 1."""
    header = rank.header
    places = [coordinates(device, header.mesh) for device in header.devices]
    said = []
    for axis, size in header.mesh.items():
        own = sorted({where[axis] for where in places})
        if size > 1 and own:
            said.append(f"{axis} {own[0]}" + (f"-{own[-1]}" if len(own) > 1 else ""))
    place = f" ({', '.join(said)})" if said else ""
    return f"rank {header.rank} on {header.host}{place}"


def bound(rank: Rank) -> str:
    """Describe the error bound of a rank's times."""
    if math.isinf(rank.error_ns):
        return "times not bounded"
    return f"times within {rank.error_ns / 1e3:.1f} us"
