"""Read XLA's report on a GPU step that takes too long: progress and pending operations.

Input: log lines of a rank whose step has exceeded XLA's limit
(xla_gpu_execution_terminate_timeout), with xla_gpu_execution_progress_tracking. Output:
for each device, the number of finished operations and the first unfinished ones, with
their locations in the traced code; and the ranks that are behind the others. XLA writes
the report ten seconds before it ends the process, so the agents of all hosts have read
it by then.

Source: log lines of openxla/xla, gpu_executable.cc and hang_watchdog.cc (2026). Not yet
tested on a GPU.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mjax.launch.messages import DeviceProgress

_LINE = re.compile(r"[EF]\d{4} [\d:.]+ +(?P<thread>\d+) [\w.]+:\d+\] (?P<text>.*)")
"""Pattern of a line of absl's log. Devices of a process write concurrently, each from
its own thread."""
_EXPIRED = re.compile(
    r"\[(?P<device>\d+)\] XLA GPU execution `(?P<program>[^`]*)` failed to finish in "
    r"(?P<limit>\S+)\."
)
_COUNT = re.compile(r"\[\d+\] Completed thunks: (?P<completed>\d+)/(?P<total>\d+) ")
_LIST = re.compile(r"\[\d+\] (?P<name>\w+ \w+) thunks: size=\d+")
_THUNK = re.compile(
    r"  - exec\[\d+\] thunk\[\d+/\d+\] (?P<kind>\S+): (?P<name>\S+) at [\d-]+ [\d:.]+"
    r"(?P<loops>.*)"
)
_LOOP = re.compile(r"\[(?P<name>\S+) iter=(?P<turn>\d+)\]")
_PENDING = "First pending"
_MOST = 3
"""Maximum number of operations kept per device."""


class Reader:
    """Reads XLA's log of the devices of one rank, line by line."""

    def __init__(self) -> None:
        """Start without a report."""
        self._of_thread: dict[str, DeviceProgress] = {}
        self._lists: dict[str, str] = {}
        self._first: dict[int, DeviceProgress] = {}
        """Device -> first report. A later report is of a program that waits in the
        queue."""

    def feed(self, line: str) -> None:
        """Process a line of the log; lines that are not XLA's report are ignored."""
        found = _LINE.match(line)
        if found is None:
            return
        thread, text = found["thread"], found["text"]
        if expired := _EXPIRED.match(text):
            device = int(expired["device"])
            self._of_thread[thread] = DeviceProgress(
                device=device, program=expired["program"], limit=expired["limit"]
            )
            self._lists.pop(thread, None)
            self._first.setdefault(device, self._of_thread[thread])
        elif (known := self._of_thread.get(thread)) is None:
            return
        elif count := _COUNT.match(text):
            known.completed, known.total = int(count["completed"]), int(count["total"])
        elif part := _LIST.match(text):
            self._lists[thread] = part["name"]
        elif (thunk := _THUNK.match(text)) and self._lists.get(thread) == _PENDING:
            loops = [f"{x['name']} {x['turn']}" for x in _LOOP.finditer(thunk["loops"])]
            if len(known.pending) < _MOST:
                known.pending.append(" ".join([thunk["name"], *loops]))

    def devices(self, operations: Path) -> list[DeviceProgress]:
        """Return the report so far; empty if XLA has logged nothing.

        Args:
          operations: path of the file that maps operations of each program to locations
            in the traced code, see `progress.Writer.operations`; it may be absent.
        """
        if not self._first:
            return []
        try:
            places = json.loads(operations.read_text())
        except (OSError, ValueError):
            places = {}
        return [
            DeviceProgress(
                device=one.device,
                program=one.program,
                limit=one.limit,
                completed=one.completed,
                total=one.total,
                pending=[
                    _placed(name, places.get(one.program, {})) for name in one.pending
                ],
            )
            for one in sorted(self._first.values(), key=lambda one: one.device)
        ]


def _placed(pending: str, places: Mapping[str, str]) -> str:
    name, *loops = pending.split(" ", 1)
    about = [places[name]] if name in places else []
    about += [f"iteration {loops[0]}"] if loops else []
    return f"{name} ({', '.join(about)})" if about else name


def behind(devices: Mapping[int, Sequence[DeviceProgress]]) -> tuple[int, ...]:
    """Return the ranks that block the others, ascending; empty if none differ.

    Within one program, a device that waits in a collective has done more operations
    than a device that has not reached it. With more than two ranks, the result is empty
    if at least half of them are behind: they may wait inside a collective that the
    others have left, so it is unclear who blocks. It is also empty if devices are in
    different programs (a step, or the gather before it), because their numbers of
    operations cannot be compared.

    Args:
      devices: rank -> progress of its devices, for all ranks with a report of XLA; at
        least one rank.
    """
    if len(programs(devices)) > 1:
        return ()
    least = {rank: min(one.completed for one in told) for rank, told in devices.items()}
    last = [rank for rank in sorted(least) if least[rank] == min(least.values())]
    tells = len(last) < len(least) and (len(least) == 2 or 2 * len(last) < len(least))
    return tuple(last) if tells else ()


def programs(
    devices: Mapping[int, Sequence[DeviceProgress]],
) -> dict[str, list[int]]:
    """Return name of the compiled program -> ranks with a device that runs it."""
    found: dict[str, list[int]] = {}
    for rank in sorted(devices):
        for program in sorted({one.program for one in devices[rank]}):
            found.setdefault(program, []).append(rank)
    return found


def describe(told: Sequence[DeviceProgress]) -> str:
    """Return a text on the progress of a rank's slowest device."""
    one = min(told, key=lambda one: one.completed)
    text = f"XLA ended {one.program}, which took more than {one.limit}"
    if not one.total:
        return text  # without progress tracking
    waits = "; ".join(one.pending) or "nothing"
    return (
        f"{text}; device {one.device} has done {one.completed} of {one.total} "
        f"operations and waits for {waits}"
    )
