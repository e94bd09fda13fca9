"""Small models of an MFU series, one for each class, and their log evidence.

Input: a prepared series. Output: the logarithm of the evidence of each class, which is
its likelihood with the parameters averaged or fitted under a prior. The level of the
series and its dips are independent parts; each class has a model of both.

All classes have the same noise around their level: white noise of the steps, a slow
wander of healthy size (Ornstein-Uhlenbeck process), and a few outliers. Each class adds
a mean curve, except `ragged`, which has a deeper wander instead. Ranges come from the
field guide (Imbue, "From bare metal to a 70B model",
imbue.com/research/70b-infrastructure/) and from Llama 3 (arXiv:2407.21783, section
3.3.4: 1-2% a day); the others are not measured.
"""

import dataclasses

import numpy as np

from mjax.observe.detect.mfu_series import Array, Blocks, Dips

LEVELS = {
    "dead_link": (0.02, 0.10),
    "no_gpudirect": (0.25, 0.35),
    "bad_link": (0.60, 0.80),
}
"""Range of each class's level, relative to the expected MFU. Field guide: below 10%,
about 30%, 60 to 80%."""
THERMAL_LEVEL = (0.65, 0.75)
"""Range of the level relative to the expected MFU. Field guide: about 70%."""
LOST = (0.10, 0.35)
"""Range of the fraction of the MFU that a decay loses before the restart. Not
measured."""
RARE_S = (600.0, 900.0, 1350.0)
"""Mean seconds between rare dips to try. Field guide: about 15 minutes."""
LONE_S = 21_600.0
"""Mean seconds between tenfold slow steps of a healthy run, six hours. Not measured."""
_SLOPE_PER_S = 4e-7
"""Standard deviation of the daily drift's slope, in log MFU per second. Llama 3: 1-2% a
day; a sine of that size with a period of 24 hours has at most 7e-7."""
_LEVEL_TAIL = 0.05
"""Standard deviation of the Gaussian tails of a log level's prior outside its range.
Not measured."""
_OUTLIERS = 0.01
"""Fraction of blocks that are outliers; these are uniform within a factor of e. Not
measured."""
_WANDER_S = (6.0, 12.0, 25.0, 50.0, 100.0)
"""Correlation times of a wander to try. They span seconds to minutes."""
_HEALTHY_WANDER = (0.0, 0.004, 0.008, 0.012)
_RAGGED_WANDER = (0.018, 0.025, 0.033, 0.045, 0.06)
"""Deviations of the log MFU in a healthy and in a ragged wander, to try. Field guide: a
ragged MFU wanders between 90% and 100%, a deviation of 0.03 if all depths are equally
likely. Healthy runs stay below half of that, a bound that is not measured."""
_WHITE = (0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.6, 2.2)
"""White noise of a block to try, as multiples of the deviation between neighbouring
blocks. Not measured."""
_DELAYS_S = (10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 22.0, 25.0, 30.0)
"""Seconds of load before throttling, to try. Field guide: about 15 s."""
_FEWEST_REGULAR = 4
"""Minimum number of dips to fit a period. Three dips have two intervals, which may
agree by chance."""
_SHAPES = (0.6, 0.8, 1.0, 1.4)
"""Exponents of a decay to try. Not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """A mean curve, fitted to the blocks."""

    mean: Array
    """[N], log MFU."""
    prior: float
    """Log prior density of the curve's parameters, with a penalty for parameters that
    were searched."""
    level: float = 1.0
    """The level as a fraction of the expected MFU."""
    onset_s: float | None = None
    """Time at which the level began; None: at the start of the run."""
    lost: float = 0.0
    """Fraction of the MFU that a decay loses before a restart."""
    delay_s: float = 0.0
    """Seconds of load before throttling."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wander:
    """Slow variation around a level, at the best point of the grid."""

    score: float
    """Log evidence."""
    deviation: float
    """Standard deviation of the log MFU."""
    time_s: float
    """Correlation time in seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rhythm:
    """Spacing of the dips."""

    score: float
    """Log evidence."""
    period: float = 0.0
    """Period, in steps or in seconds."""
    unit: str = "steps"
    num_hits: int = 0
    """Number of dips at an expected time."""
    num_expected: int = 0


def fit_curves(blocks: Blocks) -> dict[str, Curve]:
    """Return the fitted mean curve of each class that applies to the blocks."""
    curves = {"healthy": _fit_healthy(blocks)}
    for name, bounds in LEVELS.items():
        curves[name] = _fit_level(blocks, bounds)
    curves["slow_decay"] = _fit_decay(blocks)
    if blocks.load_s.max() > _DELAYS_S[0]:
        curves["thermal"] = _fit_thermal(blocks)
    return curves


def _normal(x: float, deviation: float) -> float:
    """Return the log density of a normal distribution around 0."""
    return -0.5 * (x / deviation) ** 2 - float(np.log(deviation)) - 0.919


def _of_level(log_level: float, bounds: tuple[float, float]) -> float:
    """Return a log density that is flat inside a range and falls outside it."""
    low, high = np.log(bounds)
    outside = max(low - log_level, log_level - high, 0.0)
    total = high - low + _LEVEL_TAIL * np.sqrt(2 * np.pi)
    return float(-0.5 * (outside / _LEVEL_TAIL) ** 2 - np.log(total))


def _centre(blocks: Blocks, use: Array | slice = slice(None)) -> float:
    """Return the weighted median of the block values."""
    value, weight = blocks.value[use], blocks.weight[use]
    order = np.argsort(value)
    total = np.cumsum(weight[order])
    return float(value[order][np.searchsorted(total, total[-1] / 2)])


def _with_drift(blocks: Blocks, curve: Curve) -> Curve:
    """Return the curve with the daily drift, which faulty and healthy runs have."""
    time = blocks.time_s - np.average(blocks.time_s, weights=blocks.weight)
    rest = np.clip(blocks.value - curve.mean, -0.05, 0.05)
    noise = float(np.average(rest**2, weights=blocks.weight))
    ridge = max(noise, 1e-6) / _SLOPE_PER_S**2
    slope = float(np.sum(blocks.weight * time * rest))
    slope /= float(np.sum(blocks.weight * time**2)) + ridge
    return dataclasses.replace(
        curve,
        mean=curve.mean + slope * time,
        prior=curve.prior - 0.5 * (slope / _SLOPE_PER_S) ** 2,
    )


def _fit_healthy(blocks: Blocks) -> Curve:
    """Fit a level near the expected one."""
    centre = _centre(blocks)
    level = Curve(
        mean=np.full(len(blocks.value), centre),
        prior=_normal(centre, blocks.base_deviation),
        level=float(np.exp(centre)),
    )
    return _with_drift(blocks, level)


def _fit_level(blocks: Blocks, bounds: tuple[float, float]) -> Curve:
    """Fit a level that holds from the start or from a later time."""
    centre = _centre(blocks)
    whole = Curve(
        mean=np.full(len(blocks.value), centre),
        prior=_of_level(centre, bounds) + np.log(0.5),
        level=float(np.exp(centre)),
    )
    split = _find_change(blocks)
    if split is None:
        return _with_drift(blocks, whole)
    after = np.arange(len(blocks.value)) >= split
    before, level = _centre(blocks, ~after), _centre(blocks, after)
    prior = _of_level(level - before, bounds) + np.log(0.5 / len(after))
    late = Curve(
        mean=np.where(after, level, before),
        prior=float(prior + _normal(before, blocks.base_deviation)),
        level=float(np.exp(level - before)),
        onset_s=float(blocks.time_s[split]),
    )
    curves = [_with_drift(blocks, curve) for curve in (whole, late)]
    return max(curves, key=lambda curve: _quick(blocks, curve))


def _find_change(blocks: Blocks, fewest: int = 3) -> int | None:
    """Return the block at which one change of level explains the series best.

    None if the series has fewer than 2 * `fewest` blocks.
    """
    num = len(blocks.value)
    if num < 2 * fewest:
        return None
    weight, total = np.cumsum(blocks.weight), np.cumsum(blocks.weight * blocks.value)
    left, right = weight[:-1], weight[-1] - weight[:-1]
    gain = total[:-1] ** 2 / left + (total[-1] - total[:-1]) ** 2 / right
    inside = slice(fewest - 1, num - fewest)
    return int(np.argmax(gain[inside])) + fewest


def _quick(blocks: Blocks, curve: Curve) -> float:
    """Return the log posterior of a curve under white noise and outliers."""
    rest = blocks.value - curve.mean
    scale = float(np.median(np.abs(rest) * np.sqrt(blocks.weight))) / 0.6745
    deviation = max(scale, blocks.deviation) / np.sqrt(blocks.weight)
    inlier = np.log(1 - _OUTLIERS) - 0.5 * (rest / deviation) ** 2
    inlier -= np.log(deviation) + 0.919
    return float(np.logaddexp(inlier, np.log(_OUTLIERS)).sum() + curve.prior)


def _fit_decay(blocks: Blocks) -> Curve:
    """Fit a level that falls with the steps since the last start."""
    restart = np.flatnonzero(np.diff(blocks.age) < 0)
    first = float(blocks.age[restart[0] if len(restart) else -1])
    age = np.minimum(blocks.age / max(first, 1.0), 1.5)
    best, chosen = -np.inf, None
    for lost in np.arange(0.04, 0.6, 0.02):
        for shape in _SHAPES:
            curve = np.log(np.maximum(1 - lost * age**shape, 0.05))
            level = float(np.median(blocks.value - curve))
            low, high = LOST
            outside = max(low - lost, lost - high, 0.0)
            prior = _normal(level, blocks.base_deviation) - 0.5 * (outside / 0.03) ** 2
            prior -= np.log(len(_SHAPES) * (high - low) / 0.02)
            found = Curve(mean=curve + level, prior=float(prior), lost=float(lost))
            score = _quick(blocks, found)
            if score > best:
                best, chosen = score, found
    assert chosen is not None
    return chosen


def _fit_thermal(blocks: Blocks) -> Curve:
    """Fit a level that is reached some seconds after the load begins."""
    curves = []
    for delay_s in _DELAYS_S:
        slow = blocks.load_s > delay_s
        if not slow.any():
            continue
        before = _centre(blocks, ~slow) if (~slow).any() else 0.0
        level = _centre(blocks, slow)
        prior = _of_level(level - before, THERMAL_LEVEL) - np.log(len(_DELAYS_S))
        curve = Curve(
            mean=np.where(slow, level, before),
            prior=float(prior + _normal(before, blocks.base_deviation)),
            level=float(np.exp(level - before)),
            delay_s=delay_s,
        )
        curves.append(_with_drift(blocks, curve))
    return max(curves, key=lambda curve: _quick(blocks, curve))


def filter_wander(
    blocks: Blocks, means: Array, deviations: tuple[float, ...]
) -> list[Wander]:
    """Return the best wander of each curve, over a grid of wander and noise.

    The likelihood is that of a Kalman filter of white noise and an Ornstein-Uhlenbeck
    process, with outliers.

    Args:
      blocks: N blocks.
      means: [C, N], the mean curve of each class.
      deviations: deviations of the wander to try.
    """
    deviation, time_s, white = (
        x.ravel() for x in np.meshgrid(deviations, _WANDER_S, _WHITE, indexing="ij")
    )
    size, weight = len(blocks.value), blocks.weight
    steps = np.diff(blocks.value) / np.sqrt(1 / weight[1:] + 1 / weight[:-1])
    scale = max(float(np.median(np.abs(steps))) / 0.6745, blocks.deviation * 0.5, 5e-4)
    white = (white * scale) ** 2
    variance = deviation**2
    gap_s = np.maximum(np.diff(blocks.time_s, prepend=blocks.time_s[0]), 0.0)
    keep = np.exp(-gap_s[:, None] / time_s)  # [N, G]
    rest = blocks.value - means  # [C, N]
    state = np.zeros((len(means), len(white)))
    spread = np.broadcast_to(variance, state.shape).copy()
    total = np.zeros_like(state)
    usual, odd = np.log(1 - _OUTLIERS) - 0.919, np.log(_OUTLIERS)
    for i in range(size):
        state *= keep[i]
        spread = spread * keep[i] ** 2 + variance * (1 - keep[i] ** 2)
        of_step = spread + white / weight[i]
        surprise = rest[:, i, None] - state
        inlier = usual - 0.5 * (surprise**2 / of_step + np.log(of_step))
        density = np.logaddexp(inlier, odd)
        total += density
        gain = np.exp(inlier - density) * spread / of_step
        state += gain * surprise
        spread = spread * (1 - gain)
    best = np.argmax(total, axis=1)
    return [
        Wander(
            score=float(np.logaddexp.reduce(each) - np.log(len(each))),
            deviation=float(deviation[at]),
            time_s=float(time_s[at]),
        )
        for each, at in zip(total, best, strict=True)
    ]


def score_levels(
    blocks: Blocks, curves: dict[str, Curve]
) -> dict[str, tuple[float, Wander]]:
    """Return the log evidence and the wander of each class of levels.

    The classes are those of `curves`, and `ragged`.
    """
    means = np.stack([curve.mean for curve in curves.values()])
    found = filter_wander(blocks, means, _HEALTHY_WANDER)
    scores = {
        name: (wander.score + curve.prior, wander)
        for (name, curve), wander in zip(curves.items(), found, strict=True)
    }
    healthy = curves["healthy"]
    (ragged,) = filter_wander(blocks, healthy.mean[None], _RAGGED_WANDER)
    centre = float(np.log(healthy.level))
    loss = np.sqrt(3) * ragged.deviation  # half the range of a uniform distribution
    slope = healthy.prior - float(_normal(centre, blocks.base_deviation))
    prior = slope + float(_normal(centre + loss, blocks.base_deviation))
    scores["ragged"] = ragged.score + prior, ragged
    return scores


def score_dips(dips: Dips) -> dict[str, Rhythm]:
    """Return the rhythm, with its log evidence, of each class of dips.

    The classes are `none`, `rare_dips` and, from four dips on, `regular_dips`.
    """
    num, length_s = len(dips.step), max(dips.end_s - dips.start_s, dips.step_s)

    def poisson(between_s: float) -> float:
        return num * np.log(dips.step_s / between_s) - length_s / between_s

    rare = np.logaddexp.reduce([poisson(each) for each in RARE_S]) - np.log(len(RARE_S))
    found = {
        "none": Rhythm(score=float(poisson(LONE_S))),
        "rare_dips": Rhythm(score=float(rare)),
    }
    if num >= _FEWEST_REGULAR:
        found["regular_dips"] = _find_rhythm(dips)
    return found


def _find_rhythm(dips: Dips) -> Rhythm:
    """Find the period, in steps or in seconds, that explains most dips."""
    best: Rhythm | None = None
    end_s = np.linspace(dips.start_s, dips.end_s, dips.num_steps)
    masked_s = end_s[dips.masked]
    masked = np.flatnonzero(dips.masked).astype(float)
    clocks = (
        ("steps", dips.step.astype(float), 1.0, 0.0, float(dips.num_steps), masked),
        ("seconds", dips.time_s, dips.step_s, dips.start_s, dips.end_s, masked_s),
    )
    for unit, at, width, start, end, hidden in clocks:
        for period in _periods(at, width):
            found = _score_period(at, period, (width, start, end), hidden)
            if best is None or found.score > best.score:
                best = dataclasses.replace(found, unit=unit)
    assert best is not None
    return best


def _periods(at: Array, width: float) -> Array:
    """Return the candidate periods from the gaps between dips."""
    gaps = [at[k:] - at[:-k] for k in (1, 2, 3) if k < len(at)]
    one = np.concatenate([gap / part for gap in gaps for part in (1, 2, 3)])
    one = np.maximum(one, 5 * width)
    one = np.unique(np.round(one / (0.25 * width)) * 0.25 * width)
    return one[:: max(1, len(one) // 200)]


def _score_period(
    at: Array, period: float, clock: tuple[float, float, float], hidden: Array
) -> Rhythm:
    """Return the rhythm of a period at its best phase, with its log evidence."""
    width, start, end = clock
    phase = at[0]
    for _ in range(3):
        number = np.round((at - phase) / period)
        near = np.abs(at - phase - number * period) < max(2 * width, 0.15 * period)
        if near.sum() < 3 or np.ptp(number[near]) == 0:
            break
        period, phase = np.polyfit(number[near], at[near], 1)
    first = np.ceil((start - phase) / period)
    slots = phase + period * np.arange(first, np.floor((end - phase) / period) + 1)
    distance = np.abs(slots[:, None] - at[None]).min(axis=1)
    hit = distance <= 1.5 * width
    excused = np.zeros(len(slots), bool)
    if len(hidden):
        excused = np.abs(slots[:, None] - hidden[None]).min(axis=1) <= 2 * width
    num_missed = int((~hit & ~excused).sum())
    num_extra = max(0, len(at) - int(hit.sum()))
    score = hit.sum() * np.log(0.95 / 3) + num_missed * np.log(0.05)
    score += num_extra * np.log(width / (end - start))
    choices = 2 * (period / width) * ((end - start) / width)
    return Rhythm(
        score=float(score - np.log(choices)),
        period=float(period),
        num_hits=int(hit.sum()),
        num_expected=len(slots),
    )
