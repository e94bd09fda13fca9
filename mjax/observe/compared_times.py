"""Test whether the step times of two runs differ by more than noise.

Input: the records of the steps of two runs. Output: for each phase the median and 95th
percentile of both runs, and whether they differ.

Steps are autocorrelated: one slow minute makes many slow steps. A test that treats each
step as an independent sample would report false differences. So the steps are divided
into blocks of several autocorrelation times. Two rank tests (Mann and Whitney) compare
the runs: one uses the median of each block, the other its share of slow steps;
permutations of the blocks give p. Holm's correction covers all phases together. The
test cannot separate the effect of flags from effects that vary between runs but not
within one, such as the choice of hosts. To see those, run the same flags twice.

Means are tested in the same way, by the means of blocks. If an event repeats, such as a
save every ten steps, blocks are whole periods, so that each has equally many events.

Sources: Mann and Whitney 1947 (doi:10.1214/aoms/1177730491); Holm 1979 (Scandinavian
Journal of Statistics 6:65-70); the sum for the autocorrelation time is truncated where
two neighbours sum to zero or less (Geyer 1992, doi:10.1214/ss/1177011137); intervals
come from a block bootstrap (Kuensch 1989, doi:10.1214/aos/1176347265).
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from mjax.observe.records import Record
from mjax.observe.spans import SpanFile

ALPHA = 0.01
"""Probability that two equal runs appear to differ in some phase. Not measured."""
WARM_UP = 3
"""First steps of each start to leave out. The first steps fill caches."""
FEWEST_BLOCKS = 7
"""Minimum number of blocks. With fewer, no p could be below ALPHA after the correction
for 8 phases; two runs of 7 blocks have C(14, 7) = 3432 permutations."""
_MOST_BLOCKS = 50
"""Maximum number of blocks. More blocks only cost time, and longer blocks are closer to
independent."""
_TIMES = 4
"""Length of a block in autocorrelation times. Neighbouring blocks are then nearly
independent."""
_SHORTEST = 4
"""Minimum length of a block in steps."""
_PERMUTATIONS = 9999
_DRAWS = 1000
"""Bootstrap samples for an interval. More samples hardly change its ends."""
_SLOW = 0.95

type Steps = Float[np.ndarray, "_"]
type Verdict = Literal["slower", "faster", "within noise", "too few steps"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """One phase in two runs; times in seconds per step."""

    name: str
    median_a: float
    median_b: float
    p95_a: float
    p95_b: float
    p_median: float | None
    """p for the medians of blocks: probability that equal runs differ as much."""
    p_tail: float | None
    """p for the share of steps that are among the slowest 5% of both runs together."""
    block: int
    """Length of a block in steps."""
    median: Verdict
    tail: Verdict


def phases(record: Record) -> dict[str, Steps]:
    """Return the seconds of each phase by step, as means over ranks and devices.

    Phases that occur in at most half of the steps are left out, and so are the first
    `WARM_UP` steps of each start. If two starts ran a step, the later start counts.
    """
    by_step: dict[int, dict[str, list[float]]] = {}
    starts: dict[int, list[SpanFile]] = collections.defaultdict(list)
    for of in record.files:
        starts[of.header.generation].append(of)
    for number in sorted(starts):
        found = _of_start(starts[number])
        first = min(found, default=0)
        by_step = {step: value for step, value in by_step.items() if step < first}
        by_step |= {s: value for s, value in found.items() if s >= first + WARM_UP}
    names = collections.Counter(name for own in by_step.values() for name in own)
    ordered = sorted(by_step)
    series = {
        name: np.array(
            [np.mean(by_step[s][name]) for s in ordered if name in by_step[s]]
        )
        for name, num in names.items()
        if 2 * num > len(ordered)
    }
    rows = [s for s in sorted(record.rows) if s in by_step or not by_step]
    rows = rows if by_step else rows[WARM_UP:]
    wall = [record.rows[s].get("step_s") for s in rows]
    numbers = [float(x) for x in wall if isinstance(x, int | float)]
    if numbers:
        series = {"step_s": np.array(numbers), **series}
    return series


def _of_start(files: Sequence[SpanFile]) -> dict[int, dict[str, list[float]]]:
    """Return, by step and phase, the seconds of each rank or device."""
    found: dict[int, dict[str, list[float]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for of in files:
        for line in of.lines:
            if line.step < 1:
                continue
            sums: dict[tuple[str, str], int] = collections.defaultdict(int)
            for span in line.spans:
                if span.stream != "step":
                    sums[span.name, span.stream] += span.end_ns - span.start_ns
            for (name, _), spent_ns in sums.items():
                found[line.step][name].append(spent_ns / 1e9)
    return found


def compare(a: Mapping[str, Steps], b: Mapping[str, Steps]) -> list[Difference]:
    """Compare the phases that both runs have, in the order of the first run."""
    rng = np.random.default_rng(0)
    names = [name for name in a if name in b]
    tested = [_test(a[name], b[name], rng) for name in names]
    values = [p for found in tested for p in (found[1], found[2]) if p is not None]
    limit = significant(values)
    differences = []
    for name, (block, p_median, p_tail) in zip(names, tested, strict=True):
        own_a, own_b = a[name], b[name]
        medians = float(np.median(own_a)), float(np.median(own_b))
        p95 = [float(np.quantile(own, _SLOW)) for own in (own_a, own_b)]
        differences.append(
            Difference(
                name=name,
                median_a=medians[0],
                median_b=medians[1],
                p95_a=p95[0],
                p95_b=p95[1],
                p_median=p_median,
                p_tail=p_tail,
                block=block,
                median=_verdict(p_median, limit, medians[1] - medians[0]),
                tail=_verdict(p_tail, limit, p95[1] - p95[0]),
            )
        )
    return differences


def _verdict(p: float | None, limit: float, more: float) -> Verdict:
    if p is None:
        return "too few steps"
    if p > limit:
        return "within noise"
    return "slower" if more > 0 else "faster"


def significant(values: Sequence[float]) -> float:
    """Return the largest significant p after Holm's correction; -1 if there is none."""
    limit = -1.0
    for rank, p in enumerate(sorted(values)):
        if p > ALPHA / (len(values) - rank):
            break
        limit = p
    return limit


def _test(
    a: Steps, b: Steps, rng: np.random.Generator
) -> tuple[int, float | None, float | None]:
    """Return the length of a block, and the p of the medians and of the slow steps.

    Both p are None if there are too few blocks.
    """
    block = block_length(a, b)
    if min(len(a), len(b)) // block < FEWEST_BLOCKS:
        return block, None, None
    slow = float(np.quantile(np.concatenate([a, b]), _SLOW))
    blocks_a, blocks_b = _blocks(a, block), _blocks(b, block)
    p_median = _rank_sum(np.median(blocks_a, 1), np.median(blocks_b, 1), rng)
    p_tail = _rank_sum((blocks_a > slow).mean(1), (blocks_b > slow).mean(1), rng)
    return block, p_median, p_tail


def means_differ(a: Steps, b: Steps, block: int) -> float | None:
    """Test whether the block means of two runs differ.

    Args:
      a: seconds of the steps of one run.
      b: seconds of the steps of the other run.
      block: length of a block in steps, see `block_length`.
    Returns:
      p: probability that two equal runs differ as much; None: too few blocks.
    """
    if min(len(a), len(b)) // block < FEWEST_BLOCKS:
        return None
    rng = np.random.default_rng(0)
    return _rank_sum(_blocks(a, block).mean(1), _blocks(b, block).mean(1), rng)


def block_length(a: Steps, b: Steps, *, period: int = 1) -> int:
    """Return the block length, in steps, at which blocks are nearly independent.

    Args:
      a: seconds of the steps of one run.
      b: seconds of the steps of the other run.
      period: steps between repetitions of an event; blocks are whole periods.
    """
    own = [_TIMES * autocorrelation_time(x) for x in (a, b)]
    wanted = max(_SHORTEST, *own, max(len(a), len(b)) / _MOST_BLOCKS)
    return int(np.ceil(wanted / period)) * period


def interval(
    x: Steps, statistic: Callable[..., np.ndarray | np.floating]
) -> tuple[float, float] | None:
    """Return the 95% interval of a statistic of the steps, by a block bootstrap.

    Return None if there are too few blocks.

    Args:
      x: seconds of each step.
      statistic: function such as `np.median` that takes `axis`.
    """
    block = block_length(x, x)
    if len(x) // block < FEWEST_BLOCKS:
        return None
    drawn = statistic(_drawn(x, block, np.random.default_rng(0)), axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def ratio_interval(a: Steps, b: Steps, block: int) -> tuple[float, float] | None:
    """Return the 95% interval of mean(a) / mean(b); None as for `interval`."""
    if min(len(a), len(b)) // block < FEWEST_BLOCKS:
        return None
    rng = np.random.default_rng(0)
    ratio = _drawn(a, block, rng).mean(1) / _drawn(b, block, rng).mean(1)
    low, high = np.quantile(ratio, [0.025, 0.975])
    return float(low), float(high)


def _drawn(
    x: Steps, block: int, rng: np.random.Generator
) -> Float[np.ndarray, "draws steps"]:
    """Resample a series by blocks, with replacement."""
    blocks = _blocks(x, min(block, len(x)))
    chosen = rng.integers(0, len(blocks), (_DRAWS, len(blocks)))
    return blocks[chosen].reshape(_DRAWS, -1)


def _blocks(x: Steps, block: int) -> Float[np.ndarray, "blocks block"]:
    num = len(x) // block
    return x[len(x) - num * block :].reshape(num, block)


def autocorrelation_time(x: Steps) -> float:
    """Return the autocorrelation time of a series in steps; 1 for white noise.

    It is computed from the ranks of the values, which limits the effect of outliers.
    """
    ranks = _ranks(x) - (len(x) + 1) / 2
    power = float(ranks @ ranks)
    if len(x) < 4 or power == 0:
        return 1.0
    size = 2 ** int(np.ceil(np.log2(2 * len(x))))
    spectrum = np.abs(np.fft.rfft(ranks, size)) ** 2
    correlation = np.fft.irfft(spectrum, size)[: len(x) // 2] / power
    total = 0.0
    for lag in range(1, len(correlation) - 1, 2):
        pair = float(correlation[lag] + correlation[lag + 1])
        if pair <= 0:
            break
        total += pair
    return max(1.0, 1 + 2 * total)


def _ranks(x: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
    """Return ranks from 1; equal values share their mean rank."""
    _, place, counts = np.unique(x, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[place.reshape(-1)].astype(np.float64)


def _rank_sum(
    a: Float[np.ndarray, "n"], b: Float[np.ndarray, "m"], rng: np.random.Generator
) -> float:
    """Return p: the share of permutations that differ at least as much as a and b.

    The difference is the distance of the rank sum of a from its expected value.
    """
    ranks = _ranks(np.concatenate([a, b]))
    expected = len(a) * (len(ranks) + 1) / 2
    seen = abs(float(ranks[: len(a)].sum()) - expected)
    drawn = rng.permuted(np.tile(ranks, (_PERMUTATIONS, 1)), axis=1)
    sums = np.abs(drawn[:, : len(a)].sum(axis=1) - expected)
    return (1 + int((sums >= seen - 1e-9).sum())) / (1 + _PERMUTATIONS)


def rank_correlation(x: Steps, y: Steps) -> float:
    """Return Spearman's rank correlation; 0 if a series is constant."""
    own, other = (_ranks(values) - (len(values) + 1) / 2 for values in (x, y))
    size = float(np.sqrt((own @ own) * (other @ other)))
    return float(own @ other) / size if size else 0.0
