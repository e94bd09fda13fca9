"""Agree on each phase of a save between the background threads of all processes.

An attempt to save consists of phases. A phase that fails on one process fails on all
processes immediately, with the same error text.
"""

import collections
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from mjax.ckpt.errors import FinalError
from mjax.processes.agreement import DAY_S, Agreement

EXPECTED = (OSError, ValueError, RuntimeError, MemoryError)
"""Errors that a store or a machine can cause; any other error is a bug in mjax."""


class FailedError(RuntimeError):
    """A phase failed on some process; every process raises this, with the same text.

    On the process that failed, the cause (`__cause__`) is the original error.
    """

    is_final = False
    """Whether another attempt would be useless; set on process 0 only."""


def open_agreement() -> Agreement:
    """Open the agreement that the saving threads use for the phases of all attempts."""
    return Agreement("saves", (FailedError,), timeout_s=DAY_S)


class Phases:
    """The phases of one attempt; every process goes through them in the same order."""

    def __init__(
        self, agreement: Agreement, names: Mapping[str, bool], *, timeout_s: int
    ) -> None:
        """Begin an attempt.

        Args:
          agreement: agreement that only the saving threads use.
          names: name of each phase, in order -> whether process 0 acts alone in it.
          timeout_s: time after which a phase fails if a process does not answer. The
            wait for process 0 has no limit, because it may be slow.
        """
        self.rank = agreement.rank
        self._agreement = agreement
        self._left = collections.deque(names.items())
        self._timeout_s = timeout_s if agreement.rank == 0 else DAY_S

    def lead(self, name: str, act: Callable[[], str]) -> str:
        """Call `act` on process 0, and return its result on every process.

        Raises:
          FailedError: `act` failed.
        """
        self._enter(name, is_led=True)

        def guarded() -> str:
            try:
                return act()
            except BaseException as error:  # all processes must know
                failure = FailedError(in_words(error))
                failure.is_final = isinstance(error, FinalError)
                raise failure from error

        return self._agreement.decide(guarded)

    def together(self, name: str, act: Callable[[], int]) -> list[int]:
        """Call `act` on every process; return the list of results in order of rank.

        Raises:
          FailedError: `act` failed on a process, or a process does not answer.
        """
        self._enter(name, is_led=False)
        problem = None
        try:
            answer: list[Any] = [act(), None, False]
        except BaseException as error:  # all processes must know
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
        """Make the next phase fail on all processes; return the joint error text.

        For an error between two phases, which the other processes have not seen.
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
        """End the attempt; return process 0's decision, a JSON value, on all."""
        return json.loads(self._agreement.decide(lambda: json.dumps(decision)))


def in_words(problem: BaseException) -> str:
    """Return the text of an error in one line."""
    lines = str(problem).splitlines()
    return lines[0] if lines else repr(problem)


def _values(answers: Sequence[str]) -> str:
    """Return the answers of all processes as a JSON list in order of rank.

    Raises:
      FailedError: an answer is an error.
    """
    found = [json.loads(answer) for answer in answers]
    errors = [f"process {rank}: {e}" for rank, (_, e, _) in enumerate(found) if e]
    if errors:
        failure = FailedError("; ".join(errors))
        failure.is_final = any(is_final for _, _, is_final in found)
        raise failure
    return json.dumps([value for value, _, _ in found])
