"""Compute how much time stragglers cost a run, by replaying its steps without them.

Input: the operations of each worker with their times, and the operations that each one
waited for. Output: the time of the run without the uneven part of a worker, a stage or
a phase, and the causes of slowness, ranked by cost in time.

The method is that of arXiv 2505.05713. An operation's duration runs from the end of
everything it waits for to its own end. The graph is replayed with other durations; each
operation starts as early as its edges allow.

In a step without stragglers every operation takes the median of its phase in that step,
and the last virtual stage, which has the head and the loss, takes `USUAL_LAST` times
that. Each cause is estimated from the operations that only this cause changes:

- slow host: one worker's passes compared with those of the other workers.
- last stage: its passes compared with those of the other stages.
- uneven sequence lengths: a microbatch in all stages, compared with the mean of its
  step.
- garbage collection: single passes that contain a pause.
- slow link: transfers of a pair of neighbours, or the gradient sync of one stage.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float64, Int64, Shaped
from numpy.typing import NDArray

type Floats = NDArray[np.float64]
PHASES = (
    *("data", "host", "forward", "backward", "tick", "send", "sync", "optimizer"),
    "join",
)
"""Phases of operations. A join takes no time: it ends when everything it waits for has
ended."""
_PASSES = ("forward", "backward")
_JOINT = ("sync", "optimizer")
"""Phases that start when their worker arrives, so they include the wait for others."""
type CauseName = Literal[
    "slow host",
    "last stage",
    "uneven sequence lengths",
    "garbage collection",
    "slow link",
    "late host",
    "slow loader",
    "pauses",
]

USUAL_LAST = 1.05
"""Ratio of the last stage's time to that of others, in runs where it is not a cause.
Source: 1.065 and 1.03 in trace AR of github.com/ByteDance-Seed/StragglerAnalysis."""
USUAL_LENGTHS = 0.025
"""Deviation of the log time of microbatches, in runs where lengths are not a cause. Not
measured."""
LEAST_PAUSE_S = 0.06
"""Shortest pause of a garbage collection. Python scans about 100,000 objects in this
time."""
LEAST_PAUSE_DEVIATIONS = 6.0
"""Shortest pause, as a multiple of the deviation of the passes. Not measured."""
SLOW_LINK = 2.0
"""Multiple of the usual transfer time from which a link is slow. Not measured."""
SLOW_SYNC = 1.4
"""Multiple of the usual gradient sync from which it is slow. It is several deviations
of the times on networks."""
LEAST_SAVED = 0.025
"""Fraction of the time below which nothing counts as a cause. Not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """Operations of a run. N operations, W workers, E edges."""

    phase: Shaped[np.ndarray, "N"]
    """Phase of each operation, an entry of PHASES."""
    worker: Int64[np.ndarray, "N"]
    """Worker; for a send, the sender."""
    step: Int64[np.ndarray, "N"]
    """Number of the step, from 0."""
    micro: Int64[np.ndarray, "N"]
    """Microbatch within the replica; -1 where there is none."""
    stage: Int64[np.ndarray, "N"]
    """Virtual stage; -1 where there is none."""
    backward: Bool[np.ndarray, "N"]
    """For a send: whether it belongs to the backward pass."""
    edges: Int64[np.ndarray, "E 2"]
    """Pairs: an operation, and one that starts after it has ended."""
    start_s: Float64[np.ndarray, "N"]
    """Start of a sync or optimizer: the arrival of its worker. Start of all others: the
    end of everything they wait for."""
    end_s: Float64[np.ndarray, "N"]
    place: Int64[np.ndarray, "W"]
    """Pipeline stage of each worker."""
    replica: Int64[np.ndarray, "W"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cause:
    """A reason for slowness, and its cost."""

    name: CauseName
    workers: tuple[int, ...]
    """Workers to blame; empty: all workers."""
    step_s: Floats
    """[steps], seconds of each step without the cause."""
    saved: float
    """Fraction of the time of the run that it costs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Times of a run with parts of its slowness removed."""

    step_s: Floats
    """[steps], measured seconds."""
    replayed_s: Floats
    """[steps], seconds in a replay with the measured durations, which shows the error
    of the graph."""
    even_s: Floats
    """[steps], seconds in a replay in which every operation takes its usual time."""
    causes: tuple[Cause, ...]
    """All causes, the most expensive first."""
    saved_by_worker: Floats
    """[W], fraction of the time that the uneven part of one worker's operations
    costs."""
    saved_by_stage: Mapping[int, float]
    """Fraction of the time that the uneven part of a stage's operations costs, by
    pipeline stage."""
    saved_by_phase: Mapping[str, float]

    @property
    def first(self) -> Cause | None:
        """The most expensive cause, if any is large enough."""
        best = self.causes[0]
        return best if best.saved >= LEAST_SAVED else None

    @property
    def saved(self) -> float:
        """Fraction of the time that all stragglers together cost."""
        return part(self.even_s, self.replayed_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usual:
    """Values in runs where these are not causes; the analysed run cannot show them."""

    last: float = USUAL_LAST
    """Ratio of the last stage's time to that of the others."""
    lengths: float = USUAL_LENGTHS
    """Deviation of the log time of microbatches."""


def analyse(trace: Trace, usual: Usual | None = None) -> WhatIf:
    """Replay a run without each cause, worker, stage and phase.

    Args:
      trace: operations of the run.
      usual: usual values, if known for this run.
    Raises:
      ValueError: operations wait for each other in a cycle, or a step has no optimizer.
    """
    replay = Replay(trace)
    needed_s = replay.needed_s()
    measured_s = step_times(trace, trace.end_s)
    replayed_s = replay.step_s(needed_s)
    effects = _Effects(trace, needed_s, usual or Usual())
    usual_s = effects.usual_s()

    def saved(chosen: NDArray[np.bool_]) -> float:
        return part(replay.step_s(np.where(chosen, usual_s, needed_s)), replayed_s)

    causes = []
    for name, workers, other_s in _without(effects):
        # The graph has the same error with and without the cause.
        step_s = measured_s * replay.step_s(other_s) / replayed_s
        causes.append(
            Cause(
                name=name,
                workers=workers,
                step_s=step_s,
                saved=part(step_s, measured_s),
            )
        )
    num_workers, place = len(trace.place), trace.place[trace.worker]
    return WhatIf(
        step_s=measured_s,
        replayed_s=replayed_s,
        even_s=replay.step_s(usual_s),
        causes=tuple(sorted(causes, key=lambda cause: -cause.saved)),
        saved_by_worker=np.array(
            [saved(trace.worker == worker) for worker in range(num_workers)]
        ),
        saved_by_stage={
            stage: saved(place == stage) for stage in np.unique(place).tolist()
        },
        saved_by_phase={
            phase: saved(trace.phase == phase) for phase in np.unique(trace.phase)
        },
    )


def part(without_s: Floats, with_s: Floats) -> float:
    """Return the fraction of the time of some steps that would be saved."""
    return float(1 - without_s.sum() / with_s.sum())


def step_times(trace: Trace, end_s: Floats) -> Floats:
    """Return the seconds of each step.

    A step ends, and the next one begins, when the last of its optimizers ends.
    """
    last = trace.phase == "optimizer"
    num = int(trace.step.max(initial=-1)) + 1
    ends = np.full(num, -np.inf)
    np.maximum.at(ends, trace.step[last], end_s[last])
    if not num or np.isinf(ends).any():
        raise ValueError("every step must have an operation of the phase optimizer")
    return np.diff(ends, prepend=0.0)


class Replay:
    """Replays the graph of a trace with other durations."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        num = len(trace.phase)
        before: list[list[int]] = [[] for _ in range(num)]
        after: list[list[int]] = [[] for _ in range(num)]
        for first, then in trace.edges.tolist():
            before[then].append(first)
            after[first].append(then)
        self._before = before
        waits = [len(each) for each in before]
        self._order = [number for number in range(num) if not waits[number]]
        for number in self._order:  # grows
            for then in after[number]:
                waits[then] -= 1
                if not waits[then]:
                    self._order.append(then)
        if len(self._order) < num:
            raise ValueError(
                f"{num - len(self._order)} of {num} operations wait for each other"
            )

    def needed_s(self) -> Floats:
        """Return each operation's time from the end of everything that it waits for."""
        trace = self._trace
        start_s = trace.start_s.copy()
        joint = np.isin(trace.phase, _JOINT)
        for number in np.flatnonzero(joint).tolist():
            ends_s = trace.end_s[self._before[number]]
            start_s[number] = ends_s.max(initial=start_s[number])
        return np.maximum(trace.end_s - start_s, 0.0)

    def step_s(self, needed_s: Floats) -> Floats:
        """Return the time of each step if the operations take these times."""
        end_s, needed = [0.0] * len(needed_s), needed_s.tolist()
        for number in self._order:
            begin_s = max([end_s[each] for each in self._before[number]], default=0.0)
            end_s[number] = begin_s + needed[number]
        return step_times(self._trace, np.array(end_s))


class _Effects:
    """Factors by which operations of a trace are longer than usual, by cause."""

    def __init__(self, trace: Trace, needed_s: Floats, usual: Usual) -> None:
        self.trace, self.needed_s, self.usual = trace, needed_s, usual
        self.passes = np.isin(trace.phase, _PASSES)
        self.last_stage = int(trace.stage[self.passes].max(initial=0))
        self.has_stages = self.last_stage > 0
        self.is_last = self.passes & (trace.stage == self.last_stage)
        self.is_last &= self.has_stages
        self.base_s = {p: self._base_s(p) for p in np.unique(trace.phase).tolist()}
        self.last = {phase: self._last(phase) for phase in _PASSES}
        self.of_worker = self._of_worker()
        self.length = self._length()

    def _base_s(self, phase: str) -> float:
        """Return the usual seconds of a phase, without the last stage.

        They are the lower median over the workers of their medians.
        """
        medians = self._by_worker_s((self.trace.phase == phase) & ~self.is_last)
        return max(lower_median([*medians.values()]), 1e-9) if medians else 1.0

    def _by_worker_s(self, chosen: NDArray[np.bool_]) -> dict[int, float]:
        """Return the median seconds of each worker's chosen operations, by worker."""
        return {
            worker: float(
                np.median(self.needed_s[chosen & (self.trace.worker == worker)])
            )
            for worker in np.unique(self.trace.worker[chosen]).tolist()
        }

    def _last(self, phase: str) -> float:
        """Return the ratio of a last-stage pass to a pass of another stage."""
        medians = self._by_worker_s(self.is_last & (self.trace.phase == phase))
        if not medians:
            return 1.0
        return lower_median([*medians.values()]) / self.base_s[phase]

    def staged_s(self) -> Floats:
        """Return the usual seconds of each operation, with the last stage's factor."""
        trace = self.trace
        staged_s = np.array([self.base_s[phase] for phase in trace.phase.tolist()])
        for phase in _PASSES:
            staged_s[self.is_last & (trace.phase == phase)] *= self.last[phase]
        return staged_s

    def _of_worker(self) -> Floats:
        """Return the factor of the passes of each worker, [W]."""
        ratio = self.needed_s / self.staged_s()
        factors = np.ones(len(self.trace.place))
        for worker in range(len(factors)):
            chosen = self.passes & (self.trace.worker == worker)
            if chosen.any():
                factors[worker] = np.median(ratio[chosen])
        # An excess that all stages of a replica share is due to the microbatch.
        for members in _split(self.trace.replica):
            if len(members) > 1:
                factors[members] /= lower_median(factors[members].tolist())
        return factors

    def _length(self) -> Floats:
        """Return the factor of each pass by its microbatch, 1 elsewhere, [N]."""
        trace = self.trace
        length = np.ones(len(trace.phase))
        chosen = np.flatnonzero(self.passes)
        expected_s = self.staged_s() * self.of_worker[trace.worker]
        ratio = self.needed_s[chosen] / expected_s[chosen]
        replica = trace.replica[trace.worker[chosen]]
        group = _numbered(trace.step[chosen], replica, trace.micro[chosen])
        for number in _split(group):
            length[chosen[number]] = np.median(ratio[number])
        return length

    def usual_s(self) -> Floats:
        """Return the usual seconds of each operation, [N].

        They are the median of its phase in its step; the passes of the last stage take
        at most `Usual.last` times that median.
        """
        trace = self.trace
        usual_s = self.staged_s()
        for phase in np.unique(trace.phase).tolist():
            others = (trace.phase == phase) & ~self.is_last
            last = (trace.phase == phase) & self.is_last
            factor = min(self.last.get(phase, 1.0), self.usual.last)
            for step in np.unique(trace.step[others]).tolist():
                here = trace.step == step
                median_s = float(np.median(self.needed_s[others & here]))
                usual_s[others & here] = median_s
                usual_s[last & here] = median_s * factor
        return usual_s


def lower_median(values: Sequence[float]) -> float:
    """Return the lower median: of two workers, that of the faster one."""
    return sorted(values)[(len(values) - 1) // 2]


def _numbered(*columns: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return a group number for each row; rows with equal values form a group."""
    rows = np.stack(columns, axis=1)
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)


def _split(group: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    """Yield the members of each group."""
    order = np.argsort(group, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(group[order])) + 1)


def _without(
    effects: _Effects,
) -> Iterator[tuple[CauseName, tuple[int, ...], Floats]]:
    """Yield each cause, its workers, and the durations without it."""
    trace, needed_s = effects.trace, effects.needed_s
    worker = int(np.argmax(effects.of_worker))
    factor = max(1.0, float(effects.of_worker[worker]))
    slow = effects.passes & (trace.worker == worker)
    yield "slow host", (worker,), np.where(slow, needed_s / factor, needed_s)
    if effects.has_stages:
        too_long = np.ones(len(needed_s))
        for phase in _PASSES:
            chosen = effects.is_last & (trace.phase == phase)
            too_long[chosen] = max(1.0, effects.last[phase] / effects.usual.last)
        last = np.flatnonzero(trace.place == trace.place.max()).tolist()
        yield "last stage", tuple(last), needed_s / too_long
    yield "uneven sequence lengths", (), needed_s / _unevenness(effects)
    yield "garbage collection", (), needed_s - _pauses_s(effects)
    yield from _links(effects)


def _unevenness(effects: _Effects) -> Floats:
    """Return the slowdown of each pass by its lengths, beyond the usual factor, [N]."""
    trace, passes = effects.trace, effects.passes
    logs = np.log(effects.length[passes])
    deviation = float(logs.std())
    kept = min(1.0, effects.usual.lengths / deviation) if deviation > 0 else 1.0
    factor = np.ones(len(passes))
    even = factor.copy()
    factor[passes] = effects.length[passes]
    even[passes] = np.exp(kept * logs)
    # The number of tokens per step does not change.
    for step in np.unique(trace.step).tolist():
        here = passes & (trace.step == step)
        if here.any():
            even[here] *= factor[here].mean() / even[here].mean()
    return factor / even


def _pauses_s(effects: _Effects) -> Floats:
    """Return the pause within each pass, [N]; 0 for most."""
    trace, passes = effects.trace, effects.passes
    expected_s = effects.staged_s() * effects.of_worker[trace.worker] * effects.length
    excess_s = effects.needed_s - expected_s
    relative = np.log(np.maximum(effects.needed_s[passes], 1e-9) / expected_s[passes])
    spread = 1.4826 * float(np.median(np.abs(relative)))
    least_s = np.maximum(LEAST_PAUSE_S, LEAST_PAUSE_DEVIATIONS * spread * expected_s)
    return np.where(passes & (excess_s > least_s), excess_s, 0.0)


def _links(
    effects: _Effects,
) -> Iterator[tuple[CauseName, tuple[int, ...], Floats]]:
    """Yield the slowest link of a pipeline, and the slowest gradient sync."""
    trace, needed_s = effects.trace, effects.needed_s
    sends = np.flatnonzero(trace.phase == "send")
    if len(sends):
        found: dict[tuple[int, int], float] = {}
        pair = np.where(trace.backward[sends], -1, 1)
        low = trace.place[trace.worker[sends]] + np.minimum(pair, 0)
        replica = trace.replica[trace.worker[sends]]
        for members in _split(_numbered(replica, low)):
            median_s = float(np.median(needed_s[sends[members]]))
            found[int(replica[members[0]]), int(low[members[0]])] = median_s
        at = max(found, key=found.__getitem__)
        ratio = found[at] / max(lower_median([*found.values()]), 1e-9)
        other_s = needed_s.copy()
        if ratio > SLOW_LINK:
            chosen = sends[(replica == at[0]) & (low == at[1])]
            other_s[chosen] = needed_s[chosen] / ratio
        ends = (trace.replica == at[0]) & np.isin(trace.place, (at[1], at[1] + 1))
        yield "slow link", tuple(np.flatnonzero(ends).tolist()), other_s
    sync = np.flatnonzero(trace.phase == "sync")
    places = trace.place[trace.worker[sync]]
    by_place = {
        place: float(np.median(needed_s[sync[places == place]]))
        for place in np.unique(places).tolist()
    }
    if len(by_place) > 1:
        usual_s = lower_median([*by_place.values()])
        place = max(by_place, key=by_place.__getitem__)
        ratio = by_place[place] / max(usual_s, 1e-9)
        other_s = needed_s.copy()
        if ratio > SLOW_SYNC:
            other_s[sync[places == place]] /= ratio
        blamed = np.flatnonzero(trace.place == place).tolist()
        yield "slow link", tuple(blamed), other_s
