"""Agreement between the background threads that save one step.

An attempt to save has phases. A phase that fails on one process fails on all of them,
at once and with the same text.
"""

import collections
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from mjax.processes.agreement import DAY_S, Agreement

EXPECTED = (OSError, ValueError, RuntimeError, MemoryError)
"""Errors that a store or a machine can cause; others are bugs of this program."""


class FinalError(RuntimeError):
    """A failure that every other attempt would meet again."""


class FailedError(RuntimeError):
    """A phase failed on some process; every process raises this, with the same text.

    Where it failed, the cause is what was raised there.
    """

    is_final = False
    """Whether another attempt would be useless; only process 0 knows."""


def open_agreement() -> Agreement:
    """Open the agreement of the threads that save, for the phases of all attempts."""
    return Agreement("saves", (FailedError,), timeout_s=DAY_S)


class Phases:
    """The phases of one attempt; every process goes through them in the same order."""

    def __init__(
        self, agreement: Agreement, names: Mapping[str, bool], *, timeout_s: int
    ) -> None:
        """Begin.

        Args:
          agreement: used by the saving threads only.
          names: names of the phases, in order, and whether process 0 acts alone in it.
          timeout_s: time after which a phase fails if a process does not answer. The
            wait for process 0 has no limit, because it may be slow.
        """
        self.rank = agreement.rank
        self._agreement = agreement
        self._left = collections.deque(names.items())
        self._timeout_s = timeout_s if agreement.rank == 0 else DAY_S

    def lead(self, name: str, act: Callable[[], str]) -> str:
        """Act on process 0, and return its result on every process.

        Raises:
          FailedError: it failed.
        """
        self._enter(name, is_led=True)

        def guarded() -> str:
            try:
                return act()
            except BaseException as error:  # the others have to know, whatever it is
                raise FailedError(in_words(error)) from error

        return self._agreement.decide(guarded)

    def together(self, name: str, act: Callable[[], int]) -> list[int]:
        """Act on every process; return the results by process.

        Raises:
          FailedError: it failed on some process, or a process does not answer.
        """
        self._enter(name, is_led=False)
        problem = None
        try:
            answer: list[Any] = [act(), None, False]
        except BaseException as error:  # the others have to know, whatever it is
            problem = error
            answer = [0, in_words(error), isinstance(error, FinalError)]
        text = json.dumps(answer)
        try:
            values = self._agreement.merge(text, _values, timeout_s=self._timeout_s)
        except FailedError as error:
            raise error from problem
        except RuntimeError as error:  # a process does not answer
            own = "" if problem is None else f"process {self.rank}: {answer[1]}; "
            raise FailedError(f"{own}{error}") from problem
        return json.loads(values)

    def fail(self, problem: BaseException) -> str:
        """Let the next phase fail on all processes; return what they say.

        For an error between two phases, which the other processes cannot see.
        """
        text = in_words(problem)

        def act() -> NoReturn:
            raise RuntimeError(text)

        while self._left:
            name, is_led = self._left[0]
            try:
                self.lead(name, act) if is_led else self.together(name, act)
            except FailedError as error:
                return str(error)
        return text

    def _enter(self, name: str, *, is_led: bool) -> None:
        entered = self._left.popleft()
        assert entered == (name, is_led), entered

    def close(self, decision: Any = None) -> Any:
        """End the attempt; return the decision of process 0, a JSON, everywhere."""
        return json.loads(self._agreement.decide(lambda: json.dumps(decision)))


def in_words(problem: BaseException) -> str:
    """Say what an error is about, in one line."""
    lines = str(problem).splitlines()
    return lines[0] if lines else repr(problem)


def _values(answers: Sequence[str]) -> str:
    """Merge the answers of all processes, by rank, or say what failed."""
    found = [json.loads(answer) for answer in answers]
    errors = [f"process {rank}: {e}" for rank, (_, e, _) in enumerate(found) if e]
    if errors:
        failure = FailedError("; ".join(errors))
        failure.is_final = any(is_final for _, _, is_final in found)
        raise failure
    return json.dumps([value for value, _, _ in found])
