"""Record profiler windows of a run while it trains.

Input: the steps to record, the compiled step, and the mesh. Output: a folder for each
window (`windows.folders`). A window holds one step from its dispatch to its end on all
devices of the process. All processes record the same steps. After an error, which is
reported once, no further window is recorded and training continues.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from mjax.mesh.axes import AXES, AxisSizes
from mjax.observe.windows import folders
from mjax.observe.windows.places import table_of
from mjax.observe.windows.trace import MARK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Due:
    """The steps to record; they depend only on the step number."""

    first: int | None = None
    """First step of a series; None: no series."""
    stop: int = 0
    """First step after the series."""
    every: int | None = None
    """Interval in steps: its multiples are recorded; None: no interval."""

    def is_due(self, step: int) -> bool:
        """Return whether a step is recorded; the first step of a run is 1."""
        in_series = self.first is not None and self.first <= step < self.stop
        return in_series or (self.every is not None and step % self.every == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The process that records."""

    work_dir: Path
    run: str
    """Name of the launch; empty without one."""
    host: str
    rank: int
    generation: int


def devices_of(devices: Iterable[Any], process: int) -> list[folders.Device]:
    """Return the numbers of a process's devices in its windows.

    CPUs have their ids, which are unique over all processes (seen with jaxlib 0.11.2);
    GPUs have their index in the process, as in CUDA.

    Args:
      devices: devices of the mesh, in its flat order.
      process: number of the process.
    """
    return [
        folders.Device(
            ordinal=device.id if device.platform == "cpu" else device.local_hardware_id,
            number=number,
        )
        for number, device in enumerate(devices)
        if device.process_index == process
    ]


class Recorder:
    """Records windows of the steps of one process."""

    def __init__(
        self,
        due: Due,
        origin: Origin,
        step_text: Callable[[], str],
        devices: Any,
        say: Callable[[str], None],
    ) -> None:
        """Prepare to record; nothing is written before the first window.

        Args:
          due: steps to record.
          origin: process that records.
          step_text: function that returns the text of the compiled step, see
            `places.table_of`.
          devices: devices of the mesh, [pp, dp_replicate, dp_node, dp_shard, tp].
          say: function that prints a message for people.
        """
        self._due, self._origin, self._say = due, origin, say
        self._step_text = step_text
        self._devices = devices
        self._places: str | None = None
        self._is_broken = False

    def is_due(self, step: int) -> bool:
        """Return whether to record the step; all processes return the same."""
        return self._due.is_due(step)

    @contextlib.contextmanager
    def window(self, step: int) -> Iterator[None]:
        """Record the body of the `with` statement: one step until its end."""
        origin = self._origin
        folder = folders.folder_of(
            origin.work_dir,
            generation=origin.generation,
            step=step,
            host=origin.host,
            rank=origin.rank,
        )
        if not self._tried(lambda: self._start(folder)):
            yield
            return
        mark = time.time_ns(), time.monotonic_ns()
        with jax.profiler.TraceAnnotation(MARK):
            start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            span = start_ns, time.monotonic_ns()
            is_stopped = self._tried(jax.profiler.stop_trace)
        if is_stopped:
            self._tried(lambda: self._write(folder, step, mark, span))

    def _tried(self, action: Callable[[], object]) -> bool:
        """Run an action; warn of its errors. Return whether recording still works."""
        if self._is_broken:
            return False
        try:
            action()
        except (OSError, RuntimeError, ValueError) as error:
            self._is_broken = True
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._say(
                f"warning: the window of a step cannot be recorded ({reason}); no more "
                "windows are recorded in this start, training continues"
            )
        return not self._is_broken

    def _start(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # An earlier start may have recorded the same step: its files are outdated.
        (folder / folders.WINDOW).unlink(missing_ok=True)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 1
        jax.profiler.start_trace(folder, profiler_options=options)

    def _write(
        self, folder: Path, step: int, mark: tuple[int, int], span: tuple[int, int]
    ) -> None:
        """Write the files that a reader needs in addition to the profiler's."""
        traces = list(folder.glob("plugins/profile/*/*.xplane.pb"))
        if not traces:
            raise ValueError(f"the profiler wrote nothing in {folder}")
        newest = max(traces, key=lambda path: path.stat().st_mtime_ns)
        sizes = AxisSizes(**dict(zip(AXES, self._devices.shape, strict=True)))
        if self._places is None:
            self._places = table_of(self._step_text(), sizes).to_json()
        (folder / folders.PLACES).write_text(self._places)
        origin = self._origin
        window = folders.Window(
            format=folders.FORMAT,
            version=folders.VERSION,
            run=origin.run,
            host=origin.host,
            rank=origin.rank,
            generation=origin.generation,
            step=step,
            wall_ns=mark[0],
            monotonic_ns=mark[1],
            start_ns=span[0],
            stop_ns=span[1],
            platform=self._devices.flat[0].platform,
            mesh=dict(zip(AXES, sizes.as_tuple(), strict=True)),
            devices=devices_of(self._devices.flat, jax.process_index()),
            trace=str(newest.relative_to(folder)),
        )
        folders.write_window(folder, window)
