"""Summarise how late a rank is over the steps of a run.

Input: the excess time of each rank over its peers in each step. Output: the level of a
rank, the confidence that it is above a limit, and the pattern of its lateness over
time. Stragglers are slow in irregular episodes, so the level is an upper quantile.

Sources: see `mjax.observe.detect.stragglers`.
"""

from typing import Literal

import numpy as np

type Pattern = Literal["lasting", "episodes", "irregular"]
_QUANTILE = 0.85
"""Quantile over the steps. The value was picked so that a host is found if it is slow
in a third of the second half of the run."""
_SMOOTH_QUANTILE = 0.75
"""Quantile over the medians of blocks of steps. The value was picked so that a host is
found if it is slow in the second half of the run."""
_BLOCK_STEPS = 10
"""Steps of a block. It is longer than a blip of a healthy host."""
_DRAWS = 200
"""Number of bootstrap samples."""
_LASTING = 0.9
_STAYS = 0.8
"""Lateness is lasting if at least `_LASTING` of all steps are late. It comes in
episodes if at least `_STAYS` of the steps after a late one are late. Not measured."""


def level_of(late: np.ndarray, *, is_smooth: bool) -> np.ndarray:
    """Return the upper quantile of `late` over its first dim, the steps.

    Steps that are NaN are left out; the level is NaN if all are. If `is_smooth`, the
    quantile is over medians of blocks of steps.
    """
    if is_smooth:
        late = _block_medians(late)
    known = ~np.isnan(late).all(axis=0)
    level = np.full(late.shape[1:], np.nan)
    quantile = _SMOOTH_QUANTILE if is_smooth else _QUANTILE
    level[known] = np.nanquantile(late[:, known], quantile, axis=0)
    return level


def _block_medians(late: np.ndarray) -> np.ndarray:
    blocks = np.array_split(late, max(len(late) // _BLOCK_STEPS, 1))
    medians = np.full((len(blocks), *late.shape[1:]), np.nan)
    for number, block in enumerate(blocks):
        known = ~np.isnan(block).all(axis=0)
        medians[number, known] = np.nanmedian(block[:, known], axis=0)
    return medians


def confidence_of(late: np.ndarray, least: float, *, is_smooth: bool) -> float:
    """Return the fraction of resampled runs whose level is above `least`.

    Args:
      late: [T], excess of a rank in each step.
      least: limit, in the unit of `late`.
      is_smooth: whether the level is that of the medians of blocks.
    """
    blocks = np.full((-(-len(late) // _BLOCK_STEPS), _BLOCK_STEPS), np.nan)
    blocks.reshape(-1)[: len(late)] = late
    blocks = blocks[~np.isnan(blocks).all(axis=1)]
    quantile = _QUANTILE
    if is_smooth:
        blocks, quantile = np.nanmedian(blocks, axis=1)[:, None], _SMOOTH_QUANTILE
    rng = np.random.default_rng(0)  # the same run gives the same report
    drawn = rng.integers(len(blocks), size=(_DRAWS, len(blocks)))
    levels = np.nanquantile(blocks[drawn].reshape(_DRAWS, -1), quantile, axis=1)
    return float((levels > least).mean())


def pattern_of(late: np.ndarray, least: float) -> tuple[Pattern, int]:
    """Return the pattern of lateness over the steps, and the index of its onset.

    A step is late if its excess is above half of `least`.
    """
    rows = np.flatnonzero(~np.isnan(late))
    is_late = late[rows] > least / 2
    num = len(rows)
    before = np.cumsum(is_late) - is_late
    index = np.arange(num)
    rate_before = before / np.maximum(index, 1)
    rate_after = (is_late.sum() - before) / (num - index)
    # The change of a mean, in deviations of its noise (CUSUM).
    change = (rate_after - rate_before) * np.sqrt(index * (num - index) / num)
    start = int(np.argmax(change))
    if rate_before[start] > rate_after[start] / 4:
        start = 0
    is_late = is_late[start:]
    since = int(rows[start])
    if is_late.mean() >= _LASTING:
        return "lasting", since
    follows = is_late[1:][is_late[:-1]]
    stays = follows.mean() if len(follows) else 0.0
    return ("episodes" if stays >= _STAYS else "irregular"), since
