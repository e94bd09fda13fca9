"""Detect the load of a neighbour: another job shares a link, and steps become longer.

Input: increments of counters, bursts of windows, times of steps. Output: the span of
time that the load of a neighbour explains best, and its log-likelihood ratio to no
load.

Three signs coincide only in such a span: congestion, slower bursts, and longer steps.
Each alone has healthy causes: a job that leaves enough bandwidth, pulses of contention,
a slow host or a larger batch. So for every span, the log-likelihood ratios of "a
neighbour" to "a healthy cause, or chance" are summed over the three signs, and the best
span is kept. A sign that was not observed adds 0. A span that one of the signs
contradicts is not reported, however strong the other signs are.
Source: bursts of jobs that share a link collide, and ECN marks rise; CASSINI,
arXiv:2308.00852.
"""

import dataclasses
from collections import deque

import numpy as np

from mjax.health.watch.bursts import Bursts
from mjax.health.watch.congestion import Congestion
from mjax.health.watch.counters import Increment
from mjax.health.watch.explain import OFFSETS, density, nothing, student
from mjax.health.watch.samples import Detection, Port, Step
from mjax.health.watch.thresholds import ExplanationThresholds, Thresholds

type Array = np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The span that a neighbour explains best. Gains are log-likelihood ratios."""

    span_s: tuple[float, float]
    """Start and end."""
    bursts_gain: float
    congestion_gain: float
    steps_gain: float
    congestion_ratio: float
    """Congestion in the span, relative to the congestion outside."""
    slower_part: float
    """Relative increase of the step time in the span."""

    @property
    def gain(self) -> float:
        """Gain of all observations, relative to no neighbour."""
        return self.bursts_gain + self.congestion_gain + self.steps_gain

    @property
    def weakest_gain(self) -> float:
        """Smallest gain of the three signs."""
        return min(self.bursts_gain, self.congestion_gain, self.steps_gain)

    def gain_over_decay(self, weight: float) -> float:
        """Return the gain that a decay must exceed.

        Args:
          weight: factor of the congestion gain, which a decay does not explain.
        """
        return self.gain + (weight - 1) * self.congestion_gain


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Spans:
    """S spans of successive bins, out of B bins."""

    first: Array
    """[S], index of the first bin."""
    end: Array
    """[S], index of the bin after the last."""
    num_bins: int

    def inside(self, each: Array) -> Array:
        """Return the sum over each span, [S], of the values of bins, [B]."""
        total = np.concatenate(([0.0], np.cumsum(each)))
        return total[self.end] - total[self.first]

    def outside(self, each: Array, reach: int) -> Array:
        """Return the sum over up to `reach` bins before and after each span, [S]."""
        total = np.concatenate(([0.0], np.cumsum(each)))
        begin = np.maximum(self.first - reach, 0)
        last = np.minimum(self.end + reach, self.num_bins)
        return total[self.first] - total[begin] + total[last] - total[self.end]


class Neighbours:
    """Stores the observations in bounded memory, and finds the best span."""

    def __init__(self, port: Port, thresholds: Thresholds) -> None:
        """Start with no observations."""
        self._limits = thresholds.neighbours
        self._bin_s = thresholds.congestion.bin_s
        self._explanations: ExplanationThresholds = thresholds.explanations
        self._congestion = Congestion(port, thresholds.congestion)
        self._steps: deque[Step] = deque(maxlen=self._limits.most_steps)
        self._paces: deque[tuple[float, float]] = deque(
            maxlen=self._limits.most_windows
        )

    def feed(self, increment: Increment) -> None:
        """Add an increment of the counters."""
        self._congestion.feed(increment)

    def add_step(self, step: Step) -> None:
        """Add a step of training."""
        self._steps.append(step)

    def add_bursts(self, time_s: float, bursts: Bursts) -> None:
        """Add the bursts of a window that ends at time_s."""
        self._paces.append((time_s, float(np.log(bursts.rate))))

    def explain(self) -> Load | None:
        """Return the best span; None if too little was observed."""
        limits = self._limits
        start_s, events, traffic_s = self._congestion.bins()
        num = len(events)
        first, end = np.triu_indices(num + 1, round(limits.least_s / self._bin_s))
        kept = end - first <= num - round(limits.outside_s / self._bin_s)
        if not kept.any():
            return None
        spans = _Spans(first=first[kept], end=end[kept], num_bins=num)
        congestion, ratio = self._congestion_gain(spans, events, traffic_s)
        steps, slower = self._steps_gain(spans, start_s)
        bursts = self._bursts_gain(spans, start_s)
        best = int((congestion + steps + bursts).argmax())
        return Load(
            span_s=(
                start_s + float(spans.first[best]) * self._bin_s,
                start_s + float(spans.end[best]) * self._bin_s,
            ),
            bursts_gain=float(bursts[best]),
            congestion_gain=float(congestion[best]),
            steps_gain=float(steps[best]),
            congestion_ratio=float(np.exp(ratio[best])),
            slower_part=float(np.expm1(slower[best])),
        )

    def detect(self, load: Load | None) -> Detection | None:
        """Return a detection if a neighbour's load is the better explanation."""
        limits = self._limits
        if load is None or load.gain < limits.over_nothing:
            return None
        if load.weakest_gain < limits.contradiction:
            return None
        return Detection(
            kind="neighbour",
            onset_s=load.span_s[0],
            until_s=load.span_s[1],
            score=load.gain / limits.over_nothing,
            evidence=f"congestion {load.congestion_ratio:.1f} times the usual, steps "
            f"{load.slower_part:.0%} longer; log-likelihood ratio to no neighbour: "
            f"bursts {load.bursts_gain:.1f}, congestion {load.congestion_gain:.1f}, "
            f"steps {load.steps_gain:.1f}",
            numbers={
                "congestion_ratio": load.congestion_ratio,
                "slower_part": load.slower_part,
                "bursts_gain": load.bursts_gain,
                "congestion_gain": load.congestion_gain,
                "steps_gain": load.steps_gain,
            },
        )

    def _congestion_gain(
        self, spans: _Spans, events: Array, traffic_s: Array
    ) -> tuple[Array, Array]:
        """Return the gain of each span, and the log of its congestion ratio, [S]."""
        limits, floor = self._limits, self._congestion.floor
        seconds = np.stack((spans.inside(traffic_s), spans.outside(traffic_s, 10**9)))
        counts = np.stack((spans.inside(events), spans.outside(events, 10**9)))
        rates = np.maximum(counts / np.maximum(seconds, 1e-9), floor)
        known = (seconds >= limits.least_traffic_s).all(0)
        ratio = np.where(known, np.log(rates[0] / rates[1]), 0.0)
        bins = spans.end - spans.first
        spread = 1 / bins + 1 / (spans.num_bins - bins)
        std = np.hypot(limits.congestion_std, limits.bin_std * np.sqrt(spread))
        part = limits.fitting_part
        usual = (1 - part) * student(ratio, std) + part * _flat(
            ratio, limits.fitting_ratios
        )
        return _gain(_flat(ratio, limits.congested_ratios), usual, known), ratio

    def _steps_gain(self, spans: _Spans, start_s: float) -> tuple[Array, Array]:
        """Return the gain of each span, and the log ratio of its step times, [S]."""
        limits, num = self._limits, spans.num_bins
        took_s = np.array([each.step_s for each in self._steps] or [1.0])
        middle_s = np.array([each.end_s for each in self._steps] or [-1.0]) - took_s / 2
        index = np.floor((middle_s - start_s) / self._bin_s).astype(int)
        kept = (index >= 0) & (index < num)
        took_s = np.minimum(took_s, limits.clip * np.median(took_s))
        total_s = np.bincount(index[kept], took_s[kept], num)
        count = np.bincount(index[kept], minlength=num)
        reach = round(limits.usual_s / self._bin_s)
        inside, outside = spans.inside(count), spans.outside(count, reach)
        known = (inside >= 2) & (outside >= 2)
        inside, outside = np.maximum(inside, 1), np.maximum(outside, 1)
        slower = spans.inside(total_s) / inside * outside
        slower = slower / np.maximum(spans.outside(total_s, reach), 1e-9)
        slower = np.log(np.where(known, slower, 1.0))
        spread = 1 / inside + 1 / outside
        std = np.hypot(limits.steps_std, limits.step_std * np.sqrt(spread))
        part = limits.other_part
        usual = (1 - part) * student(slower, std) + part * _flat(
            slower, limits.other_steps
        )
        return _gain(_flat(slower, limits.slower_steps), usual, known), slower

    def _bursts_gain(self, spans: _Spans, start_s: float) -> Array:
        """Return the gain of each span at its best level, [S]."""
        explain = self._explanations
        gain = np.zeros(len(spans.first))
        if len(self._paces) < self._limits.least_windows:
            return gain
        time_s, pace = np.array(self._paces).T
        pace = pace - np.quantile(pace, 0.8)
        std = np.full(len(pace), self._limits.pace_std)
        index = np.floor((time_s - 1.0 - start_s) / self._bin_s).astype(int)
        index = np.clip(index, 0, spans.num_bins - 1)
        least = nothing(pace, std, explain, drifts=False)
        gains = []
        for offset in OFFSETS:
            usual = density(pace - offset, std, explain.slow_part)
            loaded = density(pace - offset, std, explain.loaded_part)
            more = np.bincount(index, loaded - usual, spans.num_bins)
            gains.append(usual.sum() - least + spans.inside(more))
        return np.max(gains, axis=0)


def _flat(value: Array, bounds: tuple[float, float]) -> Array:
    """Return a density that is flat between bounds and almost 0 elsewhere."""
    inside = (value > bounds[0]) & (value < bounds[1])
    return np.where(inside, 1 / (bounds[1] - bounds[0]), 1e-3)


def _gain(loaded: Array, usual: Array, known: Array) -> Array:
    """Return the logarithm of a ratio of densities; 0 where a value is unknown."""
    return np.where(known, np.log(loaded / usual), 0.0)
