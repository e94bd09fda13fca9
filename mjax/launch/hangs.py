"""Detect hung ranks by their progress, and find the cause in their stacks.

Input: the states of all ranks, and the recent step time. Output: the hung ranks, orders
to collect stacks, and the failure with its evidence.
"""

from collections.abc import Callable, Sequence
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

    def find(self, now_s: float, ends_by_s: float, *, has_ended: bool) -> list[int]:
        """Return the ranks that should have progressed or ended by now.

        If a rank exits or has ended, the others wait for it: its end tells why.

        Args:
          now_s: current time.
          ends_by_s: time by which all ranks must have ended.
          has_ended: whether a rank has ended.
        """
        alive = self._fleet.alive()
        if now_s > ends_by_s:
            return [*alive]
        hanging = {rank for rank, state in alive.items() if self._hangs(state, now_s)}
        exiting = {rank for rank, state in alive.items() if state.phase == Phase.EXIT}
        return [] if has_ended or exiting - hanging else sorted(hanging)

    def _hangs(self, state: RankState, now_s: float) -> bool:
        # At most one heartbeat of silence counts: a host that is silent for longer may
        # be lost, and the progress of its ranks is unknown.
        silent_s = min(self._fleet.silent_s(state.rank, now_s), BEAT_S)
        return state.age_s + silent_s > self._liveness.limit_s(state)

    def ask(self, hanging: Sequence[int], generation: int, now_s: float) -> None:
        """Request the stacks of all ranks, because some ranks are hung."""
        self._tell(
            "hang",
            f"no progress of rank {failures.join(hanging)}",
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

    def judge(self) -> tuple[Failure, dict[str, Any]]:
        """Find the ranks that block the others; see `failures.of_hang`."""
        alive, host_of = self._fleet.alive(), self._fleet.host_of
        failure, evidence = failures.of_hang(alive, self._stacks, host_of)
        spied = {str(rank): text for rank, text in self._spied.items()}
        return failure, evidence | {"spied": spied, "nccl": self._nccl}
