"""Three explanations of the rates of a port, and how likely each makes them.

Enters: levels of windows. Leaves: the log-likelihood of each explanation at its best.

- Nothing: the level stays, but for a drift of `drift_part`.
- Decay: from one time on the level falls, at once or as a power of time, for good.
- Neighbour: between two windows the level is free, full in some windows and low in
  others, since bursts of two jobs meet only now and then.

In each of them a window may be slow for a reason of its own. Noise is Student's t with
4 degrees of freedom: a few windows are far off.
"""

import dataclasses

import numpy as np

from mjax.health.watch.levels import Levels
from mjax.health.watch.thresholds import ExplanationThresholds

type Array = np.ndarray
OFFSETS = np.linspace(-0.04, 0.06, 6)
"""Of the level before the fault. Chosen: the noise of the best windows."""
POWERS = (0.0, 0.7, 1.0, 1.5, 2.0)
"""Of a fall with time; 0 is at once. Chosen."""
LOSSES = np.array([0.08, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.37, 0.45, 0.55, 0.65, 0.78])
"""Parts of the rate. Chosen: from the least that counts to one lane of four."""
MOST_ONSETS = 20
"""Tried. Chosen for time."""
SLOWEST = 1.6
"""Depth of the level of a slow window; exp(-1.6) is a fifth of the rate. Chosen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanations:
    """Log-likelihoods, and what the best decay and neighbour look like."""

    nothing: float
    decay: float
    neighbour: float
    onset_s: float
    lost_part: float
    """Of the rate, at the end."""
    load_s: tuple[float, float]
    """First and last window under the load of the best neighbour."""


def explain(levels: Levels, limits: ExplanationThresholds) -> Explanations:
    """Fit the three explanations to at least three levels."""
    decay, onset_s, lost_part = _decay(levels, limits)
    neighbour, load_s = _neighbour(levels, limits)
    return Explanations(
        nothing=_nothing(levels, limits),
        decay=decay,
        neighbour=neighbour,
        onset_s=onset_s,
        lost_part=lost_part,
        load_s=load_s,
    )


def _density(away: Array, std: Array, slow_part: float) -> Array:
    """Logarithm of the mixture of noise and windows that are slow by themselves."""
    noise = 0.375 / std * (1 + (away / std) ** 2 / 4) ** -2.5
    slow = np.where((away < 0.03) & (away > -SLOWEST), 1 / SLOWEST, 1e-3)
    return np.log((1 - slow_part) * noise + slow_part * slow)


def _nothing(levels: Levels, limits: ExplanationThresholds) -> float:
    drift = np.linspace(0, 1, len(levels.level)) * limits.drift_part
    away = levels.level - np.linspace(-0.06, 0.06, 13)[:, None, None]
    away = away + np.stack([0 * drift, drift])
    return float(_density(away, levels.std, limits.slow_part).sum(-1).max())


def _decay(levels: Levels, limits: ExplanationThresholds) -> tuple[float, float, float]:
    """Return the log-likelihood, the onset and the loss of the best decay."""
    best = (-np.inf, 0.0, 0.0)
    time_s = levels.time_s
    onsets_s = time_s[:-2]
    for onset_s in onsets_s[:: max(1, len(time_s) // MOST_ONSETS)]:
        reached = np.clip((time_s - onset_s) / (time_s[-1] - onset_s), 0, 1)
        for power in POWERS:
            shape = reached**power if power else (time_s > onset_s).astype(float)
            fall = np.log(1 - LOSSES[:, None] * shape)
            away = levels.level - OFFSETS[:, None, None] - fall
            each = _density(away, levels.std, limits.slow_part).sum(-1)
            if each.max() > best[0]:
                loss = LOSSES[np.unravel_index(each.argmax(), each.shape)[1]]
                best = (float(each.max()), float(onset_s), float(loss))
    return best


def _neighbour(
    levels: Levels, limits: ExplanationThresholds
) -> tuple[float, tuple[float, float]]:
    """Return the log-likelihood and the span of the best neighbour."""
    best = (-np.inf, (0.0, 0.0))
    for offset in OFFSETS:
        away = levels.level - offset
        usual = _density(away, levels.std, limits.slow_part)
        loaded = _density(away, levels.std, limits.loaded_part)
        gained = np.concatenate(([0.0], np.cumsum(loaded - usual)))
        rise = gained - np.minimum.accumulate(gained)
        last = int(rise.argmax())
        first = int(gained[: last + 1].argmin())
        total = float(usual.sum() + rise[last])
        if total > best[0]:
            ends = levels.time_s[min(first, len(away) - 1)], levels.time_s[last - 1]
            best = (total, (float(ends[0]), float(ends[1])))
    return best
