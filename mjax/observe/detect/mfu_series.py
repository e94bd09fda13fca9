"""Prepare the MFU series of a run for the comparison of models.

Input: time, duration and MFU of each step, and marks of saves, evaluations and
restarts. Output: logarithm of the MFU relative to the expected MFU, in blocks of some
seconds, without steps that marks explain and without single slow steps; and the
tenfold slow steps.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

type Array = np.ndarray

FEWEST_STEPS = 30
"""Fewest usable steps. The fast steps of the thermal class last up to 20 s, and ten
more steps show the level that follows."""
FIRST_STEPS = 3
"""Number of first steps after a start to ignore: they compile and fill caches. Not
measured."""
LOAD_PAUSE_S = 20.0
"""Minimum seconds of a long pause. A GPU cools down in this time."""
DIP = 5.0
"""A step this many times as long as its neighbours counts as tenfold slow. It is half
of the field guide's factor of ten, and twice the factor of a usual stall."""
BLOCK_S = 4.0
"""Seconds of a block. It is a third of the 12 s of load that the thermal class
needs."""
FEWEST_BLOCKS = 25
"""Minimum number of blocks. In a short run the blocks are shorter. Not measured."""
MOST_BLOCKS = 3000
"""Maximum number of blocks. In a long run the blocks are longer. It bounds the time of
a classification."""
EXPECTED_DEVIATION = 0.02
"""Standard deviation of the log of the expected MFU, including daily drift. Not
measured."""
UNKNOWN_DEVIATION = 0.5
"""Deviation of the log of the best level. The healthy level may have been seen only
briefly."""
_NEIGHBOURS = 7
"""Number of steps whose median is the local level. Dips last up to three steps."""
_SLOW, _SLOW_DEVIATIONS = 0.14, 4.0
"""A step that is slower than its neighbours by 15% (0.14 in the logarithm) and by 4
deviations is ignored for the level. Not measured."""
_TOUCH = 0.02
"""A mark explains a step if they overlap by this fraction of a usual step. Not
measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """A recorded action of the trainer."""

    kind: Literal["save", "eval", "restart"]
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Means of the log MFU over blocks of steps. N blocks."""

    value: Array
    """[N], float64: natural logarithm of the MFU relative to the base."""
    weight: Array
    """[N], float64: number of steps in the mean."""
    time_s: Array
    """[N], float64: middle of the block."""
    load_s: Array
    """[N], float64: time since the last start or long pause; after a start, without
    the first `FIRST_STEPS` steps."""
    age: Array
    """[N], float64: steps since the last start."""
    deviation: float
    """Robust deviation of the log MFU of a single step from its level."""
    base_deviation: float
    """Deviation of the log of the base: the uncertainty of the healthy level."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dips:
    """Tenfold slow steps that no mark explains; adjacent ones count as one. E dips."""

    step: Array
    """[E], int64: position in the series."""
    time_s: Array
    """[E], float64: end of the step."""
    factor: Array
    """[E], float64: duration relative to neighbouring steps."""
    num_steps: int
    """Number of steps of the series."""
    start_s: float
    """Start of the series."""
    end_s: float
    """End of the series."""
    step_s: float
    """Typical duration of a step."""
    masked: Array
    """[num_steps], bool: whether a mark or a start explains the step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A prepared series."""

    blocks: Blocks
    dips: Dips
    base: float
    """MFU to which the blocks are relative."""
    num_left_out: int
    """Number of steps whose MFU is not a positive number."""
    num_masked: int
    """Number of steps that a mark or a start explains."""


def prepare(
    step_end_s: Array,
    step_s: Array,
    mfu: Array,
    marks: Sequence[Mark],
    expected_mfu: float | None,
    expected_deviation: float = EXPECTED_DEVIATION,
) -> Prepared:
    """Prepare a series.

    Args:
      step_end_s: [T], ascending.
      step_s: [T].
      mfu: [T], any unit if expected_mfu is None; NaN where unknown.
      marks: on the clock of step_end_s.
      expected_mfu: None takes the best level of the series.
      expected_deviation: standard deviation of the logarithm of the expected MFU.
    Raises:
      ValueError: the lengths differ, too few steps are usable, or time runs backwards.
    """
    end_s, step_s, mfu = (np.asarray(x, float) for x in (step_end_s, step_s, mfu))
    _check(end_s, step_s, mfu, expected_mfu)
    good = np.isfinite(mfu) & (mfu > 0) & np.isfinite(step_s) & (step_s > 0)
    if good.sum() < FEWEST_STEPS:
        raise ValueError(
            f"{good.sum()} steps have a known MFU or rate, at least {FEWEST_STEPS} are "
            "needed; let the run continue"
        )
    num_left_out = int((~good).sum())
    end_s, step_s, mfu = end_s[good], step_s[good], mfu[good]
    starts = _find_starts(end_s - step_s, marks)
    masked = _mask(end_s, step_s, marks, starts)
    use = np.flatnonzero(~masked)
    if len(use) < FEWEST_STEPS:
        raise ValueError(
            f"{len(use)} of {len(mfu)} steps are neither the first {FIRST_STEPS} after "
            "a start nor contain a save or an evaluation, at least "
            f"{FEWEST_STEPS} are needed; let the run continue"
        )
    logs = np.log(mfu)
    slow, deviation = _find_slow(logs[use])
    base, base_deviation = expected_mfu, expected_deviation
    if base is None:
        base = float(np.exp(_best_level(logs[use])))
        base_deviation = UNKNOWN_DEVIATION
    kept = use[slow <= max(_SLOW, _SLOW_DEVIATIONS * deviation)]
    is_dip = slow > np.log(DIP)
    dipped = use[is_dip]
    first = np.diff(dipped, prepend=-FIRST_STEPS - 1) > FIRST_STEPS
    return Prepared(
        blocks=_make_blocks(
            end_s,
            step_s,
            logs - np.log(base),
            (kept, starts, marks),
            (deviation, base_deviation),
        ),
        dips=Dips(
            step=dipped[first],
            time_s=end_s[dipped[first]],
            factor=np.exp(slow[is_dip])[first],
            num_steps=len(mfu),
            start_s=float(end_s[0] - step_s[0]),
            end_s=float(end_s[-1]),
            step_s=float(np.median(step_s[use])),
            masked=masked,
        ),
        base=base,
        num_left_out=num_left_out,
        num_masked=int(masked.sum()),
    )


def _check(end_s: Array, step_s: Array, mfu: Array, expected: float | None) -> None:
    if not end_s.shape == step_s.shape == mfu.shape or end_s.ndim != 1:
        shapes = f"{end_s.shape}, {step_s.shape} and {mfu.shape}"
        raise ValueError(f"the three series must have one length, got {shapes}")
    if expected is not None and not 0 < expected < np.inf:
        raise ValueError(f"the expected MFU must be above 0, got {expected}")
    if not np.isfinite(end_s).all():
        raise ValueError("the end of each step must be a finite time")
    back = np.flatnonzero(np.diff(end_s) < 0)
    if len(back):
        first = int(back[0])
        raise ValueError(
            f"step {first + 1} of the series ends {end_s[first] - end_s[first + 1]:.3g}"
            f" s before step {first}; the clock was set back, use a monotonic one"
        )


def _find_starts(begin_s: Array, marks: Sequence[Mark]) -> Array:
    """Return the position of the first step after each start, ascending."""
    ends = [mark.end_s for mark in marks if mark.kind == "restart"]
    at = np.searchsorted(begin_s + 1e-6, ends)
    return np.unique([0, *at[at < len(begin_s)]]).astype(int)


def _mask(end_s: Array, step_s: Array, marks: Sequence[Mark], starts: Array) -> Array:
    """Return [T], bool: whether a mark or a start explains the step."""
    masked = np.zeros(len(end_s), bool)
    for start in starts:
        masked[start : start + FIRST_STEPS] = True
    begin_s, touch_s = end_s - step_s, _TOUCH * float(np.median(step_s))
    for mark in marks:
        shared = np.minimum(end_s, mark.end_s) - np.maximum(begin_s, mark.start_s)
        masked |= shared > touch_s
    return masked


def _find_slow(logs: Array) -> tuple[Array, float]:
    """Return how far each log is below its neighbours, [T], and a log's deviation."""
    half = _NEIGHBOURS // 2
    around = np.lib.stride_tricks.sliding_window_view(
        np.pad(logs, half, mode="reflect"), _NEIGHBOURS
    )
    local = np.median(around, axis=1)
    spread = np.median(np.abs(np.diff(logs))) / (0.6745 * np.sqrt(2))
    return local - logs, max(float(spread), 1e-4)


def _best_level(logs: Array) -> float:
    """Return the 90th percentile of the medians of five steps."""
    count = len(logs) // 5 * 5
    return float(np.quantile(np.median(logs[:count].reshape(-1, 5), axis=1), 0.9))


def _make_blocks(
    end_s: Array,
    step_s: Array,
    value: Array,
    parts: tuple[Array, Array, Sequence[Mark]],
    deviations: tuple[float, float],
) -> Blocks:
    """Average the kept steps in blocks that do not span a start or a long pause."""
    kept, starts, marks = parts
    begin_s = end_s - step_s
    loads = _find_loads(begin_s, starts, marks)
    load = np.searchsorted(loads, np.arange(len(value)), side="right") - 1
    origin_s = np.array(
        [begin_s[min(x + FIRST_STEPS * (x in starts), len(value) - 1)] for x in loads]
    )
    start = starts[np.searchsorted(starts, np.arange(len(value)), side="right") - 1]
    length = max(1, round(BLOCK_S / float(np.median(step_s[kept]))))
    length = min(max(1, len(kept) // FEWEST_BLOCKS), length)
    length = max(length, -(-len(kept) // MOST_BLOCKS))
    group = load[kept] * (len(value) + 1) + (kept - loads[load[kept]]) // length
    first = np.flatnonzero(np.diff(group, prepend=-1))
    weight = np.diff(np.append(first, len(kept))).astype(float)

    def mean(x: Array) -> Array:
        return np.add.reduceat(x[kept], first) / weight

    middle_s = end_s - step_s / 2
    return Blocks(
        value=mean(value),
        weight=weight,
        time_s=mean(middle_s),
        load_s=mean(middle_s - origin_s[load]),
        age=mean(np.arange(len(value)) - start),
        deviation=deviations[0],
        base_deviation=deviations[1],
    )


def _find_loads(begin_s: Array, starts: Array, marks: Sequence[Mark]) -> Array:
    """Return the position of the first step after each start or long pause."""
    pauses: list[list[float]] = []
    for mark in sorted(marks, key=lambda mark: mark.start_s):
        if pauses and mark.start_s - pauses[-1][1] < 0.5:  # they may coincide
            pauses[-1][1] = max(mark.end_s, pauses[-1][1])
        else:
            pauses.append([mark.start_s, mark.end_s])
    ends = [end for begin, end in pauses if end - begin > LOAD_PAUSE_S]
    at = np.searchsorted(begin_s + 1e-6, ends)
    return np.unique([*starts, *at[at < len(begin_s)]]).astype(int)
