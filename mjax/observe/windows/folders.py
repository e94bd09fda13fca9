"""The profiler windows of a run on disk: folders and files.

A window is one step of one process. `<work
dir>/profile/<generation>/step-<n>/<host>-<rank>/` holds the profiler's output
(`plugins/profile/...`, which TensorBoard reads), `places.json` (`windows.places`), and
`window.json`, which is written last: a folder without it is an incomplete window.
"""

import dataclasses
import json
import re
from pathlib import Path

from mjax import checked_json

FOLDER = "profile"
WINDOW, PLACES = "window.json", "places.json"
FORMAT, VERSION = "mjax-window", 1
_UNSAFE = re.compile(r"[^\w.\-]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A device of the process that recorded the window."""

    ordinal: int
    """Device number in the window's events."""
    number: int
    """Index in the flat order of the mesh."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Contents of window.json."""

    format: str
    version: int
    run: str
    """Name of the launch; empty without one."""
    host: str
    rank: int
    generation: int
    step: int
    """Number of the recorded step, from 1."""
    wall_ns: int
    """Wall-clock time, read together with `monotonic_ns`."""
    monotonic_ns: int
    """Monotonic time of the host, read just before the profiler annotation `trace.MARK`
    begins."""
    start_ns: int
    """Monotonic time, read inside that annotation, before the step is dispatched."""
    stop_ns: int
    """Monotonic time at which the step had ended on all devices of the process."""
    platform: str
    mesh: dict[str, int]
    """Axis sizes, outermost first."""
    devices: list[Device]
    trace: str
    """Path of the profiler's file, relative to the folder."""


def folder_of(
    work_dir: Path, *, generation: int, step: int, host: str, rank: int
) -> Path:
    """Return the folder of a window."""
    name = f"{_UNSAFE.sub('_', host)}-{rank}"
    return work_dir / FOLDER / str(generation) / f"step-{step}" / name


def write_window(folder: Path, window: Window) -> None:
    """Write window.json atomically."""
    temporary = folder / f"{WINDOW}.tmp"
    temporary.write_text(json.dumps(dataclasses.asdict(window), indent=2) + "\n")
    temporary.replace(folder / WINDOW)


def read_window(folder: Path) -> Window:
    """Read window.json.

    Raises:
      ValueError: it cannot be read, or has another version.
    """
    path = folder / WINDOW
    try:
        window = checked_json.read(path.read_bytes(), Window)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if (window.format, window.version) != (FORMAT, VERSION):
        raise ValueError(
            f"cannot read {path}: format {window.format!r} version {window.version} "
            f"instead of {FORMAT!r} version {VERSION}"
        )
    if not (folder / window.trace).resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"cannot read {path}: {window.trace} is outside its folder")
    return window


def find(work_dir: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders of complete windows of a run, and of incomplete ones.

    Both are sorted by generation, step, rank and host.
    """
    folders = []
    for folder in (work_dir / FOLDER).glob("*/step-*/*"):
        generation, step = folder.parent.parent.name, folder.parent.name[5:]
        if folder.is_dir() and generation.isdecimal() and step.isdecimal():
            host, _, rank = folder.name.rpartition("-")
            order = int(rank) if rank.isdecimal() else -1
            folders.append((int(generation), int(step), order, host, folder))
    folders.sort()
    complete = [f[-1] for f in folders if (f[-1] / WINDOW).exists()]
    return complete, [f[-1] for f in folders if not (f[-1] / WINDOW).exists()]
