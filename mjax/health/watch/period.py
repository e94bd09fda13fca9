"""Period of the traffic of a port, and its significance.

Input: increments of the sent bytes over stretches of time, evenly spaced or not, and
optionally the step times. Output: a period, the fraction of the variance that it
explains, and the probability that noise is this periodic.

    rate_i - phi * rate_(i-1) = noise                          null model: AR(1)
    R^2 = sum of squares that the sines of all segments and harmonics explain / total
    p = P(Beta(b, a) < 1 - R^2),  a = sines, b = (samples - segments - 2 a) / 2

- Sines are fitted with a floating mean, which tolerates gaps and late samples: the
  generalised Lomb-Scargle periodogram of Zechmeister and Kuerster 2009, A&A 496, 577.
- Traffic without a period is red noise: it changes slowly. So AR(1) is fitted and
  removed first. The residual is white under the null model, and p is exact for Gaussian
  noise and orthogonal sines. p is multiplied by the number of periods tried.
- Steps vary, so phases drift: the power of segments is added, ignoring phases.
- A frequency above half the sampling rate appears at another one, its alias, which
  `fold` returns. A period that was found without knowing the step comes with its
  aliases.

Source of the idea: traffic of a training job repeats with its steps; MegaScale,
arXiv:2402.15627, on the data that its monitoring collects.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float

type Array = np.ndarray

HARMONICS = 3
"""Number of harmonics of a period. A step has a few phases."""
PERIODS = 24.0
"""Number of steps in a segment. Steps that vary by 3% lose their phase after 50
steps."""
SEGMENT_SAMPLES = (64, 256)
"""Numbers of samples in a segment to try if the step is unknown. The first is short
enough to keep phases, the second long enough for steps of 20 s."""
MOST_SEGMENT_SAMPLES = 256
LEAST_SAMPLES = 16
"""Minimum number of samples in a segment. A fit of 3 harmonics leaves 9 degrees of
freedom."""
TOLERANCE = 0.04
"""Relative distance from the step time within which a period is searched. It is the
resolution of `PERIODS`."""
LEAST_ATTENUATION = 0.05
"""Minimum attenuation factor of a sine by the averaging of a sample; below it, only
noise would be visible. Not measured."""
OVERSAMPLING = 8
"""Oversampling of frequencies, relative to the resolution 1 / segment. Less than 5% of
the power of the third harmonic falls between two frequencies."""
MOST_PHI = 0.98
"""Maximum phi of AR(1). At 1, nothing would be left of a slow period."""
MOST_HARMONIC = 8
"""Highest harmonic of a step that may be the strongest line. Forward, backward and
gradients are a few pulses."""
NEARLY = 0.98
"""Periods that explain at least this fraction of the sum of squares that the best
period explains are equally good; the period closest to the step is taken. At half the
sampling rate a frequency and its mirror image look the same."""
LONGEST = 1.5
"""Multiple of the median step above which a step is ignored. Not measured."""
CHANGED = 0.06
"""Relative difference of the steps in two halves of a segment that means a changed
step. Tuned: steps vary by 3%, a slow host or a larger batch makes them 5 to 30%
longer."""
JOINED_S = 1e-6
"""Maximum gap in seconds between successive increments. It covers the rounding of a
clock."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Rates of one port in N increments, in time order."""

    start_s: Float[np.ndarray, "N"]
    end_s: Float[np.ndarray, "N"]
    rate: Float[np.ndarray, "N"]
    """[N], in any unit."""

    def __len__(self) -> int:
        return len(self.rate)

    @property
    def sample_s(self) -> float:
        """Median time between samples."""
        return float(np.median(self.end_s - self.start_s))

    @property
    def length_s(self) -> float:
        """Seconds from the first start to the last end."""
        return float(self.end_s[-1] - self.start_s[0])

    def cut(self, kept: Array) -> "Traffic":
        """Return the increments selected by a mask or by indices."""
        return Traffic(
            start_s=self.start_s[kept], end_s=self.end_s[kept], rate=self.rate[kept]
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """T steps as reported by the trainer, in time order."""

    end_s: Float[np.ndarray, "T"]
    step_s: Float[np.ndarray, "T"]

    def local(self, segment: Traffic, usual_s: float) -> float:
        """Return the mean step in a segment; usual_s if none was reported.

        Steps longer than `LONGEST` times the median are ignored: they contain a save.
        """
        edges_s = [segment.start_s[0], segment.end_s[-1]]
        first, last = np.searchsorted(self.end_s, edges_s)
        if last <= first:
            return usual_s
        inside_s = self.step_s[first:last]
        return float(inside_s[inside_s <= LONGEST * np.median(inside_s)].mean())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Period:
    """The best period of a stretch of traffic."""

    period_s: float
    strength: float
    """Periodic part of the variance of the rate, beyond chance; 0 to 1."""
    log10_false_alarm: float
    """Log10 of the probability that noise is this periodic; at most 0."""
    aliased: bool
    """Whether the period is shorter than 2 samples, so that it was seen at its
    alias."""
    aliases_s: tuple[float, ...]
    """Other periods that would look the same; empty if the step identifies the
    period."""


def fold(frequency: Array | float, rate_hz: float) -> Array:
    """Return the alias, at most rate_hz / 2, of a frequency sampled at rate_hz."""
    return np.abs(frequency - rate_hz * np.round(np.asarray(frequency) / rate_hz))


def find_step(parts: Sequence[Traffic], steps: Steps) -> Period | None:
    """Return the period of the traffic near the step time; None if not observable.

    Each segment is compared with the steps reported in it, so temporarily longer steps
    do not look like a lost period.

    Args:
      parts: stretches of traffic during which steps went on; phases do not continue
        across stretches.
      steps: as reported by the trainer.
    """
    samples_s = [part.sample_s for part in parts if len(part) >= 2]
    if not samples_s or not len(steps.step_s):
        return None
    rate_hz = 1 / float(np.median(samples_s))
    step_s = float(np.median(steps.step_s))
    most = min(MOST_SEGMENT_SAMPLES, int(PERIODS * step_s * rate_hz))
    whole = _segments(parts, max(most, 4 * LEAST_SAMPLES))
    segments = [one for each in whole for one in _by_step(each, steps)]
    if not segments:
        return None
    length_s = float(np.median([one.length_s for one in segments]))
    seen = _seen(1 / step_s, rate_hz, length_s)
    if not seen:
        return None
    spread = max(1, round(TOLERANCE * OVERSAMPLING * length_s / step_s))
    trial = 1 + np.linspace(-TOLERANCE, TOLERANCE, 2 * spread + 1)
    comb = np.array(seen)[:, None] * trial
    local = [steps.local(segment, step_s) for segment in segments]
    tables = [_apart(fold(comb / one, rate_hz), rate_hz, length_s) for one in local]
    fit = fit_sines(segments, tables)
    near = fit.white >= NEARLY * fit.white.max()
    best = int(np.argmin(np.where(near, np.abs(trial - 1), np.inf)))
    log10_p = fit.log10_chance(best) + math.log10(len(trial))
    return Period(
        period_s=step_s / float(trial[best]),
        strength=fit.strength(best),
        log10_false_alarm=min(0.0, log10_p),
        aliased=step_s * rate_hz < 2,
        aliases_s=(),
    )


def find_period(parts: Sequence[Traffic]) -> Period | None:
    """Return the most significant period, without knowledge of the step.

    The period is only a candidate: four shorter ones in `aliases_s` would look the
    same, and a strong harmonic may hide its fundamental.

    Args:
      parts: stretches of traffic; phases do not continue across stretches.
    """
    samples_s = [part.sample_s for part in parts if len(part) >= 2]
    found: list[Period] = []
    tried = 0
    for samples in SEGMENT_SAMPLES if samples_s else ():
        segments = list(_segments(parts, samples))
        if not segments:
            continue
        rate_hz = 1 / float(np.median(samples_s))
        length_s = float(np.median([one.length_s for one in segments]))
        last_hz = rate_hz / 2 - 1 / length_s
        unit_hz = 1 / (OVERSAMPLING * length_s)
        # Whole multiples of one unit, so that harmonics are on the grid too.
        grid = np.arange(3 * OVERSAMPLING, max(1, int(last_hz / unit_hz)))
        if not len(grid):
            continue
        single = fit_sines(segments, [grid[None] * unit_hz] * len(segments))
        for harmonics in range(1, HARMONICS + 1):
            kept = grid[harmonics * grid <= grid[-1]]
            if not len(kept):
                continue
            tried += len(kept)
            index = np.arange(1, harmonics + 1)[:, None] * kept - grid[0]
            fit = single.combined(index)
            best = int(np.argmax(fit.white))
            hz = float(kept[best]) * unit_hz
            found.append(
                Period(
                    period_s=1 / hz,
                    strength=fit.strength(best),
                    log10_false_alarm=fit.log10_chance(best),
                    aliased=False,
                    aliases_s=_aliases(hz, rate_hz),
                )
            )
    if not found:
        return None
    best = min(found, key=lambda each: each.log10_false_alarm)
    log10_p = min(0.0, best.log10_false_alarm + math.log10(tried))
    return dataclasses.replace(best, log10_false_alarm=log10_p)


def explains(step_s: float, period: Period, rate_hz: float, length_s: float) -> bool:
    """Return whether a period may be a harmonic of a step, or an alias of a harmonic.

    Args:
      step_s: duration of a step in seconds, as reported by the trainer.
      period: from `find_period`.
      rate_hz: samples per second.
      length_s: length of a segment, which limits the resolution.
    """
    at_hz = fold(np.arange(1, MOST_HARMONIC + 1) / step_s, rate_hz)
    near_hz = np.maximum(1.5 / length_s, TOLERANCE / period.period_s)
    return bool((np.abs(at_hz - 1 / period.period_s) < near_hz).any())


def _aliases(hz: float, rate_hz: float) -> tuple[float, ...]:
    """Return the four longest other periods whose alias is the frequency hz."""
    return tuple(1 / (k * rate_hz + sign * hz) for k in (1, 2) for sign in (-1, 1))


def _seen(step_hz: float, rate_hz: float, length_s: float) -> list[int]:
    """Return the harmonics of a step that samples can distinguish."""
    hz = np.arange(1, HARMONICS + 1) * step_hz
    strong = np.abs(np.sinc(hz / rate_hz)) > LEAST_ATTENUATION
    at_hz = np.where(strong, fold(hz, rate_hz), 0.0)[:, None]
    return (np.flatnonzero(_apart(at_hz, rate_hz, length_s)[:, 0]) + 1).tolist()


def _apart(table: Array, rate_hz: float, length_s: float) -> Array:
    """Return frequencies, [H, F], with 0 for those that a segment cannot resolve.

    These are too close to 0, to half the sampling rate, or to a lower harmonic of the
    same period. A sine fitted twice would be counted twice.
    """
    out = np.where(
        (table > 1.5 / length_s) & (table < rate_hz / 2 - 0.5 / length_s), table, 0.0
    )
    for row in range(1, len(out)):
        near = np.abs(out[:row] - out[row]) < 1.5 / length_s
        out[row] = np.where((near & (out[:row] > 0)).any(0), 0.0, out[row])
    return out


def _segments(parts: Sequence[Traffic], most: int) -> Iterator[Traffic]:
    """Yield equal segments of each stretch, of about `most` samples."""
    for part in parts:
        pieces = max(1, round(len(part) / most))
        for index in np.array_split(np.arange(len(part)), pieces):
            if len(index) >= LEAST_SAMPLES:
                yield part.cut(index)


def _by_step(segment: Traffic, steps: Steps) -> list[Traffic]:
    """Halve a segment in which the step changed, until each part has one step time."""
    middle = len(segment) // 2
    half = [
        segment.cut(np.arange(middle)),
        segment.cut(np.arange(middle, len(segment))),
    ]
    if middle < LEAST_SAMPLES:
        return [segment]
    first_s, second_s = (steps.local(one, 0.0) for one in half)
    if min(first_s, second_s) <= 0 or abs(first_s / second_s - 1) < CHANGED:
        return [segment]
    return [one for each in half for one in _by_step(each, steps)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """Sums of squares that sines explain, for F periods of equally many harmonics."""

    raw: Array
    """[F], explained sum of squares of the rates, over all segments."""
    raw_total: float
    """Sum of squares of the rates."""
    white: Array
    """[F], as `raw`, after AR(1) has been removed."""
    white_total: float
    """As `raw_total`, after AR(1) has been removed."""
    samples: int
    """Number of samples in all segments."""
    segments: int
    harmonics: int
    """Number of sines fitted to a segment for each period."""

    def combined(self, index: Array) -> "Fit":
        """Return a fit of periods with H harmonics, from a fit of single sines.

        Args:
          index: [H, F], index in this fit of each harmonic of each period.
        """
        return dataclasses.replace(
            self,
            raw=self.raw[index].sum(0),
            white=self.white[index].sum(0),
            harmonics=len(index),
        )

    def log10_chance(self, index: int) -> float:
        """Return log10 of the probability that noise has a period this significant."""
        if not self.white_total > 0:
            return 0.0
        part = min(1.0, float(self.white[index]) / self.white_total)
        sines = self.harmonics * self.segments
        return log10_chance(part, sines, (self.samples - self.segments) / 2 - sines)

    def strength(self, index: int) -> float:
        """Return the part of the variance that a period explains beyond chance."""
        given = self.samples - self.segments
        left = given - 2 * self.harmonics * self.segments
        if not self.raw_total > 0 or left <= 0:
            return 0.0
        rest = 1 - min(1.0, float(self.raw[index]) / self.raw_total)
        return max(0.0, 1 - rest * given / left)


def fit_sines(segments: Sequence[Traffic], tables: Sequence[Array]) -> Fit:
    """Fit sines to each segment.

    Args:
      segments: segments of traffic.
      tables: one array [H, F] for each segment: frequencies of H harmonics of F
        periods.
    """
    phi = _phi(segments)
    shape = tables[0].shape
    raw, white = np.zeros(shape[1]), np.zeros(shape[1])
    raw_total = white_total = 0.0
    samples = num = 0
    for segment, table in zip(segments, tables, strict=True):
        middle_s = (segment.start_s + segment.end_s) / 2
        middle_s = middle_s - middle_s[0]
        rate = segment.rate - segment.rate.mean()
        joined = segment.start_s[1:] <= segment.end_s[:-1] + JOINED_S
        left = (rate[1:] - phi * rate[:-1])[joined]
        if len(left) < LEAST_SAMPLES // 2:
            continue
        left = left - left.mean()
        frequencies = table.ravel()
        raw += _explained(middle_s, rate, frequencies).reshape(shape).sum(0)
        late_s = middle_s[1:][joined]
        white += _explained(late_s, left, frequencies).reshape(shape).sum(0)
        raw_total += float(rate @ rate)
        white_total += float(left @ left)
        samples += len(left)
        num += 1
    return Fit(
        raw=raw,
        raw_total=raw_total,
        white=white,
        white_total=white_total,
        samples=samples,
        segments=num,
        harmonics=shape[0],
    )


def _phi(segments: Sequence[Traffic]) -> float:
    """Return phi of AR(1), the correlation of a rate with the previous one."""
    product = square = 0.0
    for segment in segments:
        rate = segment.rate - segment.rate.mean()
        joined = segment.start_s[1:] <= segment.end_s[:-1] + JOINED_S
        product += float((rate[1:] * rate[:-1])[joined].sum())
        square += float((rate[:-1] ** 2)[joined].sum())
    return min(MOST_PHI, max(0.0, product / square)) if square > 0 else 0.0


def _explained(time_s: Array, values: Array, frequencies: Array) -> Array:
    """Return the sum of squares that a sine of each frequency explains, [F]."""
    angle = 2 * np.pi * frequencies[:, None] * time_s
    cos, sin = np.cos(angle), np.sin(angle)
    cos -= cos.mean(1, keepdims=True)
    sin -= sin.mean(1, keepdims=True)
    cc, ss, cs = (cos**2).sum(1), (sin**2).sum(1), (cos * sin).sum(1)
    yc, ys = cos @ values, sin @ values
    determinant = cc * ss - cs**2
    sound = determinant > 1e-6 * (cc + ss) ** 2
    power = yc**2 * ss + ys**2 * cc - 2 * yc * ys * cs
    return np.where(sound, power / np.where(sound, determinant, 1.0), 0.0)


def log10_chance(part: float, sines: int, free: float) -> float:
    """Return log10 of the probability that sines explain this part of white noise.

    The part explained by 2 * sines regressors is Beta(sines, free); since sines is an
    integer, its tail is a finite sum: x^b * sum over j < a of C(b + j - 1, j) (1 - x)^j
    with x = 1 - part. Source: NIST Digital Library of Mathematical Functions, 8.17.

    Args:
      part: explained fraction of the sum of squares.
      sines: a, the number of sines over all segments.
      free: b, half of the remaining degrees of freedom.
    """
    if free <= 0 or part <= 0:
        return 0.0
    left = max(1 - part, 1e-300)
    terms = [
        math.lgamma(free + j)
        - math.lgamma(free)
        - math.lgamma(j + 1)
        + (j * math.log(part) if j else 0.0)
        for j in range(sines)
    ]
    most = max(terms)
    total = most + math.log(sum(math.exp(term - most) for term in terms))
    return min(0.0, (free * math.log(left) + total) / math.log(10))
