"""Reports of a process while it runs.

Input: calls that mark the start of each activity. Output: the progress word (its
position, even in a hang), the spans (its use of time), the stacks of slow steps, and
the heartbeats (it is alive).
"""

import dataclasses
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

import mjax
from mjax.config.run import ObserveConfig, ProfileConfig
from mjax.observe.beats import stem
from mjax.observe.spans import FOLDER, Header, Kind, Launch
from mjax.observe.stamps import DeviceClock
from mjax.observe.windows.record import Due, Origin, Recorder
from mjax.processes.agreement import Agreement
from mjax.processes.progress import LAUNCH_VARIABLE, Phase, Writer
from mjax.run.beats import Beats
from mjax.run.metrics import say
from mjax.run.record import Start
from mjax.run.slow_steps import SlowSteps
from mjax.run.spans import Spans

_NUM_BARRIERS = 3
"""Number of barriers at the start that compare the processes' clocks.

The number was picked by a simulation with the ranges of
tests/observe/synthetic_clocks.py. Processes reach the first barrier seconds apart and
later barriers together, so a second barrier makes the bound on clock offsets 2.6 to 130
times smaller. A third makes it another 3 to 4 times smaller for 16 processes. For 4,096
processes, even eight barriers make the median bound only 2% smaller than two. Each
barrier costs process 0 one read per process."""


@dataclasses.dataclass(kw_only=True)
class Watch:
    """The reports of one process. Used from one thread."""

    marks: Writer = dataclasses.field(default_factory=lambda: Writer(None))
    spans: Spans = dataclasses.field(default_factory=Spans)
    slow_steps: SlowSteps = dataclasses.field(default_factory=SlowSteps)
    beats: Beats | None = None
    """Shows that the process is alive; None if no heartbeats are written."""
    windows: Recorder | None = None
    """Profiles steps; None if no steps are to be profiled."""
    meet: Callable[[], object] = lambda: None
    """The barrier; returns after all processes have called it."""

    def __post_init__(self) -> None:
        self._started: list[tuple[str, int]] = [("import", int(mjax.STARTED_S * 1e9))]
        self._clocks: dict[int, DeviceClock] = {}

    def start(self, phase: Phase) -> None:
        """Mark the start of a phase before the first step."""
        self.marks.mark(phase)
        self._started.append((phase.name.lower(), time.monotonic_ns()))

    def end(self, phase: Phase, kind: Kind) -> None:
        """Mark the start of a phase after the last step."""
        self.marks.mark(phase)
        self.spans.enter(phase.name.lower(), kind, -1)

    def open(
        self,
        config: ObserveConfig,
        work_dir: Path,
        start: Start,
        mesh: Mesh,
        agreement: Agreement,
    ) -> None:
        """Start the reports that the config enables. All processes call this.

        The first spans are the startup phases. Without spans there are no barriers.

        Args:
          config: settings that choose the reports and their folders.
          work_dir: work dir of the run.
          start: start of the run.
          mesh: mesh of all processes.
          agreement: agreement of all processes.
        """
        header = _header(start, mesh, self.marks.generation)
        if config.slow_step_factor is not None:
            path = work_dir / "stacks" / f"{stem(header)}.txt"
            self.slow_steps = SlowSteps(path, config.slow_step_factor)
        if config.spans:
            self.meet = lambda: agreement.merge("", lambda _: "")
            folder = Path(config.spans_dir) if config.spans_dir else work_dir / FOLDER
            self.spans = Spans(folder, header, say)
        if config.beat_s is not None:
            marks, spans = self.marks, self.spans
            self.beats = Beats(work_dir, header, marks, spans, config.beat_s, say)
        if not config.spans:
            return
        ends_ns = [began_ns for _, began_ns in self._started[1:]]
        for (name, began_ns), end_ns in zip(
            self._started, [*ends_ns, time.monotonic_ns()], strict=True
        ):
            self.spans.add(name, "restart", "host", began_ns, end_ns)
        for _ in range(_NUM_BARRIERS):
            self.spans.barrier(self.meet)
        self.spans.flush()

    def add_stamps(
        self, step: int, logs: jax.Array, dispatched_ns: int, ready_ns: int
    ) -> None:
        """Write the spans of this process's devices in a step.

        Args:
          step: from 1.
          logs: int32 [devices x rows, 2], split over the devices of the mesh; see
            `mjax.step.stamps`.
          dispatched_ns: time before the host dispatched the step.
          ready_ns: time after the host had read the metrics of the step.
        """
        for shard in logs.addressable_shards:
            log = np.asarray(shard.data)
            device = (shard.index[0].start or 0) // len(log)
            if device not in self._clocks:
                is_host_clock = shard.device.platform == "cpu"
                self._clocks[device] = DeviceClock(is_host_clock=is_host_clock)
            for span in self._clocks[device].spans(
                log, device, dispatched_ns=dispatched_ns, ready_ns=ready_ns
            ):
                self.spans.add(*span, step=step)

    def open_windows(
        self,
        config: ProfileConfig,
        work_dir: Path,
        start: Start,
        mesh: Mesh,
        step_text: Callable[[], str],
    ) -> None:
        """Prepare to profile steps if the config asks for it.

        Args:
          config: settings that choose the steps to profile.
          work_dir: work dir of the run.
          start: start of the run.
          mesh: mesh of all processes.
          step_text: returns the HLO text of the compiled step.
        """
        series = config.series
        if series is None and config.every is None:
            return
        first, stop = series or (None, 0)
        header = _header(start, mesh, self.marks.generation)
        self.windows = Recorder(
            Due(first=first, stop=stop, every=config.every),
            Origin(
                work_dir=work_dir,
                run=header.run,
                host=header.host,
                rank=header.rank,
                generation=header.generation,
            ),
            step_text,
            mesh.devices,
            say,
        )

    def close(self, exit_code: int) -> None:
        """Report how the process ends."""
        self.slow_steps.close()
        self.spans.close(exit_code)
        if self.beats is not None:
            self.beats.close(exit_code)


def _header(start: Start, mesh: Mesh, generation: int) -> Header:
    launch = os.environ.get(LAUNCH_VARIABLE)
    rank = jax.process_index()
    return Header(
        run=start.run,
        host=os.environ.get("MJAX_HOST") or socket.gethostname(),
        rank=rank,
        generation=start.number,
        pid=os.getpid(),
        wall_ns=time.time_ns(),
        monotonic_ns=time.monotonic_ns(),
        devices=tuple(
            number
            for number, device in enumerate(mesh.devices.flat)
            if device.process_index == rank
        ),
        mesh=dict(mesh.shape),
        launch=Launch(name=launch, generation=generation) if launch else None,
        boot=_boot(),
    )


def _boot() -> str | None:
    """Return the boot id of this host; None if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
