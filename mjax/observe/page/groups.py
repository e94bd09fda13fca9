"""Find the groups of ranks, and the pipeline neighbours of each rank.

Input: headers of the processes of one start. Output: groups of ranks by kind of
parallelism, and the neighbours of a rank in the pipeline.
"""

from collections.abc import Iterable, Mapping, Sequence

from mjax.observe.places import coordinates
from mjax.observe.spans import Header

KINDS = ("tp", "dp", "pp")
"""Kinds of parallelism; dp stands for all axes whose names begin with it."""
type Place = tuple[tuple[str, int], ...]


def all_groups(headers: Sequence[Header]) -> dict[str, list[list[int]]]:
    """Return, by kind of parallelism, the groups of ranks that differ only in it."""
    found: dict[str, list[list[int]]] = {}
    for kind in KINDS:
        members: dict[Place, set[int]] = {}
        for header in headers:
            for place in _places(header):
                members.setdefault(_without(place, kind), set()).add(header.rank)
        distinct = {tuple(sorted(ranks)) for ranks in members.values()}
        found[kind] = [list(ranks) for ranks in sorted(distinct)]
    return found


def groups_of(header: Header, headers: Sequence[Header]) -> dict[str, list[int]]:
    """Return, by kind, the ranks that share a group with a rank, which is included."""
    found: dict[str, list[int]] = {}
    for kind in KINDS:
        own = {_without(place, kind) for place in _places(header)}
        found[kind] = sorted(
            other.rank
            for other in headers
            if any(_without(place, kind) in own for place in _places(other))
        )
    return found


def stages_beside(
    header: Header, headers: Sequence[Header]
) -> tuple[list[int], list[int]]:
    """Return the ranks of the stages before and after that of a rank.

    In the forward pass a stage receives from the stage before it and sends to the stage
    after it; gradients go the other way.
    """
    rank_of = {
        tuple(place.items()): other.rank
        for other in headers
        for place in _places(other)
    }
    found: tuple[set[int], set[int]] = set(), set()
    for place in _places(header):
        for ranks, direction in zip(found, (-1, 1), strict=True):
            beside = dict(place)
            if "pp" in beside:
                beside["pp"] += direction
                ranks.update(_known(rank_of, beside))
    before, behind = (sorted(ranks - {header.rank}) for ranks in found)
    return before, behind


def _known(rank_of: Mapping[Place, int], place: Mapping[str, int]) -> Iterable[int]:
    rank = rank_of.get(tuple(place.items()))
    return () if rank is None else (rank,)


def _places(header: Header) -> list[dict[str, int]]:
    return [coordinates(device, header.mesh) for device in header.devices]


def _without(place: Mapping[str, int], kind: str) -> Place:
    return tuple((axis, at) for axis, at in place.items() if not axis.startswith(kind))
