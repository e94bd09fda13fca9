"""Agreement between processes: all get the same answer, or all raise.

Every process gives its text to process 0, which posts one answer: the traffic grows
linearly with the number of processes. The texts are in the key-value store, so a
process can still answer after an error, and threads can agree while the devices
compute.
"""

import collections
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mjax.processes import distributed, progress
from mjax.processes.key_value import KeyValueStore

DAY_S = 86_400
_HOUR_S = 3_600
# Process 0 knows which processes are missing, so its message must arrive before the
# other processes give up.
_MARGIN_S = 10
_lock = threading.Lock()
_opened: collections.Counter[str] = collections.Counter()


class Agreement:
    """Rounds of agreement in which all processes take part, in the same order.

    Each thread needs its own agreement.
    """

    def __init__(
        self,
        name: str,
        errors: tuple[type[Exception], ...] = (),
        *,
        timeout_s: int | float = _HOUR_S,
    ) -> None:
        """Join an agreement.

        Args:
          name: name of the agreement, the same in every process. All processes create
            their agreements in the same order.
          errors: exception types that the other processes raise unchanged, besides
            ValueError and NotImplementedError. An exception of any other type becomes
            a RuntimeError in the other processes.
          timeout_s: seconds that a round waits for a process.
        """
        self.rank, self.num = distributed.rank(), distributed.num_processes()
        with _lock:
            number = _opened[name]
            _opened[name] += 1
        self._store = KeyValueStore(f"agreement/{name}/{number}")
        self._name, self._timeout_s = name, timeout_s
        self._rounds = itertools.count()
        self._oldest = 0
        known = (*errors, ValueError, NotImplementedError, RuntimeError)
        self._kinds = {kind.__name__: kind for kind in known}

    def decide(self, decide: Callable[[], str]) -> str:
        """Decide on process 0 and give every process the same text.

        Raises:
          Exception: `decide` raised it. The other processes raise an exception with the
            same message and, if the type is known, of the same type. OSError becomes
            RuntimeError.
        """
        answer, problem = {}, None
        if self.rank == 0:
            answer, problem = self._outcome(decide)
        text = self.from_rank(0, json.dumps(answer))
        if problem is not None:
            _raise(problem)
        return self._value(json.loads(text))

    def together[T](
        self, act: Callable[[], T], *, timeout_s: int | float | None = None
    ) -> T:
        """Call `act` on every process; raise an error of one process in all of them.

        Args:
          act: function to call. A process in which it fails raises its own error; the
            others raise the error of the first failed process, with its number.
          timeout_s: timeout instead of the agreement's.
        Raises:
          Exception: see `decide`.
          RuntimeError: a process did not answer; the message has its number.
        """
        answer, problem = self._outcome(act)
        failure = "" if problem is None else json.dumps(answer)
        try:
            first = self.merge(failure, _first_failure, timeout_s=timeout_s)
        finally:
            # The error of this process says more than a list of missing processes.
            if problem is not None:
                _raise(problem)
        if first:
            self._value(json.loads(first))
        return answer["value"]

    def all_of(self, text: str) -> list[str]:
        """Give every process the texts of all processes, by rank."""
        return json.loads(self.merge(text, json.dumps))

    def from_rank(self, rank: int, text: str) -> str:
        """Give every process the text of process `rank`.

        Raises:
          RuntimeError: process `rank` did not answer.
        """
        number = next(self._rounds)
        if self.num == 1:
            return text
        if self.rank == rank:
            self._store.post(f"{number}/answer", text)
            return text
        return self._answer(number, rank, self._timeout_s)

    def merge(
        self,
        text: str,
        merge: Callable[[Sequence[str]], str],
        *,
        timeout_s: int | float | None = None,
    ) -> str:
        """Merge the texts of all processes on process 0 and return the result to all.

        Args:
          text: text of this process.
          merge: function that process 0 calls with all texts, by rank.
          timeout_s: timeout instead of the agreement's.
        Raises:
          Exception: `merge` raised it; see `decide`.
          RuntimeError: a process did not answer; the message has its number.
        """
        number = next(self._rounds)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if self.num == 1:
            return merge([text])
        if self.rank != 0:
            self._store.post(f"{number}/of/{self.rank}", text)
            answer = self._answer(number, 0, timeout_s + _MARGIN_S)
            return self._value(json.loads(answer))
        answer, problem = self._outcome(
            lambda: merge([text, *self._collect(number, timeout_s)])
        )
        self._store.post(f"{number}/answer", json.dumps(answer))
        self._store.remove(f"{number}/of")
        if problem is not None:
            _raise(problem)
        for old in range(self._oldest, number):  # all processes have read these
            self._store.remove(f"{old}")
        self._oldest = number
        return answer["value"]

    def _collect(self, number: int, timeout_s: int | float) -> list[str]:
        """Return the texts of the other processes, by rank."""
        until_s = time.monotonic() + timeout_s
        texts = []
        for rank in range(1, self.num):
            key, left_s = f"{number}/of/{rank}", until_s - time.monotonic()
            try:
                texts.append(self._store.read(key, timeout_s=max(0, left_s)))
            except TimeoutError:
                came = {int(name) for name in self._store.names(f"{number}/of")}
                missing = [r for r in range(1, self.num) if r not in came]
                raise self._silent(missing or [rank], timeout_s) from None
        return texts

    def _answer(self, number: int, rank: int, timeout_s: int | float) -> str:
        try:
            return self._store.read(f"{number}/answer", timeout_s=timeout_s)
        except TimeoutError:
            raise self._silent([rank], timeout_s) from None

    def _silent(self, ranks: Sequence[int], timeout_s: int | float) -> RuntimeError:
        return RuntimeError(
            f"{name_processes(ranks)} did not answer within {timeout_s:.0f} s "
            f"(agreement on: {self._name}); see the output of that process"
        )

    def _outcome(
        self, act: Callable[[], Any]
    ) -> tuple[dict[str, Any], Exception | None]:
        try:
            return {"value": act()}, None
        except Exception as error:  # report any error to the other processes
            kinds = (k for k, kind in self._kinds.items() if isinstance(error, kind))
            kind = next(kinds, "")
            text = str(error) or type(error).__name__
            if not kind and not isinstance(error, OSError):
                text = f"{type(error).__name__}: {error}"
            return {"error": text, "kind": kind or RuntimeError.__name__}, error

    def _value(self, answer: dict[str, Any]) -> Any:
        if "error" in answer:
            error = self._kinds[answer["kind"]](answer["error"])
            error.add_note(progress.OF_ANOTHER)
            raise error
        return answer["value"]


def name_processes(ranks: Sequence[int]) -> str:
    """Format ascending ranks as "process 3" or "processes 1-3, 7"."""
    blocks: list[list[int]] = []
    for rank in ranks:
        if blocks and rank == blocks[-1][-1] + 1:
            blocks[-1][1:] = [rank]
        else:
            blocks.append([rank])
    words = ", ".join("-".join(map(str, block)) for block in blocks)
    return f"{'process' if len(ranks) == 1 else 'processes'} {words}"


def _first_failure(texts: Sequence[str]) -> str:
    """Return the error of the first failed process, with its number; "" if none."""
    for rank, text in enumerate(texts):
        if text:
            answer = json.loads(text)
            return json.dumps(answer | {"error": f"process {rank}: {answer['error']}"})
    return ""


def _raise(problem: Exception) -> None:
    if isinstance(problem, OSError):
        raise RuntimeError(str(problem)) from problem
    raise problem
