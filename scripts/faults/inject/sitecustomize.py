"""Cause faults inside a rank; `launch_faults` puts this folder on PYTHONPATH.

Python imports this module when it starts. In a process that writes a progress word, a
thread then waits for each `<progress file>.fault`, whose text names the fault.
"""

import ctypes
import dataclasses
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_POLL_S = 0.01
_SLOW_S = 0.5
_VARIABLE = "MJAX_PROGRESS_FILE"


def _happen(what: str) -> None:
    main = threading.main_thread().ident
    match what:
        case "exception":
            error = ctypes.py_object(RuntimeError)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main or 0), error)
        case "sleep":
            ctypes.pythonapi.Py_AddPendingCall(_SLEEP, None)
        case "NaN":
            _poison()
        case _ if what.startswith("slow "):
            loop = _loop()
            loop.batches = _SlowBatches(loop.batches, float(what.split()[1]))
        case "skip a collective":
            loop = _loop()
            loop.program = _Skipping(loop.program)
        case "stop below Python":
            threads = [str(one.native_id) for one in threading.enumerate()]
            words = ["-m", "scripts.faults.stop_threads", str(os.getpid()), *threads]
            subprocess.Popen([sys.executable, *words], start_new_session=True)
        case "hold the lock":
            while True:  # a signal ends each sleep
                ctypes.PyDLL(None).sleep(3600)
        case _:
            os._exit(int(what.removeprefix("exit ")))


def _loop() -> Any:
    """Find the loop that the main thread is in."""
    from mjax.run.loop import Loop

    frame = sys._current_frames()[threading.main_thread().ident or 0]
    while not isinstance(loop := frame.f_locals.get("self"), Loop):
        assert frame.f_back is not None
        frame = frame.f_back
    return loop


def _poison() -> None:
    """Make the parameters of this process NaN, before its next step."""
    loop = _loop()
    loop.batches = _PoisonedBatches(loop)


class _Skipping:
    """A program whose next step waits at a barrier instead of running.

    The other processes wait for this one in the collectives of that step.
    """

    def __init__(self, program: Any) -> None:
        self._program = program

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def train_step(self, *_: Any) -> Any:
        from mjax.processes import distributed

        distributed.client().wait_at_barrier("nobody else comes here", 3_600_000)


class _SlowBatches:
    """Batches that each take `_SLOW_S` longer for some seconds."""

    data_wait_s = 0.0

    def __init__(self, batches: Any, seconds: float) -> None:
        self._batches, self._until_s = batches, time.monotonic() + seconds

    def __next__(self) -> Any:
        if time.monotonic() < self._until_s:
            time.sleep(_SLOW_S)
        return next(self._batches)


class _PoisonedBatches:
    """Batches that make the parameters NaN when the next batch is taken."""

    data_wait_s = 0.0

    def __init__(self, loop: Any) -> None:
        self._loop, self._batches = loop, loop.batches

    def __next__(self) -> Any:
        import jax
        import numpy as np

        def poison(leaf: Any) -> Any:
            own = [
                jax.device_put(np.full_like(shard.data, np.nan), shard.device)
                for shard in leaf.addressable_shards
            ]
            return jax.make_array_from_single_device_arrays(
                leaf.shape, leaf.sharding, own
            )

        self._loop.batches, state = self._batches, self._loop.state
        params = jax.tree.map(poison, state.params)
        self._loop.state = dataclasses.replace(state, params=params)
        return next(self._batches)


def _wait() -> None:
    while _VARIABLE not in os.environ:
        time.sleep(_POLL_S)
    path = Path(f"{os.environ[_VARIABLE]}.fault")
    while True:
        while not path.exists():
            time.sleep(_POLL_S)
        what = path.read_text()
        path.unlink()
        _happen(what)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def _SLEEP(_: object) -> int:
    while True:
        time.sleep(3600)


def _begin() -> None:
    """Start the waiting thread, with all signals left to the main thread."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    threading.Thread(target=_wait, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _setsid() -> None:
    """Start the waiting thread in a forked rank.

    A rank calls setsid after the fork, before it sets its environment variables.
    """
    _of_the_system()
    _begin()


def _run_module(*args: Any, **more: Any) -> Any:
    """Run the program of a rank, if ordered with a flag that the others do not have."""
    if _VARIABLE in os.environ:  # a rank, not the coordinator
        word = Path(os.environ[_VARIABLE])
        order = word.parents[1] / f"wrong-flags-{word.name.rpartition('-')[2]}"
        if order.exists():
            order.unlink()
            sys.argv += ["--optim.lr", "0.125"]
    return _run_of_the_system(*args, **more)


_of_the_system, os.setsid = os.setsid, _setsid
_run_of_the_system, runpy.run_module = runpy.run_module, _run_module
if _VARIABLE in os.environ:
    _begin()
