"""How a run ends: the exit codes, and what SIGTERM and Ctrl-C do.

Before the first step nothing can be lost, so a signal may end the process at once. But
native code (an import, a compilation, a read from a store) may block the main thread
for minutes, during which no Python signal handler runs. So the program calls `watch`,
which starts a thread that ends the process as soon as a signal arrives. In the loop a
signal becomes a request that all processes see at the same safe point (`StopRequest`).

The program imports this module before jax, so jax is imported inside functions here.
"""

import contextlib
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from mjax import printable
from mjax.cli import exit_codes
from mjax.run.tracking.delivery import left_behind

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STOPPED = "mjax/stopped before the first step"
_POLL_S = 0.25
_POLLS_PER_S = 4000  # polls of all processes together, at the coordinator
_PARTING_S = 10


class _Watch:
    """Ends the process from a thread when a signal comes, until the loop begins."""

    def __init__(self) -> None:
        self.received: int | None = None
        """The last signal that reached Python's handler."""
        self._exit_code: int | None = exit_codes.PREEMPTED
        self._is_early = True
        self._client: Any = None
        self._rank, self._poll_s = 0, _POLL_S
        self._lock = threading.Lock()
        self._pipe, writer = os.pipe()
        os.set_blocking(writer, False)
        # Python's C handler writes the number of the signal to the pipe, even while the
        # main thread is in native code.
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, self._note)
        threading.Thread(target=self._run, name="mjax-signals", daemon=True).start()

    def join(self, client: Any, rank: int, num_processes: int) -> None:
        """From now on, end all processes when a signal stops one of them."""
        with self._lock:
            self._client, self._rank = client, rank
            self._poll_s = max(_POLL_S, num_processes / _POLLS_PER_S)

    def hold(self) -> None:
        """From now on, leave signals to a `StopRequest`."""
        with self._lock:
            self._exit_code, self._is_early = None, False

    def release(self, exit_code: int) -> None:
        """From now on, a signal ends the process with `exit_code`."""
        with self._lock:
            self._exit_code = exit_code

    def _note(self, number: int, frame: object) -> None:
        del frame
        self.received = number

    def _run(self) -> None:
        while True:
            timeout_s = self._poll_s if self._is_early else None
            ready, _, _ = select.select([self._pipe], [], [], timeout_s)
            number = os.read(self._pipe, 1)[0] if ready else None
            with self._lock:
                if self._exit_code is None:
                    continue
                if number in _SIGNALS:
                    self._leave(signal.Signals(number).name, self._exit_code)
                elif self._is_early and (other := self._stopped_elsewhere()):
                    self._leave(other, self._exit_code)

    def _stopped_elsewhere(self) -> str | None:
        if self._client is None:
            return None
        try:
            return self._client.key_value_try_get(_STOPPED)
        except RuntimeError:  # no process was stopped, or the coordinator is gone
            return None

    def _leave(self, cause: str, exit_code: int) -> NoReturn:
        if self._is_early:
            words = f"stopped by {cause} before the first step; nothing is lost\n"
            with contextlib.suppress(OSError):  # below the filter of `mjax.Screen`
                os.write(2, printable(words).encode())
            if self._client is not None:
                self._tell_others(cause)
        os._exit(exit_code)

    def _tell_others(self, cause: str) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # another process has set the key, or the coordinator is gone
            self._client.key_value_set(_STOPPED, f"{cause} to process {self._rank}")
        if self._rank == 0:  # the coordinator; the others must read before it ends
            time.sleep(3 * self._poll_s)


_watch: _Watch | None = None


def watch() -> None:
    """Let SIGTERM and Ctrl-C end this process with PREEMPTED until the loop begins.

    A program calls this in its main thread, before slow imports. Code that only imports
    mjax keeps its own handlers.
    """
    global _watch
    _watch = _Watch()


def watch_processes() -> None:
    """Stop all processes when one is stopped before the loop.

    Call it after `distributed.start`.
    """
    from mjax.processes import distributed

    if _watch is not None and distributed.num_processes() > 1:
        client, rank = distributed.client(), distributed.rank()
        _watch.join(client, rank, distributed.num_processes())


class StopRequest:
    """A stop by SIGTERM or Ctrl-C that all processes see at the same point.

    Use it in a with statement around the loop, in the main thread. A second Ctrl-C ends
    the process at once, with INTERRUPTED. With several processes, jax itself catches
    SIGTERM and agrees on a safe point, and Ctrl-C is turned into SIGTERM.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._received_s = 0.0
        self._interrupts = 0
        self._previous: dict[int, Any] = {}
        self._num_safe_points = 0
        self._is_reached = self._is_asked = False
        self._agreed: Callable[[int], bool] | None = None

    def __enter__(self) -> "StopRequest":
        import jax

        is_alone = jax.process_count() == 1
        for number in _SIGNALS if is_alone else [signal.SIGINT]:
            self._previous[number] = signal.signal(number, self._handle)
        if _watch is not None:
            _watch.hold()
        if not is_alone:
            self._agreed = _start_agreement()
        if _watch is not None and _watch.received is not None:
            # This signal arrived before the handlers above were set. The watch thread
            # cannot have read it before `hold`, because then it would have ended the
            # process. After `hold` the thread ignores the signal. So send it again, to
            # this StopRequest.
            os.kill(os.getpid(), _watch.received)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def reached(self) -> bool:
        """Return whether the run stops at this safe point; once true, always true.

        Safe points are after each step, before each batch of an evaluation, and before
        each token of the sample. All processes call this at the same points in the same
        order.
        """
        if not self._is_reached:
            self._num_safe_points += 1
            if self._agreed is not None:
                self._is_reached = self._agreed(self._num_safe_points)
            else:
                self._is_reached = self._received is not None
        return self._is_reached

    def ask(self) -> None:
        """Request the stop from inside this process; all processes stop."""
        if self._is_asked:
            return
        self._is_asked = True
        if self._agreed is not None:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._received = self._received or signal.SIGTERM

    def announce_save(self, step: int, say: Callable[[str], None]) -> None:
        """Say that a state is being saved, if Ctrl-C has asked this process to stop."""
        if self._interrupts:
            say(f"saving step {step}; press Ctrl-C again to stop without saving")

    def stopped_s(self) -> float | None:
        """Return the seconds since the stop; None: the run goes on.

        Each call is a safe point, see `reached`. With several processes the time counts
        from their agreement to stop, because jax does not report when the signal came.
        """
        if not self.reached():
            return None
        self._received_s = self._received_s or time.monotonic()
        return time.monotonic() - self._received_s

    def _handle(self, number: int, frame: object) -> None:
        del frame
        self._received_s = self._received_s or time.monotonic()
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                # Begin a new line: the terminal shows ^C behind the live line of
                # progress (`run.terminal`).
                os.write(2, b"\nstopped without saving\n")
                os._exit(exit_codes.INTERRUPTED)
            if self._agreed is not None:
                os.kill(os.getpid(), signal.SIGTERM)
        self._received = number


def _start_agreement() -> Callable[[int], bool]:
    """Let jax catch SIGTERM in place of the current handler.

    Returns:
      jax's function that takes the number of a safe point and returns whether all
      processes stop there.
    """
    import jax
    from jax._src.distributed import global_state
    from jax.experimental import multihost_utils

    if global_state.preemption_sync_manager is None:
        jax.config.update("jax_enable_preemption_service", True)
        global_state.initialize_preemption_sync_manager()
    return multihost_utils.reached_preemption_sync_point


def leave(exit_code: int) -> NoReturn:
    """End the process.

    With several processes, jax's shutdown waits until all processes have called it. If
    a process never calls it, the others wait for minutes. So a process that failed
    skips the shutdown, because the others may never call it. After a stop for any other
    reason, the other processes usually stop too and call it. Process 0 must then wait
    for the others, because the coordinator ends with process 0.

    If a tracker has not finished, exit hooks do not run, because a hook of the
    tracker's library would wait for the tracker.
    """
    if _watch is not None:
        _watch.release(exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    if exit_code != exit_codes.DONE and _has_others():
        if exit_code != exit_codes.FAILED:
            import jax

            parting = threading.Thread(target=jax.distributed.shutdown, daemon=True)
            parting.start()
            parting.join(_PARTING_S)
        os._exit(exit_code)
    if left_behind():
        if _has_others():
            import jax

            jax.distributed.shutdown()  # what jax's exit hook would do
        os._exit(exit_code)
    # The interpreter's last garbage collection would take 0.7 s.
    gc.freeze()
    sys.exit(exit_code)


def _has_others() -> bool:
    """Return whether this process has joined a run of several processes."""
    if "jax" not in sys.modules:  # the process has only read its flags
        return False
    # jax.process_count() would initialise the devices; a process with invalid flags
    # exits without needing them.
    from mjax.processes import distributed

    return distributed.num_processes() > 1


def is_ours(error: Exception) -> bool:
    """Return whether mjax itself raised an error.

    mjax raises errors for bad input. An error that a library raises is a bug.
    """
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    origin = frame.tb_frame.f_code.co_filename if frame is not None else ""
    return Path(origin).is_relative_to(Path(__file__).parent.parent)
