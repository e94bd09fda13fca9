"""Rate of a port in each window, corrected for the kinds of bursts in it.

Input: the bursts of windows. Output: a level for each window, the natural logarithm of
its rate relative to the best rate of the port, and its standard deviation.

The phases of a step reach different rates, but each sends bursts of one size in every
step. So bursts of equal size form a class, and

    log rate = effect of the class + level of the window + noise

is solved for effects and levels in turn. Bursts that a window cuts off form one class
with more noise.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from mjax.health.watch.bursts import Burst
from mjax.health.watch.thresholds import DecayThresholds

type Array = np.ndarray
CUT = 0
"""Index of the class of bursts of unknown size."""
TURNS = 30
"""Number of iterations of the solution. It converges after a few."""
LEVEL_STD = 0.5
"""Prior standard deviation of a level. It is wide, since a rate is rarely below
half."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Levels:
    """Levels of W windows."""

    time_s: Array
    """[W], ends of the windows."""
    level: Array
    """[W], levels; 0 is the rate exceeded by a fifth of the windows."""
    std: Array
    """[W], standard deviations of the levels."""


def find_levels(
    windows: Sequence[tuple[float, tuple[Burst, ...]]], limits: DecayThresholds
) -> Levels:
    """Return the level of each window.

    Args:
      windows: end time and bursts of each window, at least one burst.
      limits: thresholds, which give the noise of bursts.
    """
    sizes: list[float] = []
    rows = []
    for index, (_, bursts) in enumerate(windows):
        for kind, rates in _by_class(bursts, sizes, limits.same_size_part).items():
            std = limits.burst_std / np.sqrt(min(len(rates), limits.most_bursts))
            std = limits.cut_std if kind == CUT else std + limits.class_std
            rows.append((index, kind, float(np.quantile(np.log(rates), 0.7)), std))
    table = np.array(rows)
    index, kind = table[:, 0].astype(int), table[:, 1].astype(int)
    value, weight = table[:, 2], table[:, 3] ** -2
    each_window = np.bincount(index, weight)
    each_class = np.bincount(kind, weight) + 1e-9
    level = np.zeros(len(windows))
    for _ in range(TURNS):
        effect = np.bincount(kind, weight * (value - level[index])) / each_class
        level = np.bincount(index, weight * (value - effect[kind]))
        level = level / (each_window + LEVEL_STD**-2)
        level -= np.quantile(level, 0.8)
    return Levels(
        time_s=np.array([end_s for end_s, _ in windows]),
        level=level,
        std=np.sqrt(1 / each_window) + limits.window_std,
    )


def _by_class(
    bursts: tuple[Burst, ...], sizes: list[float], same: float
) -> dict[int, list[float]]:
    """Return the rates of bursts by class; new sizes are added to `sizes`.

    Class k > 0 has the size sizes[k - 1].
    """
    rates: dict[int, list[float]] = {}
    for burst in bursts:
        kind = CUT
        if burst.size_s is not None:
            away = np.abs(np.log(np.array(sizes) / burst.size_s))
            if not len(away) or away.min() >= same:
                sizes.append(burst.size_s)
                kind = len(sizes)
            else:
                kind = int(away.argmin()) + 1
        rates.setdefault(kind, []).append(burst.rate)
    return rates
