"""Read the events of devices in a window that `jax.profiler` recorded.

Input: an xplane.pb. Output: one `Event` for each execution of an instruction on a
device, in nanoseconds since the window began; and the start of the host's mark on the
same clock.

On a CPU (seen with jaxlib 0.11.2) the events are in the plane `/host:CPU`, which has
one line per thread. Events of instructions have a stat `hlo_op`; `device_ordinal` is
the device. On a GPU each device is a plane `/device:GPU:n` and each of its streams is a
line. All its kernels and copies are read; lines that repeat them for viewers are left
out. The GPU format follows the names in XLA's xplane_schema.cc and has not yet been
tested on a GPU.
"""

import dataclasses
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MARK = "mjax.window"
"""Name of the annotation whose start relates the window's clock to the host's."""

_GPU = re.compile(r"/device:GPU:(\d+)")
_DERIVED = (
    *("Steps", "XLA Modules", "XLA Ops", "Async XLA Ops", "Framework Ops"),
    *("Framework Name Scope", "Source code", "Launch Stats", "_counters_"),
)
"""Lines of a GPU's plane that repeat what its streams hold (xplane_schema.cc)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One execution of an instruction on a device."""

    device: int
    """Number of the device in the window, see `record.devices_of`."""
    name: str
    """Name of the instruction; without one, as for a copy, that of the event."""
    module: str
    """Name of the compiled module; empty if there is none."""
    start_ns: float
    stop_ns: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """Contents of a window."""

    events: tuple[Event, ...]
    """Events in the order of their starts."""
    mark_ns: float | None
    """Start of the host's mark; None: the window has no mark."""
    is_gpu: bool


def read_file(path: Path) -> Trace:
    """Read a window.

    Raises:
      ValueError: the file is not a profiler window.
    """
    from jax.profiler import ProfileData

    try:
        # The iterators of jaxlib 0.11.2 emit a deprecation warning. Where warnings are
        # errors, this aborts the process.
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            return read_planes(ProfileData.from_file(str(path)).planes)
    except (RuntimeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not a window of jax.profiler, or is truncated: {error}"
        ) from error


def read_planes(planes: Iterable[Any]) -> Trace:
    """Read the planes of a window: objects like those of `jax.profiler.ProfileData`."""
    events: list[Event] = []
    mark_ns, is_gpu = None, False
    for plane in planes:
        if gpu := _GPU.match(plane.name):
            is_gpu = True
            events += _gpu_events(plane, int(gpu[1]))
            continue
        for line in plane.lines:
            for event in line.events:
                if event.name == MARK and mark_ns is None:
                    mark_ns = float(event.start_ns)
                elif (found := _cpu_event(event)) is not None:
                    events.append(found)
    events.sort(key=lambda event: (event.start_ns, -event.stop_ns))
    return Trace(events=tuple(events), mark_ns=mark_ns, is_gpu=is_gpu)


def _cpu_event(event: Any) -> Event | None:
    stats = dict(event.stats)
    if "hlo_op" not in stats:
        return None
    return _event(event, int(stats.get("device_ordinal", 0)), stats)


def _gpu_events(plane: Any, device: int) -> Iterator[Event]:
    for line in plane.lines:
        if line.name not in _DERIVED:
            for event in line.events:
                yield _event(event, device, dict(event.stats))


def _event(event: Any, device: int, stats: dict[str, Any]) -> Event:
    start_ns = float(event.start_ns)
    return Event(
        device=device,
        name=str(stats.get("hlo_op") or event.name),
        module=str(stats.get("hlo_module", "")),
        start_ns=start_ns,
        stop_ns=start_ns + float(event.duration_ns),
    )
