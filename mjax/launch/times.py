"""How the time of a run goes: events from which a ledger is computed.

Enters: the states of the ranks of a generation. Leaves an event when all of them have
taken a first step, with the seconds of each phase until then, and one when they have
ended, with the seconds that the lowest rank has spent in each phase. What the driver
does meanwhile is in its events of kind `state`.
"""

from collections.abc import Callable, Mapping

from mjax.launch.messages import RankState
from mjax.processes.progress import Phase

_START = (Phase.IMPORT, Phase.INIT, Phase.BUILD, Phase.COMPILE, Phase.RESTORE)


class Times:
    """Counts the seconds of one generation after the other."""

    def __init__(self, tell: Callable[..., None]) -> None:
        """Begin with none.

        Args:
          tell: records an event, see `events.teller`.
        """
        self._tell = tell
        self._is_under_way = False

    def begin(self) -> None:
        """Begin a generation."""
        self._is_under_way = False

    def look(self, states: Mapping[int, RankState]) -> None:
        """Say once that all ranks have taken a step.

        Args:
          states: of all ranks.
        """
        if self._is_under_way or any(s.first_step_s is None for s in states.values()):
            return
        self._is_under_way = True
        times_s = {rank: state.first_step_s or 0.0 for rank, state in states.items()}
        last = max(times_s, key=lambda rank: times_s[rank])
        by_phase = _until_first_step(states[last])
        shown = ", ".join(f"{name} {spent_s:.2f}" for name, spent_s in by_phase.items())
        self._tell(
            "under_way",
            f"first step {times_s[last]:.2f} s after the start: {shown}",
            rank=last,
            data={"first_step_s": times_s[last], "spent_s": by_phase},
        )

    def ended(self, states: Mapping[int, RankState]) -> None:
        """Say how the lowest rank of a generation that has ended spent its time."""
        if not states:
            return
        state = states[min(states)]
        by_phase = {phase.name.lower(): state.spent_s[phase] for phase in Phase}
        self._tell(
            "times",
            f"{sum(by_phase.values()):.1f} s of rank {state.rank}",
            rank=state.rank,
            data={
                "spent_s": by_phase,
                "phase": Phase(state.phase).name.lower(),
                "age_s": state.age_s,
                "start_step": state.start_step,
                "step": state.step,
                "saved_step": state.saved_step,
            },
        )


def _until_first_step(state: RankState) -> dict[str, float]:
    """Return the seconds of the phases before the first step, and of that step."""
    by_phase = {phase.name.lower(): state.spent_s[phase] for phase in _START}
    rest_s = (state.first_step_s or 0.0) - sum(by_phase.values())
    return by_phase | {"step": rest_s}
