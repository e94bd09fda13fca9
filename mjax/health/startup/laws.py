"""Find how a duration grows with the number of processes, if the data show it.

Input: sizes and one duration for each. Output: a law or none, and a range for any
other size. All functions are pure.

A law is a curve with two parameters: the value at the largest size, and the share of
this value that grows with the size. The curve is y(N) = value * (1 - share + share *
g(N) / g(largest)), with share from 0 to 1 and g(N) = 1, log N, N or N squared. Share 0
is the null model, a constant. Residuals are differences of log y, because timing errors
are proportional to the duration. Each size has one duration, the median of its repeats.
Repeats do not count as separate data: they make the median precise, but only different
sizes show the form of the curve.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

CONSTANT, LOGARITHMIC, LINEAR, QUADRATIC = (
    "constant",
    "logarithmic",
    "linear",
    "quadratic",
)
LAWS = (CONSTANT, LOGARITHMIC, LINEAR, QUADRATIC)
LEAST_SIZES = 5
"""Minimum number of sizes for which the criterion is defined, see `_aicc`."""
LEAD = 4.0
"""A growing law is named only if its criterion is lower than the criterion of every
other law, by at least this margin. The evidence for the named law is then at least
exp(LEAD / 2) = 7.4 times the evidence for any other law (evidence ratio of Burnham,
Anderson and Huyvaert 2011, doi:10.1007/s00265-010-1029-6)."""
FLAT = 1.25
"""A duration counts as constant if it grows at most by this factor from the smallest to
the largest size. Such growth does not matter for starting 10,000 processes."""
CONFIDENCE = 0.95
"""Confidence of the joint region of value and share. It is the usual confidence."""
LEAST_NOISE = 0.02
"""Standard deviation of log y below which all fits count as equally good. Medians of a
few starts on one host vary by at least this much from one measurement to the next."""
LEAST_S = 1e-6
"""Shorter durations are replaced by this one. The clocks tick in nanoseconds, and
reading them takes a microsecond."""
_LOGITS = np.linspace(-25.0, 15.0, 4001)
_SHARES = np.concatenate([[0.0], 1.0 / (1.0 + np.exp(-_LOGITS)), [1.0]])
"""Shares to try. The odds, share / (1 - share), grow by 1 percent from one share to the
next. The smallest share above 0 is so small that no share below it matters at 10,000
processes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """A duration at a size that was not measured, with its bounds."""

    value_s: float | None
    """Duration according to the law; None without a law."""
    low_s: float
    high_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Curves:
    """The curves of one law that the data do not exclude."""

    law: str
    largest: int
    shares: np.ndarray
    low: np.ndarray
    """Lowest value at the largest size, for each share."""
    high: np.ndarray

    def at(self, size: int) -> tuple[float, float]:
        """Return the lowest and the highest value of the curves at a size."""
        shape = _shape(self.law, [size], self.largest, self.shares)[:, 0]
        return float((self.low * shape).min()), float((self.high * shape).max())

    def most_growth(self, smallest: int) -> float:
        """Return the largest factor by which a curve grows from size `smallest` on."""
        shape = _shape(self.law, [smallest], self.largest, self.shares)[:, 0]
        return float(1 / max(shape.min(), 1e-300))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Growth:
    """How a duration grows with the number of processes."""

    law: str | None
    """Name of the law; None: the data do not decide."""
    candidates: tuple[str, ...]
    """The laws that fit about as well as the best one; all laws if there are too few
    sizes."""
    criteria: Mapping[str, float]
    """Criterion of each law; the lowest is the best. Empty if there are too few
    sizes."""
    value_s: float
    """Value at the largest size according to the best law."""
    share: float
    """Share of `value_s` that grows with the size."""
    largest: int
    curves: tuple[_Curves, ...]

    def at(self, size: int, *, most: str = QUADRATIC) -> Range:
        """Return the duration at another size.

        The range covers the curves of all laws up to `most`, for every pair of value
        and share in the joint confidence region.

        Args:
          size: number of processes.
          most: the steepest law that is possible. This is known from the kind of work,
            not from these data. If `self.law` is steeper, it replaces `most`.
        """
        last = max(LAWS.index(most), LAWS.index(self.law or CONSTANT))
        ranges = [c.at(size) for c in self.curves if c.law in LAWS[: last + 1]]
        value_s = None
        if self.law is not None:
            shape = _shape(self.law, [size], self.largest, np.array([self.share]))
            value_s = self.value_s * float(shape[0, 0])
        low_s = min((low for low, _ in ranges), default=0.0)
        high_s = max((high for _, high in ranges), default=math.inf)
        return Range(value_s=value_s, low_s=low_s, high_s=high_s)

    def describe(self) -> str:
        """Return the name of the law, or the laws that the data do not exclude."""
        if self.law is not None:
            return self.law
        if not self.criteria:
            return f"undetermined (fewer than {LEAST_SIZES} sizes)"
        if len(self.candidates) == len(LAWS):
            return "undetermined"
        return f"undetermined ({' or '.join(self.candidates)})"


def growth(sizes: Sequence[int], seconds: Sequence[float]) -> Growth:
    """Return the law by which a duration grows with the number of processes.

    Args:
      sizes: numbers of processes, distinct, at least 2 each.
      seconds: the duration at each size.
    Raises:
      ValueError: a size is too small or given twice, or a duration is not a number.
    """
    _check(sizes, seconds)
    largest, count = max(sizes), len(sizes)
    logs = np.log(np.maximum(np.asarray(seconds, dtype=np.float64), LEAST_S))
    if count < LEAST_SIZES:
        return Growth(
            law=None,
            candidates=LAWS,
            criteria={},
            value_s=float(np.exp(logs.mean())),
            share=0.0,
            largest=largest,
            curves=(),
        )
    least = count * LEAST_NOISE**2
    fits = {law: _fit(law, sizes, largest, logs) for law in LAWS}
    squares = {law: max(least, float(fits[law][2].min())) for law in LAWS}
    # The joint confidence region of two parameters follows from the distribution
    # F(2, n - 2), whose quantiles have a closed form.
    limit = min(squares.values()) * (1 - CONFIDENCE) ** (-2 / (count - 2))
    curves = tuple(_inside(law, fits[law], limit, largest, count) for law in LAWS)
    criteria = {law: _aicc(squares[law], count, law) for law in LAWS}
    most = max(c.most_growth(min(sizes)) for c in curves if len(c.shares))
    law, candidates = _decide(criteria, most)
    best = law or min(criteria, key=lambda name: criteria[name])
    shares, levels, sums = fits[best]
    place = int(sums.argmin())
    return Growth(
        law=law,
        candidates=candidates,
        criteria=criteria,
        value_s=float(np.exp(levels[place])),
        share=float(shares[place]),
        largest=largest,
        curves=tuple(c for c in curves if len(c.shares)),
    )


def _check(sizes: Sequence[int], seconds: Sequence[float]) -> None:
    if len(sizes) != len(seconds) or not sizes:
        raise ValueError(f"{len(sizes)} sizes and {len(seconds)} durations do not pair")
    if min(sizes) < 2 or len({*sizes}) != len(sizes):
        raise ValueError(f"sizes must be distinct and at least 2, got {[*sizes]}")
    if not all(math.isfinite(s) and s >= 0 for s in seconds):
        raise ValueError(f"durations must be numbers from 0 on, got {[*seconds]}")


def _shape(
    law: str, sizes: Sequence[int], largest: int, shares: np.ndarray
) -> np.ndarray:
    """Return the curves of a law, relative to the largest size: [shares, sizes]."""
    ratio = np.asarray(sizes, dtype=np.float64) / largest
    if law == CONSTANT:
        grown = np.ones_like(ratio)
    elif law == LOGARITHMIC:
        grown = 1 + np.log(ratio) / math.log(largest)
    else:
        grown = ratio if law == LINEAR else ratio**2
    return 1 - shares[:, None] + shares[:, None] * grown


def _fit(
    law: str, sizes: Sequence[int], largest: int, logs: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit the value at the largest size, separately for each share in the grid.

    Returns:
      the shares; the log of the fitted value for each share; and the sum of squared
      residuals for each share.
    """
    shares = _SHARES if law != CONSTANT else np.zeros(1)
    off = logs - np.log(_shape(law, sizes, largest, shares))
    levels = off.mean(axis=1)
    return shares, levels, ((off - levels[:, None]) ** 2).sum(axis=1)


def _inside(
    law: str,
    fit: tuple[np.ndarray, np.ndarray, np.ndarray],
    limit: float,
    largest: int,
    count: int,
) -> _Curves:
    shares, levels, sums = fit
    left = limit - sums
    kept = left >= 0
    spread = np.sqrt(left[kept] / count)
    return _Curves(
        law=law,
        largest=largest,
        shares=shares[kept],
        low=np.exp(levels[kept] - spread),
        high=np.exp(levels[kept] + spread),
    )


def _aicc(squares: float, count: int, law: str) -> float:
    """Return Akaike's criterion for few data (AICc), for least squares.

    n ln(S / n) + 2k + 2k(k + 1) / (n - k - 1), where S is the sum of squared residuals,
    n the number of sizes, and k the number of parameters, including the variance.
    Source: Hurvich and Tsai 1989, Biometrika 76(2), pages 297-307; Burnham, Anderson
    and Huyvaert 2011, doi:10.1007/s00265-010-1029-6.
    """
    k = 2 if law == CONSTANT else 3
    small = 2 * k * (k + 1) / (count - k - 1)
    return count * math.log(squares / count) + 2 * k + small


def _decide(
    criteria: Mapping[str, float], most_growth: float
) -> tuple[str | None, tuple[str, ...]]:
    """Return the law or None, and all laws that fit about as well as the best."""
    growing = {law: value for law, value in criteria.items() if law != CONSTANT}
    best = min(growing.values())
    if criteria[CONSTANT] - best < LEAD:
        if most_growth <= FLAT:
            return CONSTANT, (CONSTANT,)
        least = min(criteria.values())
        close = tuple(law for law in LAWS if criteria[law] - least < LEAD)
        return None, close if len(close) > 1 else LAWS
    close = tuple(law for law in growing if growing[law] - best < LEAD)
    return (close[0] if len(close) == 1 else None), close
