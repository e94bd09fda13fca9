"""Find the ranks that block a stuck run, from the last records of all ranks.

Input: the operations that each rank last entered and last left on each mesh axis, if
its records arrived; and the time at which the log of each host ended. Output: the ranks
to blame, the reason, and who waits for whom.

The rule is that of MegaScale (arXiv 2402.15627, section 5.2): waiting ranks log the
operation that they wait for, and the rank without such a log is to blame. Four cases
break the rule and are handled:

- A record may be missing or old although its rank is healthy. If one member of a group
  has left an operation, all members have entered it; this corrects old records. If
  another member of the rank's group has not reached the rank's next operation either,
  the rank may itself be waiting. It is then blamed only if no other rank explains as
  many waits.
- A rank that skipped a collective waits too. The rank and its group have then entered
  the same number of operations, but the last ones have different names.
- The clocks of hosts may be wrong. Times are compared only within one host, except for
  the time since the last record, whose limits are far above the error of a clock.
- A run that saves or is slow is not stuck.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Float64, Int64, Shaped
from numpy.typing import NDArray

AXES = ("tp", "pp", "dp")
_TP, _PP, _DP = range(3)
_COLLECTIVE = (_TP, _DP)
"""Axes on which all members of a group enter each operation. On pp there are also
transfers between two stages, so stages cannot be compared by their number of
operations."""

LEAST_IDLE_STEPS = 17.0
"""A run is stuck after this many usual step times without a record. The value was
picked by judgement, not measured."""
LEAST_IDLE_S = 10.0
"""Least time without a record, in seconds. The value was picked by judgement: it is
several times the error of a badly kept wall clock."""
LEAST_IDLE_SAVES = 2.0
"""A save is stuck after this many usual save times without a record. The value was
picked by judgement, not measured."""
LOG_STOPPED_S = 15.0
"""A log has stopped if its last line is this many seconds older than the 75th
percentile of the hosts. The value was picked by judgement: it is three times the
longest usual silence of a log, plus the error of clocks."""
MOST_CANDIDATES = 64
"""Maximum number of candidates to compare. The value was picked by judgement: it bounds
the time with many ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """Coordinates of each rank in the mesh, and its host. R ranks."""

    tp: Int64[np.ndarray, "R"]
    pp: Int64[np.ndarray, "R"]
    dp: Int64[np.ndarray, "R"]
    host: Int64[np.ndarray, "R"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Records:
    """Last records of each rank on each axis. R ranks, A axes in the order of AXES."""

    entered: Int64[np.ndarray, "R A"]
    """Number of operations entered; -1 for a rank without records."""
    left: Int64[np.ndarray, "R A"]
    entered_s: Float64[np.ndarray, "R A"]
    """Times at which the last operations were entered, by the clock of the host; NaN
    without a record."""
    left_s: Float64[np.ndarray, "R A"]
    names: Shaped[np.ndarray, "R A"]
    """Name of the operation entered last. The name of a transfer ends with the other
    stage: "send 2", "recv 0". All other names are collectives of the group."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usual:
    """Usual times of the run."""

    step_s: float
    save_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wait:
    """A rank that has entered an operation, and the ranks that have not."""

    rank: int
    axis: str
    name: str
    number: int
    others: tuple[int, ...]
    """Missing ranks; empty if all have entered the operation with this number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The ranks that block the run."""

    ranks: tuple[int, ...]
    """Ranks to blame, ascending; empty if the run is not stuck or all ranks look
    alike."""
    is_stuck: bool
    reason: str
    waits: tuple[Wait, ...]


def judge(
    places: Places,
    records: Records,
    host_log_s: Float64[np.ndarray, "hosts"],
    activity: Sequence[str],
    now_s: float,
    usual: Usual,
) -> Verdict:
    """Return the ranks that the others wait for.

    Args:
      places: positions of the ranks.
      records: last records of the ranks.
      host_log_s: time of the last line in the log of each host, by its clock; NaN if
        there is none.
      activity: activity of each rank: "step", "save", or "" if unknown.
      now_s: current time, by an accurate clock.
      usual: usual times of steps and saves.
    """
    idle_s = now_s - _last_s(records).max(initial=-np.inf)
    limit_s, doing = _limit_s(activity, usual)
    if idle_s < limit_s:
        reason = (
            f"the last record is {idle_s:.1f} s old, {doing} may take {limit_s:.1f} s"
        )
        return Verdict(ranks=(), is_stuck=False, reason=reason, waits=())
    graph = _Graph(places, records, _stopped(host_log_s))
    ranks, reason = _blame(graph, host_log_s)
    waits = tuple(graph.waits())
    return Verdict(
        ranks=tuple(sorted(ranks)), is_stuck=True, reason=reason, waits=waits
    )


def _limit_s(activity: Sequence[str], usual: Usual) -> tuple[float, str]:
    """Return the longest allowed silence of all ranks, and their activity."""
    limit_s = max(LEAST_IDLE_S, LEAST_IDLE_STEPS * usual.step_s)
    if "save" in activity:
        return max(limit_s, LEAST_IDLE_SAVES * usual.save_s), "a save"
    return limit_s, "a step"


def _last_s(records: Records) -> NDArray[np.float64]:
    """Return the time of the last record of each rank, [R]; -inf without one."""
    times_s = np.maximum(
        np.nan_to_num(records.entered_s, nan=-np.inf),
        np.nan_to_num(records.left_s, nan=-np.inf),
    )
    return times_s.max(axis=1)


def _stopped(host_log_s: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the hosts whose log ended before the others'."""
    known = np.isfinite(host_log_s)
    if not known.any():
        return np.flatnonzero(known)
    # The median of two hosts would lie between them, so use the 75th percentile.
    usual_s = float(np.quantile(host_log_s[known], 0.75))
    return np.flatnonzero(known & (host_log_s < usual_s - LOG_STOPPED_S))


class _Graph:
    """Who waits for whom, with old records corrected by those of other members."""

    def __init__(
        self, places: Places, records: Records, stopped: NDArray[np.intp]
    ) -> None:
        self.host = places.host
        self.stage = places.pp
        self.is_unread = (records.entered < 0).all(axis=1)
        self.is_old = np.isin(places.host, stopped)
        """Whether the host's records end early, so that a wait in them may be over."""
        self.names = records.names
        self.last_s = _last_s(records)
        columns = np.stack([places.tp, places.pp, places.dp], axis=1)
        self.groups = [_groups(np.delete(columns, axis, 1)) for axis in range(3)]
        self.group_of = [_index(groups, len(columns)) for groups in self.groups]
        self.recorded = records.entered
        self.entered, self.left = records.entered.copy(), records.left.copy()
        for axis in _COLLECTIVE:
            for members in self.groups[axis]:
                least = records.left[members, axis].max()
                for counts in (self.entered, self.left):
                    counts[members, axis] = np.maximum(counts[members, axis], least)
        pending = (self.entered > self.left) & ~self.is_unread[:, None]
        self.axis = np.where(pending.any(axis=1), pending.argmax(axis=1), -1)
        """[R], index of the axis on which a rank waits in an operation; -1 if it does
        not wait."""

    def members(self, rank: int, axis: int) -> NDArray[np.intp]:
        """Return the group of a rank."""
        return self.groups[axis][self.group_of[axis][rank]]

    def name(self, rank: int) -> str:
        """Return the name of the operation in which a rank waits."""
        return str(self.names[rank, self.axis[rank]])

    def partner(self, rank: int) -> int | None:
        """Return the rank at the other end of the transfer in which a rank waits.

        None if it does not wait in a transfer.
        """
        if self.axis[rank] != _PP:
            return None
        *_, word = self.name(rank).split()
        if not word.isdigit():
            return None
        members = self.members(rank, _PP)
        found = members[self.stage[members] == int(word)]
        return int(found[0]) if len(found) else None

    def others(self, rank: int) -> list[int]:
        """Return the ranks that a rank waits for, by its record."""
        axis = int(self.axis[rank])
        if axis < 0:
            return []
        partner = self.partner(rank)
        if partner is not None:
            return [partner]
        members = self.members(rank, axis)
        if axis == _PP:
            return [m for m in members.tolist() if not self._waits_here(m, rank)]
        number = self.entered[rank, axis]
        return members[self.entered[members, axis] < number].tolist()

    def _waits_here(self, other: int, rank: int) -> bool:
        """Return whether another rank waits on pp in the same collective."""
        return bool(self.axis[other] == _PP) and self.name(other) == self.name(rank)

    def may_wait_for(self, rank: int) -> set[int]:
        """Return the ranks that a rank may wait for if its records are outdated.

        They are the members of its groups that have not entered more operations than
        it, and the neighbouring stages that do not wait for a transfer with it.
        """
        found: set[int] = set()
        for axis in _COLLECTIVE:
            members = self.members(rank, axis)
            behind = members[self.entered[members, axis] <= self.entered[rank, axis]]
            found |= set(behind.tolist())
        column = self.members(rank, _PP)
        near = column[np.abs(self.stage[column] - self.stage[rank]) == 1]
        found |= {n for n in near.tolist() if self.partner(n) != rank}
        return found - {rank}

    def waits(self) -> Iterator[Wait]:
        """Yield the operation in which each rank waits."""
        for rank in np.flatnonzero(self.axis >= 0).tolist():
            axis = int(self.axis[rank])
            yield Wait(
                rank=rank,
                axis=AXES[axis],
                name=self.name(rank),
                number=int(self.entered[rank, axis]),
                others=tuple(self.others(rank)),
            )


def _groups(columns: NDArray[np.int64]) -> list[NDArray[np.intp]]:
    """Return the groups of ranks whose rows in `columns` are equal."""
    _, group = np.unique(columns, axis=0, return_inverse=True)
    order = np.argsort(group, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(group[order])) + 1)


def _index(groups: Sequence[NDArray[np.intp]], num: int) -> NDArray[np.intp]:
    """Return the number of the group of each rank."""
    index = np.zeros(num, np.intp)
    for number, members in enumerate(groups):
        index[members] = number
    return index


def _blame(graph: _Graph, host_log_s: NDArray[np.float64]) -> tuple[Sequence[int], str]:
    """Return the ranks to blame, and why."""
    for host in np.flatnonzero(np.isnan(host_log_s)).tolist():
        here = np.flatnonzero(graph.host == host)
        if len(here) and graph.is_unread[here].all():
            return (
                here.tolist(),
                "no record of its host is readable, and its log is gone",
            )
    skipped = _skipped(graph)
    if skipped is not None:
        return skipped
    idle = (graph.axis < 0) & ~graph.is_unread
    old = idle & graph.is_old
    silent = np.flatnonzero(graph.is_unread)
    for candidates, reason in (
        (np.flatnonzero(old), "the log of its host stopped, and others wait for it"),
        (np.flatnonzero(idle), "others wait for it, and it waits for no rank"),
        (silent, "others wait for it, and it has no readable record"),
    ):
        found = _best(graph, candidates)
        if found:
            return found, reason
    return (), "no record distinguishes the ranks"


def _skipped(graph: _Graph) -> tuple[Sequence[int], str] | None:
    """Return ranks that skipped a collective, and the evidence; None if none did.

    The evidence is that the group of such a rank is in another collective.
    """
    for axis in _COLLECTIVE:
        for members in graph.groups[axis]:
            inside = members[graph.axis[members] == axis]
            if not len(inside):
                continue
            number = graph.entered[inside, axis].max()
            inside = inside[graph.entered[inside, axis] == number]
            names = {rank: graph.name(rank) for rank in inside.tolist()}
            if len(set(names.values())) > 1:
                ranks = _odd(graph, axis, names)
                told = names[ranks[0]]
                return ranks, f"it is in {told} of {AXES[axis]} and its group is not"
            for rank in inside.tolist():
                ranks = _gone_on(graph, axis, rank, members)
                if ranks:
                    told = f"{graph.name(rank)} of {AXES[axis]}"
                    return ranks, f"it skipped {told}, and its group waits"
    for rank in np.flatnonzero((graph.axis == _PP) & ~graph.is_old).tolist():
        partner = graph.partner(rank)
        if partner is None or graph.axis[partner] != _PP or graph.is_old[partner]:
            continue
        if graph.partner(partner) is None:
            told = graph.name(partner)
            return [rank], f"it is in {graph.name(rank)} of pp, and others in {told}"
    return None


def _gone_on(
    graph: _Graph, axis: int, rank: int, members: NDArray[np.intp]
) -> list[int]:
    """Return the ranks that a rank waits for although they are ahead on another axis.

    Ranks of one stage run the same operations in the same order. Of two such ranks, one
    is therefore behind the other on all axes, unless it has skipped an operation.
    """
    entered = graph.recorded
    behind = entered[members, axis] < entered[rank, axis]
    ahead = (entered[members] > entered[rank]).any(axis=1)
    return members[behind & ahead].tolist()


def _odd(graph: _Graph, axis: int, names: Mapping[int, str]) -> list[int]:
    """Return the ranks of a group that are in the wrong operation.

    The operation of the majority is right. On a tie, the members that are further ahead
    on other axes have skipped an operation. If that is also a tie and two collectives
    alternate, as before and after the weights of a layer, `_turn` tells which is right.
    """
    by_name: dict[str, list[int]] = {}
    for rank, name in names.items():
        by_name.setdefault(name, []).append(rank)
    smallest = min(map(len, by_name.values()))
    rare = [ranks for ranks in by_name.values() if len(ranks) == smallest]
    if len(rare) == 1:
        return rare[0]
    rest = [each for each in range(3) if each != axis]
    ahead = [int(graph.entered[ranks][:, rest].sum(axis=1).max()) for ranks in rare]
    if ahead.count(max(ahead)) == 1:
        return rare[int(np.argmax(ahead))]
    turn = _turn(graph, axis, names)
    wrong = [ranks for ranks in rare if turn not in (None, names[ranks[0]])]
    return wrong[0] if len(wrong) == 1 else [rank for ranks in rare for rank in ranks]


def _turn(graph: _Graph, axis: int, names: Mapping[int, str]) -> str | None:
    """Return which of two alternating collectives comes next.

    The records of other ranks show it. None if there are not exactly two names, or no
    other rank was last in one of them.
    """
    two = sorted(set(names.values()))
    same = np.isin(graph.names[:, axis], two) & ~graph.is_unread
    same[list(names)] = False
    if len(two) != 2 or not same.any():
        return None
    others = np.flatnonzero(same)
    away = np.abs(graph.entered[others, axis] - graph.entered[next(iter(names)), axis])
    nearest = others[np.argmin(away)]
    turn = two.index(str(graph.names[nearest, axis])) + int(away.min())
    return two[turn % 2]


def _best(graph: _Graph, candidates: NDArray[np.intp]) -> list[int]:
    """Return the candidate that explains most waits.

    On a tie, prefer the one that most members of its groups wait for, then the one with
    the oldest last record. The list is empty if no rank waits for a candidate.
    """
    if not len(candidates):
        return []
    waiting: dict[int, set[int]] = {}
    direct = np.zeros(len(graph.axis), np.int64)
    for rank in range(len(graph.axis)):
        others = set(graph.others(rank))
        for other in others:
            direct[other] += 1
        if graph.axis[rank] < 0 or graph.is_old[rank]:
            others |= graph.may_wait_for(rank)
        for other in others:
            waiting.setdefault(other, set()).add(rank)
    order = candidates[np.argsort(-direct[candidates], kind="stable")]
    keys = {
        rank: (_reach(waiting, rank), int(direct[rank]), -float(graph.last_s[rank]))
        for rank in order[:MOST_CANDIDATES].tolist()
    }
    best = max(keys, key=keys.__getitem__)
    is_waited_for = direct[best] > 0 or (graph.is_old[best] and keys[best][0] > 1)
    return [best] if is_waited_for else []


def _reach(waiting: Mapping[int, set[int]], root: int) -> int:
    """Count the ranks that wait for the root, directly or indirectly."""
    seen, new = {root}, [root]
    while new:
        found = waiting.get(new.pop(), set()) - seen
        seen |= found
        new += found
    return len(seen)
