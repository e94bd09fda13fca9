"""The policy: causes of failures and the response to each.

Input: the exit of a rank process, or its lack of progress. Output: a cause, and the
action for this cause. `TABLE` is the policy; docs/resilience.md shows it.

Source: MegaScale, arXiv:2402.15627, section 4; ByteRobust, arXiv:2509.16293.
"""

import dataclasses
import enum
import signal

from mjax.launch.messages import LastWords


class Cause(enum.StrEnum):
    """Why a generation of the run ended."""

    DONE = "done"
    PREEMPTED = "preempted"
    GAVE_UP = "gave up"
    DIVERGED = "diverged"
    CORRUPTED = "replicas differ, most agree"
    SUSPECTED = "replicas differ"
    BAD_INPUT = "bad input"
    OUT_OF_MEMORY = "out of memory"
    KILLED = "killed"
    CRASHED = "crashed"
    FAILED = "failed"
    HUNG = "hung"
    GPU_FAULT = "GPU fault"
    HOST_FAULT = "host fault"
    NETWORK = "network error"
    STORE = "file system error"
    UNKNOWN = "unknown"
    HOST_LOST = "host lost"
    EVICTED = "evicted by a person"


class Action(enum.StrEnum):
    """Response to a failure."""

    END = "end the run with the exit code of its processes"
    RESTART = "restart on the same hosts"
    CHECK = "check the host, then restart"
    EVICT = "replace the host, then restart"
    ROLL_BACK = "go back some saves and leave out the data since, then restart"


@dataclasses.dataclass(frozen=True)
class Rule:
    """The action for a cause."""

    action: Action
    reason: str
    """Why the action is right for the cause."""


TABLE: dict[Cause, Rule] = {
    Cause.DONE: Rule(Action.END, "every process has taken its last step"),
    Cause.PREEMPTED: Rule(Action.RESTART, "a signal from outside; the state is saved"),
    Cause.GAVE_UP: Rule(Action.END, "the same command would fail the same way"),
    Cause.DIVERGED: Rule(
        Action.ROLL_BACK, "an older state may not diverge on other data"
    ),
    Cause.CORRUPTED: Rule(
        Action.EVICT, "hardware that computes wrong once does so again"
    ),
    Cause.SUSPECTED: Rule(Action.CHECK, "it is not yet known which replica is wrong"),
    Cause.BAD_INPUT: Rule(Action.END, "only a person can change the flags"),
    Cause.OUT_OF_MEMORY: Rule(
        Action.RESTART, "other programs may have filled the memory"
    ),
    Cause.KILLED: Rule(Action.RESTART, "the process did nothing wrong"),
    Cause.CRASHED: Rule(Action.CHECK, "it is not yet known whether the host is broken"),
    Cause.FAILED: Rule(
        Action.RESTART, "an error of the network or the store is temporary"
    ),
    Cause.HUNG: Rule(Action.CHECK, "it is not yet known whether the host is broken"),
    Cause.GPU_FAULT: Rule(Action.EVICT, "a GPU that has failed does so again"),
    Cause.HOST_FAULT: Rule(Action.EVICT, "hardware that has failed does so again"),
    Cause.NETWORK: Rule(Action.CHECK, "it is not yet known whose port is broken"),
    Cause.STORE: Rule(Action.RESTART, "file systems recover"),
    Cause.UNKNOWN: Rule(Action.CHECK, "it is not yet known which host is broken"),
    Cause.HOST_LOST: Rule(Action.EVICT, "the host does not answer"),
    Cause.EVICTED: Rule(Action.EVICT, "a person may know more than the launch"),
}

EXIT_CODES = {
    Cause.DONE: 0,
    Cause.BAD_INPUT: 2,
    Cause.PREEMPTED: 42,
    Cause.GAVE_UP: 93,
    Cause.DIVERGED: 93,
    Cause.CORRUPTED: 93,
    Cause.SUSPECTED: 93,
}
"""Cause -> exit code of `python -m mjax.train`, and of a launch with this cause."""
OF_HARDWARE = (Cause.GPU_FAULT, Cause.HOST_FAULT, Cause.CORRUPTED)
"""Causes after which a host may train again only if it passes a test under load."""
_KILLED_IN_A_SHELL = 128 + signal.SIGKILL  # containers also report this
_CAUSES = {code: cause for cause, code in EXIT_CODES.items()} | {
    EXIT_CODES[Cause.GAVE_UP]: Cause.GAVE_UP,
    _KILLED_IN_A_SHELL: Cause.KILLED,
}
_KILLS = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}

RANKING = (
    Cause.BAD_INPUT,
    Cause.CORRUPTED,
    Cause.SUSPECTED,
    Cause.DIVERGED,
    Cause.GAVE_UP,
    Cause.OUT_OF_MEMORY,
    Cause.KILLED,
    Cause.CRASHED,
    Cause.FAILED,
    Cause.PREEMPTED,
    Cause.DONE,
)
"""Order of the causes of simultaneous ends: each cause explains the causes after it."""


def cause_of(
    code: int, *, out_of_memory: bool = False, last_words: LastWords | None = None
) -> Cause:
    """Return the cause of an exit code.

    Args:
      code: exit code, as in `subprocess.Popen.returncode`; negative for a signal.
      out_of_memory: whether the kernel's OOM killer has ended a process of the host.
      last_words: report of a rank that gave up; None if there is none.
    """
    if last_words is not None and code == EXIT_CODES[Cause.GAVE_UP]:
        if last_words.corrupted is None:
            return Cause.DIVERGED
        return Cause.CORRUPTED if last_words.corrupted.is_sure else Cause.SUSPECTED
    if out_of_memory and code in (-signal.SIGKILL, _KILLED_IN_A_SHELL):
        return Cause.OUT_OF_MEMORY
    if code in _KILLS:
        return Cause.KILLED
    return _CAUSES.get(code, Cause.CRASHED if code < 0 else Cause.FAILED)


def is_failure(code: int) -> bool:
    """Return whether an exit code means a failure: neither done nor preempted."""
    return cause_of(code) not in (Cause.DONE, Cause.PREEMPTED)


def is_consequence(code: int) -> bool:
    """Return whether an exit code may follow from the end of another process.

    jax ends a process with SIGABRT when its coordinator or another process is gone. A
    collective raises when another process has left it, which gives exit code 1.
    """
    return code in (-signal.SIGABRT, 1)
