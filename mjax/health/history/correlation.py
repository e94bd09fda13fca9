"""Find statistics of hosts that correlate with slow steps, against a null model.

Input: a table of hosts by samples, in time order, for each statistic (temperature,
clock, retries, ...) and for the step time in seconds. Output: for each statistic, the
mean over hosts of its rank correlation with the step time, the size of this mean under
the null model, and whether it is significant given the number of statistics tested.

Within each host, the slow part of both series (a straight line and a few cosines) is
removed and the rest replaced by ranks (Spearman), so that neither a hot host nor a slow
week is an association: if two series drift over the whole time, no null model can
distinguish chance from cause. The null model shifts the step times of all hosts
together, cyclically over the samples. This keeps the autocorrelation of each series and
the similarity of hosts, and breaks only the pairing of samples. All shifts are counted,
so p is exact under the null model, and at least one over the number of shifts (Phipson
and Smyth 2010, "Permutation p-values should never be zero", Stat. Appl. Genet. Mol.
Biol. 9, article 39). The false discovery rate over all statistics is bounded as in
Benjamini and Hochberg 1995, J. R. Stat. Soc. B 57, 289.

Correlation is not causation: a discovery is a hint where to look.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np

MIN_SAMPLES = 100
"""Minimum number of samples of each host. P then has steps of 0.01 or less, and the
slow part is not most of a series."""
MIN_KNOWN = 40
"""Minimum number of present samples of a host; a host with fewer is ignored. The slow
part has 12 parameters."""
FALSE_DISCOVERY_RATE = 0.05
"""Default false discovery rate. One in twenty of the named statistics may be chance."""
NUM_WAVES = 10
"""Number of slow cosines removed from a series. The value was picked from runs on
independent series of 500 samples: with none, random walks and AR(0.99) gave a false
discovery in 20 to 25% of the runs; with 10, in 3 to 8%."""
_NULL_PERCENTILE = 95.0
_EPSILON = 1e-12
"""Tolerance for equal correlations, whose terms the FFT adds in different orders. Not
measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Association:
    """Association of a statistic with the step time."""

    name: str
    rho: float
    """Mean over hosts of the rank correlation; above 0: steps are slower when the
    statistic is larger."""
    p: float
    """Fraction of shifts whose correlation has at least this magnitude."""
    q: float
    """Smallest false discovery rate at which the statistic is a discovery."""
    null_rho: float
    """95th percentile of the magnitude of the correlation under the null model."""
    is_discovery: bool
    """Whether q is at most the requested rate, and the magnitude of rho is above
    null_rho."""
    num_samples: int
    """Number of compared pairs of values, over all hosts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correlations:
    """All associations, and the number of tests."""

    associations: tuple[Association, ...]
    """Discoveries, then the others; each sorted by descending magnitude."""
    not_tested: Mapping[str, str]
    """Maps uninformative statistics to the reason."""
    num_tests: int
    num_shifts: int
    """Number of shifts of the null model; p is at least 1 / num_shifts."""
    rate: float
    """Requested false discovery rate."""
    problem: str = ""
    """Why no discovery is possible; empty if it is."""


def correlate(
    statistics: Mapping[str, np.ndarray],
    step_s: np.ndarray,
    *,
    rate: float = FALSE_DISCOVERY_RATE,
) -> Correlations:
    """Rank statistics by their association with the step time.

    Args:
      statistics: maps names to [hosts, samples]; NaN: no sample.
      step_s: [hosts, samples], of the same samples; seconds, NaN: no sample.
      rate: maximum expected fraction of false discoveries among the named statistics.
    Raises:
      ValueError: shapes differ, there are too few samples, a value is infinite, or the
        rate is not a fraction.
    """
    if not 0.0 < rate < 1.0:
        raise ValueError(f"--rate must be above 0 and below 1, got {rate:g}")
    target = _table("step_s", step_s, step_s.shape)
    if target.shape[1] < MIN_SAMPLES:
        raise ValueError(
            f"needs at least {MIN_SAMPLES} samples of each host, got {target.shape[1]}"
        )
    ranks = _ranks(target)
    if not np.any(ranks):
        raise ValueError("step_s is the same in all samples of each host")
    tested: dict[str, tuple[np.ndarray, int]] = {}
    not_tested: dict[str, str] = {}
    for name, values in statistics.items():
        table = _table(name, values, target.shape)
        own = _ranks(table)
        num = int(np.sum(~np.isnan(table) & ~np.isnan(target)))
        if not np.any(own):
            not_tested[name] = "it is the same in all samples of each host, or absent"
        elif num < MIN_SAMPLES:
            not_tested[name] = f"{num} pairs of values, {MIN_SAMPLES} are needed"
        else:
            tested[name] = _shifted(own, ranks), num
    return _judge(tested, not_tested, target.shape[1], rate)


def _table(name: str, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a statistic as float64, checked."""
    table = np.asarray(values, np.float64)
    if table.ndim != 2 or table.shape != shape or 0 in shape:
        raise ValueError(
            f"{name} must be [hosts, samples] as step_s, {list(shape)}, got "
            f"{list(table.shape)}"
        )
    if np.any(np.isinf(table)):
        raise ValueError(f"{name} has an infinite value; leave the sample out")
    return table


def _ranks(table: np.ndarray) -> np.ndarray:
    """Return ranks within each host, without the slow part, with mean 0 and norm 1.

    Absent samples are 0, which is the mean. All samples of a host are 0 if its values
    are too few, all equal, or only a slow part.
    """
    found = np.zeros_like(table)
    for row, values in zip(found, table, strict=True):
        known = np.flatnonzero(~np.isnan(values))
        if known.size < MIN_KNOWN or np.ptp(values[known]) == 0.0:
            continue
        basis = _slow_basis(values.size)[known]
        if known.size < values.size:  # no longer orthonormal
            basis = np.linalg.qr(basis)[0]
        kept = values[known] - basis @ (basis.T @ values[known])
        scale = np.max(np.abs(values[known]))
        if np.max(np.abs(kept)) <= 1e-9 * scale:  # only a slow part
            continue
        ranks = _average_ranks(np.round(kept / np.max(np.abs(kept)), 9))
        ranks -= ranks.mean()
        length = math.sqrt(float(ranks @ ranks))
        if length > 0.0:
            row[known] = ranks / length
    return found


@functools.cache
def _slow_basis(num: int) -> np.ndarray:
    """Return a straight line and the slowest cosines, [samples, 12], orthonormal."""
    times = np.arange(num)
    cosines = np.cos(np.pi * np.outer(times + 0.5, np.arange(NUM_WAVES + 1)) / num)
    return np.linalg.qr(np.column_stack([cosines, times / num]))[0]


def _average_ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 0; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2.0)[inverse]


def _shifted(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the mean correlation over hosts for the shifts 0, 1, ...: [samples]."""
    spectrum = np.conj(np.fft.rfft(one, axis=1)) * np.fft.rfft(other, axis=1)
    products = np.fft.irfft(spectrum, n=one.shape[1], axis=1)
    has_both = np.any(one, axis=1) & np.any(other, axis=1)
    return products[has_both].sum(axis=0) / max(1, int(has_both.sum()))


def _judge(
    tested: Mapping[str, tuple[np.ndarray, int]],
    not_tested: Mapping[str, str],
    num_shifts: int,
    rate: float,
) -> Correlations:
    """Compare statistics with their null models, corrected for the number of tests."""
    names = [*tested]
    sizes = {name: np.abs(tested[name][0]) for name in names}
    p = [float(np.mean(sizes[n] >= sizes[n][0] - _EPSILON)) for n in names]
    found = []
    for name, p_value, q in zip(names, p, benjamini_hochberg(p), strict=True):
        shifts, num = tested[name]
        null_rho = float(np.percentile(sizes[name][1:], _NULL_PERCENTILE))
        found.append(
            Association(
                name=name,
                rho=float(shifts[0]),
                p=p_value,
                q=q,
                null_rho=null_rho,
                is_discovery=q <= rate and abs(float(shifts[0])) > null_rho,
                num_samples=num,
            )
        )
    found.sort(key=lambda one: (not one.is_discovery, -abs(one.rho), one.name))
    return Correlations(
        associations=tuple(found),
        not_tested=not_tested,
        num_tests=len(names),
        num_shifts=num_shifts,
        rate=rate,
        problem=_problem(len(names), num_shifts, rate),
    )


def _problem(num_tests: int, num_shifts: int, rate: float) -> str:
    """Return why no discovery is possible with so few samples; empty if it is."""
    if num_tests and num_shifts < 1.0 / rate:
        return (
            f"{num_shifts} samples cannot show a p of {rate:g}: take at least "
            f"{math.ceil(1.0 / rate)}"
        )
    if num_shifts < num_tests / rate:
        return (
            f"{num_shifts} samples cannot show one statistic among {num_tests} at a "
            f"rate of {rate:g}: take {math.ceil(num_tests / rate)} samples, or fewer "
            "statistics"
        )
    return ""


def benjamini_hochberg(p: list[float]) -> list[float]:
    """Return, for each p, the smallest rate at which it is a discovery."""
    order = sorted(range(len(p)), key=lambda index: p[index])
    found, least = [1.0] * len(p), 1.0
    for place in range(len(p), 0, -1):
        index = order[place - 1]
        least = min(least, p[index] * len(p) / place)
        found[index] = least
    return found
