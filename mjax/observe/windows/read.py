"""Read a window of a run: its events with their places, on the clock of its host.

Input: the folder of a window. Output: a `Reading`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from mjax.observe.windows import folders, trace
from mjax.observe.windows.placed import Placed, place_events
from mjax.observe.windows.places import from_json
from mjax.observe.windows.seconds import DeviceSeconds, seconds_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """The contents of a window."""

    window: folders.Window
    by_device: Mapping[int, Sequence[Placed]]
    """Events in the order of their starts, by mesh number of the device."""
    offset_ns: float | None
    """Host's monotonic clock minus the clock of events. It may be too small by up to
    `window.start_ns - window.monotonic_ns`. None: the window has no mark."""

    @functools.cached_property
    def seconds(self) -> Mapping[int, DeviceSeconds]:
        """Seconds by phase and role, by mesh number of the device."""
        return {number: seconds_of(some) for number, some in self.by_device.items()}

    def stage_of(self, number: int) -> int:
        """Return the stage of a device: its coordinate on the first mesh axis."""
        sizes = list(self.window.mesh.values())
        inner = 1
        for size in sizes[1:]:
            inner *= size
        return number // inner


def read(folder: Path) -> Reading:
    """Read a window.

    Raises:
      ValueError: a file is absent, damaged or of another version, or an event belongs
        to a device of another process.
    """
    window = folders.read_window(folder)
    path = folder / folders.PLACES
    try:
        table = from_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    file = folder / window.trace
    if not file.exists():
        raise ValueError(f"cannot read {file}: there is no such file")
    found = trace.read_file(file)
    numbers = {device.ordinal: device.number for device in window.devices}
    by_device: dict[int, list[Placed]] = {number: [] for number in numbers.values()}
    for placed in place_events(found.events, [table], is_gpu=found.is_gpu):
        if placed.event.device not in numbers:
            raise ValueError(
                f"{file} has events of device {placed.event.device}, but the devices "
                f"of process {window.rank} are {sorted(numbers)}"
            )
        by_device[numbers[placed.event.device]].append(placed)
    offset_ns = None
    if found.mark_ns is not None:
        offset_ns = window.monotonic_ns - found.mark_ns
    return Reading(window=window, by_device=by_device, offset_ns=offset_ns)
