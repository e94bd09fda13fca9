"""Wait for uploads at the end of a run.

Input: the uploader of each process, and the time limits. Output: a text on what is
missing in the store, on every process at the same time. The processes synchronise once
a second. If one process exited early, its part of an upload would be lost; a process
that does not answer must not delay the others.
"""

import time
from collections.abc import Callable, Sequence

from mjax.ckpt.remote.uploader import Uploader
from mjax.processes.agreement import Agreement

_ROUND_S = 1.0
_ANSWER_S = 60
"""Seconds after which a process that does not answer is no longer waited for."""
_GO_ON = "go on"


def wait_for_uploads(
    uploader: Uploader,
    agreement: Agreement,
    *,
    wait_s: int,
    stop_wait_s: int,
    stopped_s: Callable[[], float | None],
    missing: Callable[[str], str],
) -> str:
    """Wait for all uploads or a time limit; return a text on what is missing.

    Every process calls this. All return the same text, unless one does not answer.

    Args:
      uploader: the uploader of this process.
      agreement: agreement of the training threads.
      wait_s: time limit, --ckpt.remote-wait-s.
      stop_wait_s: time limit after a signal stopped the run,
        --ckpt.remote-stop-wait-s.
      stopped_s: returns the seconds since a signal stopped the run; None if none did.
        All processes call it in every round.
      missing: returns the text on what is missing. Process 0 calls it at the end with
        the reason why the wait ended, or "" if nothing is left to upload.
    Returns:
      The result of `missing`, the same on every process; "" if nothing is missing.
    """
    began_s = time.monotonic()
    uploader.hurry()

    def verdict(failures: Sequence[str]) -> str:
        for rank, failure in enumerate(failures):
            if failure:
                died = f"the upload thread of process {rank} has died: {failure}"
                return missing(died)
        left_s = wait_s - (time.monotonic() - began_s)
        reason = f"after {wait_s} s (--ckpt.remote-wait-s)"
        if stop_s is not None and stop_wait_s - stop_s < left_s:
            left_s = stop_wait_s - stop_s
            reason = f"{stop_wait_s} s after the stop (--ckpt.remote-stop-wait-s)"
        if uploader.wait(min(max(0.0, left_s), _ROUND_S)):
            return missing("")
        if left_s > _ROUND_S and uploader.is_alive:
            return _GO_ON
        return missing(reason + f": {uploader.problem}" * bool(uploader.problem))

    while True:
        stop_s = stopped_s()
        try:
            answer = agreement.merge(uploader.failure, verdict, timeout_s=_ANSWER_S)
        except RuntimeError as error:  # a process does not answer
            return missing(str(error))
        if answer != _GO_ON:
            return answer
