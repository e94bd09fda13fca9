"""Stop the threads of a process that Python did not start: it hangs below Python.

    python -m scripts.faults.stop_threads PID TID ...

The given threads, those of Python, go on. The others stay stopped until the process is
killed; then this program ends. Needs the right to trace the process.
"""

import ctypes
import sys
import time
from collections.abc import Collection
from pathlib import Path

_SEIZE, _INTERRUPT = 0x4206, 0x4207
_POLL_S = 0.2


def stop(pid: int, but: Collection[int]) -> None:
    """Stop the threads of a process, except some.

    Raises:
      OSError: a thread cannot be traced.
    """
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long] * 4
    tids = {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()}
    for tid in tids - {*but}:
        for request in (_SEIZE, _INTERRUPT):
            if ptrace(request, tid, 0, 0) == -1:
                raise OSError(ctypes.get_errno(), f"thread {tid} cannot be traced")


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return False
    return state != "Z"


if __name__ == "__main__":
    number, *threads = map(int, sys.argv[1:])
    stop(number, threads)
    while _is_alive(number):
        time.sleep(_POLL_S)
