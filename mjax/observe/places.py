"""Positions of devices and their streams in the mesh.

Input: device numbers and mesh axis sizes, as in the headers of span files. Output:
coordinates, and keys that sort devices by an axis.
"""

from collections.abc import Mapping
from typing import Literal

type View = Literal["dp", "pp", "tp"]
DEVICE = "device:"
"""Prefix of the streams of devices, see `spans`."""


def coordinates(device: int, mesh: Mapping[str, int]) -> dict[str, int]:
    """Return the coordinate of a device on each mesh axis; axes are outermost first."""
    found = {}
    for axis in reversed([*mesh]):
        device, found[axis] = divmod(device, max(1, mesh[axis]))
    return {axis: found[axis] for axis in mesh}


def device_of(stream: str) -> int | None:
    """Return a stream's device, by its number in the mesh; None if it has no device."""
    number = stream.removeprefix(DEVICE)
    return int(number) if number != stream and number.isdigit() else None


def device_place(device: int, mesh: Mapping[str, int], view: View) -> tuple[int, ...]:
    """Return the key by which a view sorts devices."""
    where = coordinates(device, mesh)
    own = [place for axis, place in where.items() if axis.startswith(view)]
    others = [place for axis, place in where.items() if not axis.startswith(view)]
    return (*others, *own)
