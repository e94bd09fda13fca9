"""Compare the short runs of `fake`: which rung explains the time of a step?

Input: the records of the short runs. Output: the times of each, its gain over the
baseline runs, and the rung that explains the lost time, if any does.

Each rung is compared with two baseline runs, one before all rungs and one after them.
A rung gains if its block means are below those of both baselines (see `compared_times`
for blocks, permutations and Holm's correction), and if the gain exceeds both a limit
and twice the drift between the baselines. Means are compared, not medians: a save in
one of ten steps may take half of the time without changing the median.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import numpy as np

from mjax.observe import compared_times
from mjax.observe.compared_times import Steps
from mjax.observe.records import Record
from mjax.observe.rungs import FIRST, LAST, Rung

LEAST = 0.05
"""Fraction of a step that a rung must gain. Two starts of one run may differ by as
much."""
_DRIFTS = 2.0
"""Required ratio of a gain to the drift. Not measured."""
_PAUSES: dict[str, frozenset[str]] = {
    "no-saves": frozenset({"ckpt"}),
    "no-evals": frozenset({"eval"}),
}
"""By rung: kinds of spans that pause the run between steps and are added to the step
time."""

type Verdict = Literal[
    "gains", "gains little", "within noise", "too few steps", "differs", "not run"
]
"""`differs`: the rung has a smaller model, whose steps are always shorter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Times of one short run, in seconds per step."""

    steps: int
    mean_s: float
    median_s: float
    median_low_s: float | None
    median_high_s: float | None
    """Ends of the 95% interval of the median, from blocks; None: too few steps."""
    data_wait_s: float
    """Mean seconds per step that the run waited for data."""
    tokens_per_s: float
    mfu: float | None
    """Median MFU; None: the peak of the device is unknown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """A rung, compared with the baseline runs."""

    name: str
    less: str
    verdict: Verdict
    measured: Measured | None
    """Times of the rung; None if it was not run or failed."""
    reason: str = ""
    """Reason why there is nothing to compare."""
    gain: float | None = None
    """Saved fraction of the time of a step, relative to the mean of the two baseline
    runs."""
    gain_low: float | None = None
    gain_high: float | None = None
    """Ends of the 95% interval of the gain, from blocks; None: too few steps."""
    outside_layers: float | None = None
    """For a smaller model: fraction of a step that does not depend on the number of
    layers."""
    p: float | None = None
    """Probability that equal runs differ as much: the larger p of the comparisons with
    the two baseline runs."""
    block: int | None = None
    """Length of a block in steps; None: too few steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder:
    """Result of the comparison of all rungs."""

    rungs: tuple[Compared, ...]
    drift: float | None
    """Relative slowdown of the last baseline run over the first."""
    explains: str | None
    """Rung with the largest gain; None if no rung gains."""


def series(record: Record, kinds: Collection[str] = ()) -> Steps:
    """Return the seconds of each step, without warm-up and the last step.

    Args:
      record: records of a short run.
      kinds: kinds of spans of the lowest rank between steps, whose time is added.
    """
    pauses: dict[int, float] = {}
    if kinds and record.files:
        first = min(record.files, key=lambda of: of.header.rank)
        for line in first.lines:
            spent_ns = sum(
                span.end_ns - span.start_ns
                for span in line.spans
                if span.stream == "host" and span.kind in kinds
            )
            pauses[line.step] = pauses.get(line.step, 0.0) + spent_ns / 1e9
    return np.array(
        [
            float(record.rows[step]["step_s"]) + pauses.get(step, 0.0)
            for step in _steps(record)
        ],
        np.float64,
    )


def _steps(record: Record) -> list[int]:
    """Return the measured steps: without warm-up and the last one, which is saved."""
    return sorted(record.rows)[compared_times.WARM_UP : -1]


def measured(record: Record) -> Measured | None:
    """Return the times of a short run; None if it ran no steps."""
    times = series(record)
    if not len(times):
        return None
    rows = [record.rows[step] for step in _steps(record)]
    mfu = [float(row["mfu"]) for row in rows if row.get("mfu") is not None]
    low, high = compared_times.interval(times, np.median) or (None, None)
    return Measured(
        steps=len(times),
        mean_s=float(times.mean()),
        median_s=float(np.median(times)),
        median_low_s=low,
        median_high_s=high,
        data_wait_s=float(np.mean([float(row["data_wait_s"]) for row in rows])),
        tokens_per_s=sum(int(row["tokens"]) for row in rows) / float(times.sum()),
        mfu=float(np.median(mfu)) if mfu else None,
    )


def compare(
    rungs: Sequence[Rung],
    records: Mapping[str, Record],
    failed: Mapping[str, str],
    *,
    least: float = LEAST,
) -> Ladder:
    """Compare the rungs with the baseline runs.

    Args:
      rungs: all rungs, with a baseline run first and last.
      records: records of the rungs that ran to their end, by name.
      failed: reasons why other rungs have no records, by name.
      least: fraction of a step that a rung must gain to explain anything.
    Raises:
      ValueError: the baseline was not run, or has too few steps.
    """
    for name in (FIRST, LAST):
        if name not in records or measured(records[name]) is None:
            why = failed.get(name, "it has too few steps")
            raise ValueError(
                f"the unchanged run ({name}) cannot serve as the baseline: {why}"
            )
    first, last = (series(records[name]) for name in (FIRST, LAST))
    drift = float(last.mean() / first.mean() - 1)
    found = [_compared(rung, records, failed) for rung in rungs]
    limit = compared_times.significant([one.p for one in found if one.p is not None])
    needed = max(least, _DRIFTS * abs(drift))
    judged = tuple(_judged(one, limit, needed) for one in found)
    gains = [one for one in judged if one.verdict == "gains"]
    best = max(gains, key=lambda one: one.gain or 0.0, default=None)
    return Ladder(
        rungs=judged, drift=drift, explains=None if best is None else best.name
    )


def _compared(
    rung: Rung, records: Mapping[str, Record], failed: Mapping[str, str]
) -> Compared:
    """Return the times of a rung; the verdict needs all rungs and follows later."""
    record = records.get(rung.name)
    times = None if record is None else measured(record)
    if record is None or times is None:
        reason = rung.reason or failed.get(rung.name, "it has too few steps")
        return Compared(
            name=rung.name,
            less=rung.less,
            verdict="not run",
            measured=None,
            reason=reason,
        )
    if rung.name in (FIRST, LAST):
        return Compared(
            name=rung.name, less=rung.less, verdict="within noise", measured=times
        )
    kinds = _PAUSES.get(rung.name, frozenset())
    own = series(record, kinds)
    whole = [series(records[name], kinds) for name in (FIRST, LAST)]
    # Blocks are whole periods. Their length is computed without the pauses, whose
    # repetition is not autocorrelation.
    steps = [series(records[name]) for name in (FIRST, LAST)]
    block = max(
        compared_times.block_length(series(record), x, period=rung.period)
        for x in steps
    )
    tests = [compared_times.means_differ(own, x, block) for x in whole]
    both = np.concatenate(whole)
    ratio = compared_times.ratio_interval(own, both, block)
    p_values = [p for p in tests if p is not None]
    # A rung that is slower than one baseline and faster than the other gains nothing.
    is_between = len({bool(own.mean() < x.mean()) for x in whole}) > 1
    p = max(p_values) if len(p_values) == len(tests) else None
    gain, gone = 1 - float(own.mean() / both.mean()), rung.layers_gone
    return Compared(
        name=rung.name,
        less=rung.less,
        verdict="too few steps" if p is None else "within noise",
        measured=times,
        gain=gain,
        outside_layers=None if gone is None else 1 - gain / gone,
        gain_low=None if ratio is None else 1 - ratio[1],
        gain_high=None if ratio is None else 1 - ratio[0],
        p=1.0 if p is not None and is_between else p,
        block=block,
    )


def _judged(one: Compared, limit: float, needed: float) -> Compared:
    """Return a rung with its verdict.

    Args:
      one: rung to judge.
      limit: largest significant p.
      needed: smallest gain that explains the time.
    """
    if one.p is None or one.gain is None:
        return one
    verdict: Verdict = "within noise"
    if one.name == "smaller-model":
        verdict = "differs"
    elif one.p <= limit and one.gain > 0:
        verdict = "gains" if one.gain >= needed else "gains little"
    return dataclasses.replace(one, verdict=verdict)
