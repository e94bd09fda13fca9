"""Two explanations of the rates of a port, and their likelihoods.

Input: the level of each window, which is the logarithm of the port's relative rate in
the window. Output: the log-likelihood of each explanation with its best parameters.

- No fault: the level is constant, except for a drift of `drift_part`.
- Decay: from some time on, the level drops permanently, at once or as a power of time.

The third explanation, the load of a neighbour, is in `mjax.health.watch.neighbours`. In
all of them, a single window may be slow for its own reason. Noise is Student's t with 4
degrees of freedom, since a few windows are far off.
"""

import dataclasses

import numpy as np

from mjax.health.watch.levels import Levels
from mjax.health.watch.thresholds import ExplanationThresholds

type Array = np.ndarray
OFFSETS = np.linspace(-0.04, 0.06, 6)
"""Offsets of the level before the fault. They span the noise of the best windows."""
POWERS = (0.0, 0.7, 1.0, 1.5, 2.0)
"""Powers of time with which the level drops; 0 means that it drops at once. Not
measured."""
LOSSES = 1 - np.exp(-np.arange(0.08, 1.55, 0.05))
"""Candidates for the fraction of the rate that a fault costs, from the smallest fault
to three lanes of four. They are equally spaced in the level, by less than its noise.
Tuned: coarser steps miss the level of lost lanes."""
MOST_ONSETS = 20
"""Maximum number of onsets tried. It bounds the run time."""
SLOWEST = 1.6
"""Maximum drop of the level in a slow window; exp(-1.6) is a fifth of the rate. Not
measured."""


LEAST_AFTER = 3
"""Minimum number of windows after the onset. Tuned: two slow windows at the end are not
a lasting drop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decay:
    """The best decay."""

    gain: float
    """Log-likelihood ratio to no fault."""
    onset_s: float
    lost_part: float
    """Lost fraction of the rate at the end."""


def explain(levels: Levels, limits: ExplanationThresholds) -> Decay:
    """Fit both explanations to at least `LEAST_AFTER` + 1 levels; return the decay."""
    decay, onset_s, lost_part = _decay(levels, limits)
    least = nothing(levels.level, levels.std, limits)
    return Decay(gain=decay - least, onset_s=onset_s, lost_part=lost_part)


def student(away: Array, std: Array) -> Array:
    """Return the density of Student's t with 4 degrees of freedom and scale std."""
    return 0.375 / std * (1 + (away / std) ** 2 / 4) ** -2.5


def density(away: Array, std: Array, slow_part: float) -> Array:
    """Return the log density of noise mixed with windows that are slow on their own."""
    slow = np.where((away < 0.03) & (away > -SLOWEST), 1 / SLOWEST, 1e-3)
    return np.log((1 - slow_part) * student(away, std) + slow_part * slow)


def nothing(
    level: Array, std: Array, limits: ExplanationThresholds, *, drifts: bool = True
) -> float:
    """Return the log-likelihood of a constant or slightly drifting level."""
    drift = np.linspace(0, 1, len(level)) * limits.drift_part * drifts
    away = level - np.linspace(-0.06, 0.06, 13)[:, None, None]
    away = away + np.stack([0 * drift, drift])
    return float(density(away, std, limits.slow_part).sum(-1).max())


def _decay(levels: Levels, limits: ExplanationThresholds) -> tuple[float, float, float]:
    """Return the log-likelihood, the onset and the lost fraction of the best decay."""
    best = (-np.inf, 0.0, 0.0)
    time_s = levels.time_s
    onsets_s = time_s[:-LEAST_AFTER]
    for onset_s in onsets_s[:: max(1, len(time_s) // MOST_ONSETS)]:
        reached = np.clip((time_s - onset_s) / (time_s[-1] - onset_s), 0, 1)
        for power in POWERS:
            shape = reached**power if power else (time_s > onset_s).astype(float)
            fall = np.log(1 - LOSSES[:, None] * shape)
            away = levels.level - OFFSETS[:, None, None] - fall
            each = density(away, levels.std, limits.slow_part).sum(-1)
            if each.max() > best[0]:
                loss = LOSSES[np.unravel_index(each.argmax(), each.shape)[1]]
                best = (float(each.max()), float(onset_s), float(loss))
    return best
