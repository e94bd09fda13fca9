"""Boxes: rectangular parts of arrays, the units of writing, reading and placing."""

import math
from collections.abc import Sequence

Box = tuple[tuple[int, int], ...]
"""(start, stop) for every dim; empty for a scalar."""


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Return the box of a shard from the slices that jax gives for it."""
    return tuple(
        part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
    )


def slices(box: Box) -> tuple[slice, ...]:
    """Return the box as an index into its array."""
    return tuple(slice(start, stop) for start, stop in box)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the size of a box in every dim."""
    return tuple(stop - start for start, stop in box)


def size_of(box: Box) -> int:
    """Count the elements of a box; 1 for a scalar."""
    return math.prod(shape_of(box))


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes of one array; None if it is empty."""
    both = tuple(
        (max(start, other_start), min(stop, other_stop))
        for (start, stop), (other_start, other_stop) in zip(a, b, strict=True)
    )
    return None if any(start >= stop for start, stop in both) else both


def within(part: Box, whole: Box) -> tuple[slice, ...]:
    """Return the index of `part` in an array that holds only the box `whole`."""
    return tuple(
        slice(start - origin, stop - origin)
        for (start, stop), (origin, _) in zip(part, whole, strict=True)
    )
