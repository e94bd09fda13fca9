"""Account for the time of a run, in events for the ledger.

Input: the states of the ranks of a generation. Output: two events for each generation.

- `under_way`, when all ranks have taken their first step: the seconds of each phase
  until then, for the rank whose first step ended last.
- `times`, when the ranks have ended: the seconds that the lowest rank spent in each
  phase. The event also gives `asked_s`: the host of this rank was asked to start it at
  this time at the latest.

The driver's own times are in its events of kind `state`.
"""

from collections.abc import Callable, Mapping

from mjax.launch.messages import RankState
from mjax.processes.progress import Phase

_START = (Phase.IMPORT, Phase.INIT, Phase.BUILD, Phase.COMPILE, Phase.RESTORE)

_SHOWN_S = 0.1
"""Minimum seconds for which the text of an event names a phase. The data of the event
contain all phases."""


class Times:
    """Counts the seconds of successive generations."""

    def __init__(
        self,
        tell: Callable[..., None],
        real_s: Callable[[float], float] = lambda at_s: at_s,
    ) -> None:
        """Create the counter; `begin` begins the first generation.

        Args:
          tell: records an event, see `events.teller`.
          real_s: converts a time of the driver's clock to the monotonic clock.
        """
        self._tell, self._real_s = tell, real_s
        self._waiting: set[int] = set()
        self._last: RankState | None = None
        self._asked_s: dict[int, float] = {}
        self._lowest: tuple[RankState, float] | None = None

    def begin(self, num_ranks: int) -> None:
        """Begin a generation."""
        self._waiting, self._last = set(range(num_ranks)), None
        self._asked_s, self._lowest = {}, None

    def look(self, states: Mapping[int, RankState], now_s: float) -> None:
        """Record start times. When all ranks have taken a step, send `under_way` once.

        Args:
          states: states of the ranks of one host.
          now_s: current time.
        """
        for rank, state in states.items():
            # `spent_s` adds up to the seconds since the host was asked to start the
            # rank, by the clock of the host.
            if rank not in self._asked_s:
                self._asked_s[rank] = self._real_s(now_s) - sum(state.spent_s)
        rank = min(states, default=None)
        if rank is not None and (self._lowest is None or rank <= self._lowest[0].rank):
            self._lowest = states[rank], now_s
        if not self._waiting:
            return
        for rank, state in states.items():
            if rank not in self._waiting or state.first_step_s is None:
                continue
            self._waiting.discard(rank)
            last_s = 0.0 if self._last is None else self._last.first_step_s or 0.0
            if self._last is None or state.first_step_s > last_s:
                self._last = state
            if not self._waiting:
                self._tell_start(self._last)

    def _tell_start(self, last: RankState) -> None:
        by_phase = _until_first_step(last)
        shown = ", ".join(
            f"{_shown(name, last)} {spent_s:.2f}" for name, spent_s in by_phase.items()
        )
        self._tell(
            "under_way",
            f"first step {last.first_step_s:.2f} s after the start: {shown}",
            rank=last.rank,
            data={"first_step_s": last.first_step_s, "spent_s": by_phase},
        )

    def ended(
        self,
        states: Mapping[int, RankState],
        silent_s: Callable[[int], float],
        now_s: float,
    ) -> None:
        """Send `times` for a generation whose ranks have ended.

        Args:
          states: last states of all ranks; empty if agents have restarted. If it is
            empty, the last state of the lowest rank that `look` has seen is used.
          silent_s: maps a rank to the seconds since the last message of its host.
          now_s: current time.
        """
        if states:
            state = states[min(states)]
            unheard_s = silent_s(state.rank)
        elif self._lowest is not None:
            state, heard_s = self._lowest
            unheard_s = now_s - heard_s
        else:
            return
        by_phase = {phase.name.lower(): state.spent_s[phase] for phase in Phase}
        longest = ", ".join(
            f"{_shown(name, state)} {spent_s:.1f}"
            for name, spent_s in by_phase.items()
            if spent_s >= _SHOWN_S
        )
        self._tell(
            "times",
            f"rank {state.rank} ran for {sum(by_phase.values()):.1f} s: {longest}",
            rank=state.rank,
            data={
                "spent_s": by_phase,
                "phase": Phase(state.phase).name.lower(),
                "age_s": state.age_s,
                "asked_s": self._asked_s.get(state.rank),
                "silent_s": 0.0 if state.code is not None else unheard_s,
                "start_step": state.start_step,
                "step": state.step,
                "saved_step": state.saved_step,
            },
        )


def _shown(name: str, state: RankState) -> str:
    """Return the name of a phase for people.

    A run that begins at step 0 restores nothing, so its phase `restore` is shown as
    initialise.
    """
    is_new = name == Phase.RESTORE.name.lower() and state.start_step == 0
    return "initialise" if is_new else name


def _until_first_step(state: RankState) -> dict[str, float]:
    """Return name -> seconds, for each phase before the first step and for the step."""
    by_phase = {phase.name.lower(): state.spent_s[phase] for phase in _START}
    rest_s = (state.first_step_s or 0.0) - sum(by_phase.values())
    return by_phase | {"step": rest_s}
