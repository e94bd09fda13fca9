"""Compute how much time slow ranks cost a measured run.

Input: the graph of the steps of a run (`mjax.observe.step_graph`). Output: the causes
that slow single workers, ranked by cost, and the time of the run without them.

A worker does the same work in every step, and so do its peers: the workers at the same
position (stage and tp) in other replicas. The usual time of an operation is the lower
median, over the peers, of their medians over the steps. Excess over the usual time has
one of these causes:

- slow host: the passes of a worker take longer than those of its peers, in most
  steps.
- late host: the time of a worker between steps, without the wait for data, is longer
  than that of its peers, in most steps.
- slow loader: the host of a worker waits for data in a step in which the other hosts
  do not.
- pauses: a single operation takes longer than in the worker's other steps, and longer
  than its peers' in this step. The cause may be a garbage collection or another program
  on the host.

The replay without a cause subtracts its excess from the operations and keeps the noise.
If the passes of a worker end together with those of a slow one (in one tp group, or in
neighbouring stages), both have the same excess and both are named.

The method is that of arXiv 2505.05713, see `mjax.observe.detect.whatif`, which also has
the causes that need the operations of a pipeline.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from mjax.observe.detect.whatif import (
    LEAST_PAUSE_DEVIATIONS,
    LEAST_PAUSE_S,
    Cause,
    CauseName,
    Floats,
    Replay,
    Trace,
    WhatIf,
    lower_median,
    part,
    step_times,
)

_PASSES = ("forward", "backward", "tick")
_PAUSABLE = (*_PASSES, "host")
LEAST_DEVIATIONS = 4.0
"""Excess, in standard errors, above which a worker counts as slower than its peers.
Many workers are tested."""
_ALIKE = 0.5
"""Fraction of the slowest worker's excess above which another worker is also named.
Workers that wait inside the same collective have nearly all of that excess."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Excess:
    """Excess of each operation over the usual time. N operations, seconds."""

    lasting_s: Floats
    """Excess in most steps; negative where a worker is faster than its peers. It is 0
    for the passes of a worker that is not significantly slower in the sum of its
    passes, and likewise for its time between steps."""
    pause_s: Floats
    """Excess in this step only."""
    wait_s: Floats
    """Excess of the wait for data."""


def analyse_ranks(trace: Trace) -> WhatIf:
    """Replay a run without each cause, worker, stage and phase.

    Raises:
      ValueError: operations wait for each other in a cycle, or a step has no optimizer.
    """
    replay = Replay(trace)
    needed_s = replay.needed_s()
    measured_s = step_times(trace, trace.end_s)
    replayed_s = replay.step_s(needed_s)
    excess = excess_of(trace, needed_s)

    def without(extra_s: Floats) -> Floats:
        return replay.step_s(np.maximum(needed_s - extra_s, 0.0))

    causes = []
    for name, workers, extra_s in _causes(trace, excess):
        # The graph has the same error with and without the cause.
        step_s = measured_s * without(extra_s) / replayed_s
        saved = part(step_s, measured_s)
        causes.append(Cause(name=name, workers=workers, step_s=step_s, saved=saved))
    removed_s = excess.lasting_s + excess.pause_s + excess.wait_s

    def saved_by(chosen: np.ndarray) -> float:
        return part(without(np.where(chosen, removed_s, 0.0)), replayed_s)

    place = trace.place[trace.worker]
    return WhatIf(
        step_s=measured_s,
        replayed_s=replayed_s,
        even_s=without(removed_s),
        causes=tuple(sorted(causes, key=lambda cause: -cause.saved)),
        saved_by_worker=np.array(
            [saved_by(trace.worker == w) for w in range(len(trace.place))]
        ),
        saved_by_stage={s: saved_by(place == s) for s in np.unique(place).tolist()},
        saved_by_phase={
            phase: saved_by(trace.phase == phase)
            for phase in np.unique(trace.phase).tolist()
            if phase != "join"
        },
    )


def excess_of(trace: Trace, needed_s: Floats) -> Excess:
    """Return the excess of each operation over the usual time."""
    lasting_s, beyond_s, pause_s, wait_s = np.zeros((4, len(needed_s)))
    order = np.lexsort((trace.step, trace.worker))
    keys = np.stack([trace.stage, trace.micro], axis=1)
    for phase in _PAUSABLE:
        here = order[trace.phase[order] == phase]
        for key in np.unique(keys[here], axis=0):
            # [peers, steps]
            at = here[(keys[here] == key).all(axis=1)]
            at = at.reshape(len(np.unique(trace.worker[at])), -1)
            own_s = np.median(needed_s[at], axis=1)
            usual_s = lower_median(own_s.tolist())
            lasting_s[at] = (own_s - usual_s)[:, None]
            beyond_s[at] = needed_s[at] - usual_s
            pause_s[at] = _pauses_s(needed_s[at] - own_s[:, None])
    for phases in (_PASSES, ("host",)):
        chosen = np.isin(trace.phase, phases)
        for worker in range(len(trace.place)):
            own = chosen & (trace.worker == worker)
            if not _is_sure(np.bincount(trace.step[own], beyond_s[own])):
                lasting_s[own] = 0.0
    waits = order[trace.phase[order] == "data"].reshape(len(trace.place), -1)
    wait_s[waits] = np.maximum(needed_s[waits] - _others(needed_s[waits]), 0.0)
    return Excess(lasting_s=lasting_s, pause_s=pause_s, wait_s=wait_s)


def _is_sure(beyond_s: np.ndarray) -> bool:
    """Return whether the excess of a worker over its peers is more than noise.

    Args:
      beyond_s: [steps], excess summed over the worker's operations of one kind.
    """
    median_s = float(np.median(beyond_s))
    spread_s = 1.4826 * float(np.median(np.abs(beyond_s - median_s)))
    # 1.25 deviations / sqrt(n) is the standard error of a median.
    return median_s > LEAST_DEVIATIONS * 1.25 * spread_s / len(beyond_s) ** 0.5


def _pauses_s(beyond_s: np.ndarray) -> np.ndarray:
    """Return the excess that lies far outside the spread over workers and steps.

    Args:
      beyond_s: [peers, steps], excess minus the median of each peer.
    """
    spread_s = 1.4826 * float(np.median(np.abs(beyond_s)))
    least_s = max(LEAST_PAUSE_S, LEAST_PAUSE_DEVIATIONS * spread_s)
    others_s = _others(beyond_s) if len(beyond_s) > 1 else np.zeros_like(beyond_s)
    # If most workers have an excess in a step, it is not a pause of one worker.
    own_s = beyond_s - np.where(others_s > least_s, others_s, 0.0)
    return np.where(own_s > least_s, own_s, 0.0)


def _others(values: np.ndarray) -> np.ndarray:
    """Return the usual value of the workers other than a slow one, by step, [1, S].

    It is the lower median without the largest value of each step.
    """
    ordered = np.sort(values, axis=0)
    return ordered[max(len(values) - 2, 0) // 2][None]


def _causes(
    trace: Trace, excess: Excess
) -> Iterator[tuple[CauseName, tuple[int, ...], Floats]]:
    """Yield each cause, its workers, and the time it adds to each operation."""
    is_pass, is_host = np.isin(trace.phase, _PASSES), trace.phase == "host"
    kinds: tuple[tuple[CauseName, Floats], ...] = (
        ("slow host", np.where(is_pass, excess.lasting_s, 0.0)),
        ("late host", np.where(is_host, excess.lasting_s, 0.0)),
        ("slow loader", excess.wait_s),
        ("pauses", excess.pause_s),
    )
    for name, extra_s in kinds:
        workers = _most(np.bincount(trace.worker, extra_s, len(trace.place)))
        yield name, workers, np.where(np.isin(trace.worker, workers), extra_s, 0.0)


def _most(total_s: Floats) -> tuple[int, ...]:
    """Return the worker with the largest excess and those near it; none if it is 0."""
    most_s = float(total_s.max(initial=0.0))
    if most_s <= 0:
        return ()
    return tuple(np.flatnonzero(total_s >= _ALIKE * most_s).tolist())
