"""How the processes of a run come to one mind, by texts on the board."""

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax

from mjax.processes.board import Board

_DAY_S = 86_400.0
# Every process makes its agreements in the same order: the number is the same in all.
_made = itertools.count()


class Agreement:
    """Rounds of texts; every process takes part in each, in the same order."""

    def __init__(self, errors: tuple[type[Exception], ...]) -> None:
        """Take part.

        Args:
          errors: kinds that `decide` raises in every process as they are; others that
            it knows become RuntimeError.
        """
        self.rank, self.num = jax.process_index(), jax.process_count()
        self._board = Board(f"agreement/{next(_made)}")
        self._rounds = itertools.count()
        self._kinds: Mapping[str, type[Exception]] = {e.__name__: e for e in errors}

    def decide(self, decide: Callable[[], str]) -> str:
        """Decide on process 0 and give every process the same text.

        Raises:
          RuntimeError: `decide` raised it, or OSError; every process raises it.
          Exception: of a kind in `errors`; likewise.
        """
        answer: dict[str, Any] = {}
        if self.rank == 0:
            try:
                answer = {"value": decide()}
            except (*self._kinds.values(), RuntimeError, OSError) as error:
                answer = {"error": str(error), "kind": type(error).__name__}
        answer = json.loads(self.from_rank(0, json.dumps(answer)))
        if "error" in answer:
            raise self._kinds.get(answer["kind"], RuntimeError)(answer["error"])
        return answer["value"]

    def together[T](self, act: Callable[[], T]) -> T:
        """Act on every process; what fails in one is raised in all.

        Without it a process that fails alone would leave the others waiting in the
        next round.

        Raises:
          RuntimeError: `act` raised it, or OSError, or in another process anything.
          Exception: of a kind in `errors`; likewise. What is none of these is raised
            as it is where it happened.
        """
        result, problem, kind = None, None, ""
        try:
            result = act()
        except Exception as error:  # whatever it is, the others must know
            problem = error
            kind = next((k for k, v in self._kinds.items() if isinstance(error, v)), "")
        failed = problem is not None
        texts = self.all_of(json.dumps([failed, kind, str(problem)]))
        if isinstance(problem, OSError):
            raise RuntimeError(str(problem)) from problem
        if problem is not None:
            raise problem
        for rank, (failed, kind, text) in enumerate(map(json.loads, texts)):
            if failed:
                raise self._kinds.get(kind, RuntimeError)(f"process {rank}: {text}")
        return cast(T, result)

    def from_rank(self, rank: int, text: str) -> str:
        """Give every process the text of one of them."""
        key = f"{next(self._rounds)}"
        if self.num == 1:
            return text
        if self.rank == rank:
            self._board.post(key, text)
            return text
        return self._board.read(key, timeout_s=_DAY_S)

    def all_of(self, text: str) -> list[str]:
        """Give every process the texts of all, by rank."""
        key = f"{next(self._rounds)}"
        if self.num == 1:
            return [text]
        self._board.post(f"{key}/{self.rank}", text)
        ranks = range(self.num)
        return [self._board.read(f"{key}/{rank}", timeout_s=_DAY_S) for rank in ranks]
