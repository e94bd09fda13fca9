"""Detect hung ranks by their progress, and find the cause in their stacks.

Input: the states of all ranks, and the recent step time. Output: the hung ranks, orders
to collect stacks, and the failure with its evidence.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from mjax.launch import failures
from mjax.launch.config import RunConfig
from mjax.launch.failures import Failure
from mjax.launch.hosts import Fleet
from mjax.launch.liveness import Liveness
from mjax.launch.messages import BEAT_S, Dump, RankState, Stacks
from mjax.processes.progress import Phase

_SILENT_BEATS = 2


class Hangs:
    """Watches the ranks of a run for hangs."""

    def __init__(
        self, config: RunConfig, fleet: Fleet, tell: Callable[..., None]
    ) -> None:
        """Start without a known step time.

        Args:
          config: the limits.
          fleet: the hosts of the run.
          tell: records an event, see `events.teller`.
        """
        self._fleet, self._tell = fleet, tell
        self._liveness = Liveness(config.limits)
        self._stacks_s = config.restart.stacks_s
        self._until_s = 0.0
        self._stacks: dict[int, str] = {}
        self._spied: dict[int, str] = {}
        self._nccl: dict[str, str] = {}
        self._answered: set[str] = set()

    def took(self, state: RankState) -> None:
        """Record the time of a rank's last step, if it reports one."""
        self._liveness.took(state)

    def find(
        self, now_s: float, ends_by: tuple[float, str], *, has_ended: bool
    ) -> dict[int, str]:
        """Return the ranks that should have progressed or ended by now.

        If a rank exits or has ended, the others wait for it: its end tells why.

        Args:
          now_s: current time.
          ends_by: time by which all ranks must have ended, and the reason.
          has_ended: whether a rank has ended.
        Returns:
          Rank -> its phase, and the time limit that it has exceeded.
        """
        ends_by_s, reason = ends_by
        late: dict[int, str] = {}
        is_end_near = has_ended
        for rank, state in self._fleet.alive().items():
            limit_s, name = self._liveness.limit(state)
            # At most one heartbeat of silence counts: a host that is silent for longer
            # may be lost, and the progress of its ranks is unknown.
            silent_s = min(self._fleet.silent_s(rank, now_s), BEAT_S)
            if state.age_s + silent_s > limit_s:
                flag = f"--limits.{name.replace('_', '-')}"
                late[rank] = f"no progress for {_seconds(limit_s)} ({flag})"
            elif now_s > ends_by_s:
                late[rank] = f"not ended {reason}"
            else:
                is_end_near |= state.phase == Phase.EXIT
                continue
            late[rank] = f"in {Phase(state.phase).name.lower()}: {late[rank]}"
        return {} if is_end_near and now_s <= ends_by_s else late

    def ask(self, hanging: Mapping[int, str], generation: int, now_s: float) -> None:
        """Request the stacks of all ranks, because `find` has returned some ranks."""
        self._tell(
            "hang",
            _text(hanging),
            "error",
            data={"ranks": [*hanging], "rdma_bytes_per_s": self._traffic()},
        )
        self._stacks, self._spied, self._nccl = {}, {}, {}
        self._answered = set()
        self._until_s = now_s + self._stacks_s
        self._fleet.send_all(Dump(generation=generation))

    def ask_again(self, name: str, generation: int) -> None:
        """Repeat the request to a host that may not have got it."""
        if name not in self._answered:
            self._fleet.send(name, Dump(generation=generation))

    def _traffic(self) -> dict[str, float]:
        """Return host -> RDMA bytes per second, for hosts with known counters."""
        hosts = (self._fleet.hosts[name] for name in self._fleet.placement)
        rates = {host.name: host.rdma_bytes_per_s for host in hosts}
        return {name: rate for name, rate in rates.items() if rate is not None}

    def shown(self, name: str, shown: Stacks) -> None:
        """Store the stacks of a host."""
        self._stacks |= shown.stacks
        self._spied |= shown.spied
        if shown.nccl:
            self._nccl[name] = shown.nccl
        self._answered.add(name)

    def is_answered(self, now_s: float) -> bool:
        """Return whether all hosts with ranks have answered or are lost, or time is up.

        While a host is silent, the wait continues until the host is heard or lost.
        """
        missing = {*self._fleet.placement} - self._answered - self._fleet.lost(now_s)
        heard_s = [self._fleet.hosts[name].heard_s for name in missing]
        is_silent = any(now_s - s > _SILENT_BEATS * BEAT_S for s in heard_s)
        return not missing or (now_s > self._until_s and not is_silent)

    def judge(self, hanging: Mapping[int, str]) -> tuple[Failure, dict[str, Any]]:
        """Find the ranks that block the others; see `failures.of_hang`.

        Args:
          hanging: result of `find`.
        """
        alive, host_of = self._fleet.alive(), self._fleet.host_of
        failure, evidence = failures.of_hang(alive, self._stacks, host_of)
        text = f"{failure.text}; {_text(hanging)}"
        spied = {str(rank): text for rank, text in self._spied.items()}
        failure = dataclasses.replace(failure, text=text)
        return failure, evidence | {"spied": spied, "nccl": self._nccl}


def _seconds(limit_s: float) -> str:
    return f"{round(limit_s, 2):.10g} s"


def _text(hanging: Mapping[int, str]) -> str:
    """Return a text that lists the ranks of each phase and limit."""
    ranks_of: dict[str, list[int]] = {}
    for rank, reason in hanging.items():
        ranks_of.setdefault(reason, []).append(rank)
    return "; ".join(
        f"rank {failures.join(ranks)} {reason}" for reason, ranks in ranks_of.items()
    )
