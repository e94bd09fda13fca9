"""Reports from a measuring process to `health burn`.

Input: a task and a function for each kind. Output: a line of JSON before and after
each kind, on a separate file descriptor, because libraries write to stdout. An error of
one measurement does not stop the others.
"""

import dataclasses
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence

from mjax.health.burn.measurements import Measured, Outcome, Report, Task

_NOTE_CHARS = 300
# Names of absl's status codes, with which messages of XLA errors begin
# (github.com/abseil/abseil-cpp, absl/status/status.h). These mean a limit of the
# software or of free memory; they give no information about the health of a device.
_ABSENT = ("UNIMPLEMENTED", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")


def send(task: Task, report: Report) -> None:
    """Write one line to the parent."""
    line = json.dumps(dataclasses.asdict(report)) + "\n"
    os.write(task.report_fd, line.encode())


def run(task: Task, functions: Mapping[str, Callable[[], Sequence[Measured]]]) -> None:
    """Run the measurements of the task, in order.

    Args:
      task: the task, with its kinds of measurements.
      functions: one for each kind, which returns the results of its parts.
    """
    for kind in task.kinds:
        send(task, Report(event="begin", kind=kind))
        try:
            results = tuple(functions[kind]())
        except Exception as error:  # reported; the next kind still runs
            results = (describe(kind, error),)
        send(task, Report(event="end", kind=kind, results=results))


def describe(kind: str, error: Exception) -> Measured:
    """Return the result of a measurement that raised an error."""
    text = " ".join(str(error).split()) or type(error).__name__
    kinds = (NotImplementedError, TypeError, MemoryError)
    is_absent = isinstance(error, kinds) or text.startswith(_ABSENT)
    outcome: Outcome = "absent" if is_absent else "error"
    note = f"{type(error).__name__}: {text}"[:_NOTE_CHARS]
    return Measured(name=kind, outcome=outcome, note=note)


def end_with_parent() -> None:
    """Exit when the parent exits: the pipe to stdin is then closed."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, name="mjax-parent", daemon=True).start()
