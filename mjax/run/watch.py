"""What a process reports while it runs.

Enters: what begins now. Leaves: the progress word (its position, even in a hang), the
spans (its use of time), the stacks of slow steps, and the beats (it is alive).
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
"""With which the clocks of the processes are compared at the start. Chosen: processes
come to the first one seconds apart and to the others together, so the second one makes
the bound on clock offsets 5 to 130 times smaller (simulated with the ranges of
tests/observe/synthetic_clocks.py). The third one makes it 3 to 4 times smaller for 16
processes, and eight make it 2% smaller for 4,096. Each one costs process 0 a read for
each process."""


@dataclasses.dataclass(kw_only=True)
class Watch:
    """What one process shows of itself. One thread uses it."""

    marks: Writer = dataclasses.field(default_factory=lambda: Writer(None))
    spans: Spans = dataclasses.field(default_factory=Spans)
    slow_steps: SlowSteps = dataclasses.field(default_factory=SlowSteps)
    beats: Beats | None = None
    """Shows that the process is alive; None: no beats are written."""
    windows: Recorder | None = None
    """Records steps with the profiler; None: none are to be recorded."""
    meet: Callable[[], object] = lambda: None
    """Returns after all processes have called it."""

    def __post_init__(self) -> None:
        self._started: list[tuple[str, int]] = [("import", int(mjax.STARTED_S * 1e9))]
        self._clocks: dict[int, DeviceClock] = {}

    def start(self, phase: Phase) -> None:
        """Say which phase of the start of the process begins."""
        self.marks.mark(phase)
        self._started.append((phase.name.lower(), time.monotonic_ns()))

    def end(self, phase: Phase, kind: Kind) -> None:
        """Say which phase after the last step begins."""
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
        """Begin to write what the config asks for; all processes call it.

        Spans begin with the phases of the start. Without spans the processes do not
        meet for them.

        Args:
          config: whether and where to.
          work_dir: of the run.
          start: of the run.
          mesh: of all processes.
          agreement: of all processes.
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
        """Write what the devices of this process did in a step.

        Args:
          step: from 1.
          logs: int32 [devices x rows, 2], split over the devices of the mesh.
          dispatched_ns: before the host dispatched the step.
          ready_ns: after the host had its metrics.
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
        """Prepare to record steps with the profiler, if some are to be.

        Args:
          config: which steps.
          work_dir: of the run.
          start: of the run.
          mesh: of all processes.
          step_text: returns the text of the compiled step.
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
        """Say how the process ends."""
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
    """Return the name of the boot of this host, if it says one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
