"""Stop a rank for a while from inside; this folder is put on PYTHONPATH.

Python imports this module when it starts. In a process of the trainer a thread then
waits for the orders of `scripts.observe.stuck_runs` (files RANK-K.order in the folder
MJAX_STOPS) and executes them one after the other. Every stop ends when the order says
so, and the run continues.

    sleep  the main thread sleeps; the interpreter lock is free
    lock   a thread waits in a system call while it holds the interpreter lock
    skip   the main thread enters an agreement that no other rank enters, instead of
           the operation of the other ranks
    slow   the main thread sleeps for some seconds, as a slow disk would make it

`where` is the span or the batch of an evaluation at which the main thread stops,
"anywhere" the next bytecode that it runs, "thread" any moment in another thread.
"""

import ctypes
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

_FOLDER, _RANK, _WORD = "MJAX_STOPS", "MJAX_STOP_RANK", "MJAX_PROGRESS_FILE"
_POLL_S = 0.02
_armed: list[dict[str, Any]] = []


def _rank() -> int | None:
    """Return the rank of this process; None if it is not a process of the trainer."""
    if _RANK in os.environ:
        return int(os.environ[_RANK])
    name = os.environ.get(_WORD, "").rpartition("progress-")[2]
    return int(name) if name.isdigit() else None


def _serve(folder: Path, rank: int) -> None:
    number, is_hooked = 0, False
    while (folder / f"{rank}-{number}.order").exists():  # for an earlier process
        number += 1
    while True:
        path = folder / f"{rank}-{number}.order"
        if path.exists():
            if not is_hooked:
                _hook()
                is_hooked = True
            _obey(json.loads(path.read_text()) | {"rank": rank, "folder": str(folder)})
            number += 1
        time.sleep(_POLL_S)


def _obey(order: dict[str, Any]) -> None:
    if order["kind"] == "join":
        _meet(order)
        return
    if order["where"] in ("thread", "anywhere"):
        time.sleep(order["delay_s"])
    if order["where"] == "thread":
        _stop(order)
        return
    _armed.append(order)
    if order["where"] == "anywhere":
        ctypes.pythonapi.Py_AddPendingCall(_PENDING, None)


def _hook() -> None:
    """Let the main thread pass by here at each span and each batch."""
    from mjax.processes.progress import Phase, Writer
    from mjax.run.spans import Spans

    enter, barrier, mark = Spans.enter, Spans.barrier, Writer.mark

    def entered(self: Spans, name: str, kind: Any, step: int) -> int:
        now_ns = enter(self, name, kind, step)
        _at(name)
        return now_ns

    def before(self: Spans, meet: Any) -> None:
        _at("barrier")
        barrier(self, meet)

    def marked(
        self: Writer, phase: Phase, step: int | None = None, microstep: int = 0
    ) -> None:
        mark(self, phase, step, microstep)
        if phase is Phase.EVAL:
            _at(f"batch {microstep}")

    Spans.enter, Spans.barrier, Writer.mark = entered, before, marked


def _at(where: str) -> None:
    """Stop if the main thread is where an order says."""
    if _armed and _armed[0]["where"] == where:
        _stop(_armed.pop())


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _PENDING(_: object) -> int:
    _stop(_armed.pop())
    return 0


def _stop(order: dict[str, Any]) -> None:
    """Block the other ranks in the ordered way until the stop must end."""
    stem = Path(order["folder"]) / f"{order['id']}-{order['rank']}"
    began, ends = stem.with_suffix(".began"), stem.with_suffix(".ends")
    match order["kind"]:
        case "sleep":
            began.touch()
            while not ends.exists():
                time.sleep(0.05)
        case "lock":
            # Both ends of the pipe are open, so reading waits; PyDLL keeps the
            # interpreter lock.
            pipe = os.open(stem.with_suffix(".pipe"), os.O_RDWR)
            read, buffer = ctypes.PyDLL(None).read, ctypes.create_string_buffer(1)
            began.touch()
            while read(pipe, buffer, 1) != 1:
                pass
            os.close(pipe)
        case "skip":
            began.touch()
            _meet(order)
        case "slow":
            began.touch()
            time.sleep(order["slow_s"])


def _meet(order: dict[str, Any]) -> None:
    """Enter an agreement of all ranks that is not part of the run."""
    from mjax.processes.agreement import Agreement

    Agreement(f"stop {order['id']}").merge("", lambda _: "")


if _FOLDER in os.environ and (_number := _rank()) is not None:
    _stops = Path(os.environ[_FOLDER])
    threading.Thread(target=_serve, args=(_stops, _number), daemon=True).start()
