"""What a timeline shows beside its spans: rows, their titles, arrows of a pipeline.

Enters: merged steps. Leaves: the streams of each rank in order, names for people, and
which ticks pass something to the next stage.
"""

import dataclasses
import math

from mjax.observe.merged import Merged, Rank
from mjax.observe.places import View, coordinates, device_of, device_place
from mjax.observe.spans import Span

PIPELINE = "pp"
TICK = "tick"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrow:
    """From a span to one that uses what it has sent."""

    sender: int
    """A rank."""
    sent: Span
    receiver: int
    received: Span

    @property
    def received_ns(self) -> int:
        """When it is there at the earliest, inside the span that uses it.

        A tick begins before it has what it waits for.
        """
        there_ns = max(self.sent.end_ns, self.received.start_ns)
        return min(there_ns, self.received.end_ns)


def arrows(found: Merged) -> list[Arrow]:
    """Return what the ticks of a pipeline send.

    In a tick a stage does a forward and a backward slot, and passes what they made to
    the stages beside it, which use it in the next tick. Stamps do not say which slots
    are idle: an idle one has its arrow too.
    """
    ticks: dict[tuple[int, int], list[tuple[int, Span]]] = {}
    first, last = found.steps
    for rank in found.ranks:
        for step, span in rank.spans:
            device = device_of(span.stream)
            if span.name == TICK and device is not None and first <= step <= last:
                ticks.setdefault((step, device), []).append((rank.header.rank, span))
    if not ticks:
        return []
    mesh = found.ranks[0].header.mesh
    places = {device: coordinates(device, mesh) for _, device in ticks}
    by_place = {tuple(sorted(where.items())): at for at, where in places.items()}
    drawn = []
    for (step, device), own in ticks.items():
        for direction in (1, -1):
            beside = dict(places[device])
            beside[PIPELINE] = beside.get(PIPELINE, 0) + direction
            other = by_place.get(tuple(sorted(beside.items())))
            following = ticks.get((step, -1 if other is None else other), [])[1:]
            for (sender, sent), (receiver, received) in zip(
                own, following, strict=False
            ):
                drawn.append(
                    Arrow(
                        sender=sender, sent=sent, receiver=receiver, received=received
                    )
                )
    return drawn


def streams(rank: Rank, view: View) -> list[str]:
    """Return the streams of a rank, the host first, devices in the order of a view."""
    names = {span.stream for _, span in rank.spans}

    def key(name: str) -> tuple[int, tuple[int, ...], str]:
        device = device_of(name)
        if device is None:
            return (0 if name == "host" else 1, (), name)
        return (2, device_place(device, rank.header.mesh, view), name)

    return sorted(names, key=key)


def title(rank: Rank) -> str:
    """Return the name of a rank for people, with its place where an axis is split."""
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
    """Return the error of a rank's times for people."""
    if math.isinf(rank.error_ns):
        return "times not bounded"
    return f"times within {rank.error_ns / 1e3:.1f} us"
