"""Detect when the traffic of a port stops repeating with the steps.

Input: increments, windows, steps. Output: a detection when traffic that repeated with
the steps no longer does, or repeats with another period, while steps continue; and a
`PortPeriod`, the result at the end.

Only times with successive steps are judged: saves, evaluations and restarts have other
traffic. A step shorter than two samples is searched at its alias, and in windows of
millisecond samples. Source of the idea: MegaScale, arXiv:2402.15627, on the data that
its monitoring collects.
"""

import dataclasses
from collections import deque
from typing import Literal

import numpy as np

from mjax.health.watch.counters import Increment
from mjax.health.watch.period import (
    SEGMENT_SAMPLES,
    Period,
    Steps,
    Traffic,
    explains,
    find_period,
    find_step,
)
from mjax.health.watch.samples import WORD_BYTES, Detection, Port, Step, Window
from mjax.health.watch.thresholds import PeriodThresholds

LEAST_LOG10 = -300.0
"""Minimum printed log10 of a probability. It is about the smallest exponent of a
float."""

type Verdict = Literal[
    "with the step",
    "an alias of the step",
    "with the step, in windows",
    "unlike the step",
    "no period",
    "not resolvable",
    "unknown step",
    "too little traffic",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PortPeriod:
    """The period of a port, as far as known."""

    verdict: Verdict
    period: Period | None
    step_s: float | None
    """Median of the reported step times; None without reports."""

    @property
    def text(self) -> str:
        """Summary in one line."""
        return _text(self)


class StepTraffic:
    """Follows one port; keeps `block_s` of increments and steps."""

    def __init__(self, port: Port, thresholds: PeriodThresholds) -> None:
        """Start with no observations."""
        self._port = port
        self._limits = thresholds
        self._rates: deque[tuple[float, float, float]] = deque(
            maxlen=thresholds.most_samples
        )
        self._steps: deque[tuple[float, float]] = deque(maxlen=thresholds.most_steps)
        self._windows: deque[Traffic] = deque(maxlen=thresholds.most_windows)
        self._usual: deque[tuple[float, float]] = deque(maxlen=thresholds.most_usual)
        self._judge_s: float | None = None
        self._suspect: tuple[float, int] | None = None
        self._reported = False

    def add_step(self, step: Step) -> None:
        """Add a step of training."""
        self._steps.append((step.end_s, step.step_s))

    def add_window(self, window: Window) -> None:
        """Add the rates of a window, in bins of `bin_s`."""
        words = np.diff(window.port_xmit_data.astype(np.int64))
        if self._port.data_counter_bits == 32:
            words %= 2**32
        if not len(words) or (words < 0).any():
            return
        sent = np.concatenate(([0], np.cumsum(words))) * float(WORD_BYTES)
        length_s = float(window.time_s[-1] - window.time_s[0])
        bins = min(int(length_s / self._limits.bin_s), self._limits.most_bins)
        if bins < 2:
            return
        edges = np.linspace(window.time_s[0], window.time_s[-1], bins + 1)
        rate = np.diff(np.interp(edges, window.time_s, sent)) / np.diff(edges)
        self._windows.append(Traffic(start_s=edges[:-1], end_s=edges[1:], rate=rate))

    def feed(self, increment: Increment) -> Detection | None:
        """Add an increment; return a detection if the period is lost or has changed."""
        limits, now_s = self._limits, increment.end_s
        if increment.data_bytes is not None:
            rate = increment.data_bytes / increment.duration_s
            self._rates.append((increment.start_s, now_s, rate))
        if self._judge_s is None:
            self._judge_s = now_s + limits.judge_s
        if now_s < self._judge_s:
            return None
        self._judge_s = now_s + limits.judge_s
        return self._judge(now_s)

    def traffic(self) -> tuple[list[Traffic], Steps] | None:
        """Return the latest block of traffic.

        Returns:
          the stretches of the block with successive steps, and the steps; None if the
          stretches cover too little of the block, or there are too few steps.
        """
        limits = self._limits
        if len(self._steps) < limits.least_steps or not self._rates:
            return None
        steps = np.array(self._steps)
        recent = steps[-limits.least_steps :, 1]
        block_s = max(limits.block_s, limits.block_steps * float(np.median(recent)))
        from_s = self._rates[-1][1] - block_s
        steps = steps[steps[:, 0] >= from_s]
        if len(steps) < limits.least_steps:
            return None
        rates = np.array([one for one in self._rates if one[0] >= from_s])
        parts = _stretches(rates, steps[:, 0])
        if sum(map(len, parts)) < limits.least_part * len(rates):
            return None
        return parts, Steps(end_s=steps[:, 0], step_s=steps[:, 1])

    def _judge(self, now_s: float) -> Detection | None:
        """Return a detection if the block differs from earlier blocks."""
        limits = self._limits
        block = self.traffic()
        if block is None:
            return None
        parts, steps = block
        found = find_step(parts, steps)
        if found is None or found.aliased:
            return None
        step_s = float(np.median(steps.step_s))
        begin_s = float(parts[0].start_s[0])
        before = [strength for end_s, strength in self._usual if end_s <= begin_s]
        usual = float(np.median(before)) if len(before) >= limits.least_usual else 0.0
        periodic = found.log10_false_alarm < limits.log10_periodic
        if periodic:
            self._usual.append((now_s, found.strength))
        strong = usual > limits.least_strength
        lost = strong and found.strength < limits.lost_part * usual
        other = None if periodic else _unlike(parts, step_s, limits)
        if not (lost and found.log10_false_alarm > limits.log10_lost) and not other:
            self._suspect = None
            self._reported &= not periodic
            return None
        first_s, times = self._suspect or (begin_s, 0)
        self._suspect = (first_s, times + 1)
        if self._reported or times + 1 < limits.least_times:
            return None
        self._reported = True
        return _detection(first_s, now_s, step_s, found, other, usual)

    def summary(self) -> PortPeriod:
        """Return the current knowledge of the period."""
        limits = self._limits
        block = self.traffic()
        if block is None:
            if not self._steps:
                return self._without_steps()
            return PortPeriod(verdict="too little traffic", period=None, step_s=None)
        parts, steps = block
        step_s = float(np.median(steps.step_s))
        found = find_step(parts, steps)
        windows = self._in_windows(step_s)
        if found is not None and found.log10_false_alarm < limits.log10_periodic:
            verdict = "an alias of the step" if found.aliased else "with the step"
            return PortPeriod(verdict=verdict, period=found, step_s=step_s)
        if windows is not None:
            return PortPeriod(
                verdict="with the step, in windows", period=windows, step_s=step_s
            )
        if found is None or found.aliased:
            return PortPeriod(verdict="not resolvable", period=None, step_s=step_s)
        other = _unlike(parts, step_s, limits)
        if other is not None:
            return PortPeriod(verdict="unlike the step", period=other, step_s=step_s)
        return PortPeriod(verdict="no period", period=found, step_s=step_s)

    def _without_steps(self) -> PortPeriod:
        """Return the strongest period in all stored traffic."""
        if len(self._rates) < self._limits.least_samples:
            return PortPeriod(verdict="too little traffic", period=None, step_s=None)
        start_s, end_s, rate = np.array(self._rates).T
        found = find_period([Traffic(start_s=start_s, end_s=end_s, rate=rate)])
        if found is None or found.log10_false_alarm >= self._limits.log10_periodic:
            return PortPeriod(verdict="no period", period=None, step_s=None)
        return PortPeriod(verdict="unknown step", period=found, step_s=None)

    def _in_windows(self, step_s: float) -> Period | None:
        """Return the period of the step in windows; None if it is not visible."""
        limits = self._limits
        kept = [
            one for one in self._windows if one.length_s >= limits.window_steps * step_s
        ]
        if len(kept) < limits.least_windows:
            return None
        ends_s = np.array([one.end_s[-1] for one in kept])
        steps = Steps(end_s=ends_s, step_s=np.full(len(kept), step_s))
        found = find_step(kept, steps)
        if found is None or found.log10_false_alarm >= limits.log10_periodic:
            return None
        return found


def _stretches(rates: np.ndarray, end_s: np.ndarray) -> list[Traffic]:
    """Return the stretches of traffic during successive steps.

    Args:
      rates: [N, 3], start, end and rate of increments.
      end_s: [T], times at which steps were reported, possibly late by a sample.
    """
    start_s, stop_s, rate = rates.T
    sample_s = float(np.median(stop_s - start_s))
    gap_s = np.diff(end_s)
    go_on = gap_s <= 1.5 * float(np.median(gap_s)) + sample_s
    middle_s = (start_s + stop_s) / 2
    gap = np.searchsorted(end_s, middle_s, side="left") - 1
    inside = (gap >= 0) & (gap < len(gap_s))
    inside[inside] &= go_on[gap[inside]]
    # An increment at the edge of a pause belongs to the pause.
    stretch = np.concatenate(([0], np.cumsum(~go_on)))[np.clip(gap, 0, len(gap_s))]
    traffic = Traffic(start_s=start_s, end_s=stop_s, rate=rate)
    return [
        traffic.cut(inside & (stretch == number))
        for number in np.unique(stretch[inside])
    ]


def _unlike(
    parts: list[Traffic], step_s: float, limits: PeriodThresholds
) -> Period | None:
    """Return a period of the traffic other than the step; None if there is none."""
    found = find_period(parts)
    if found is None or found.log10_false_alarm >= limits.log10_unlike:
        return None
    if found.strength < limits.least_strength:
        return None
    sample_s = float(np.median([part.sample_s for part in parts if len(part)]))
    length_s = sample_s * min(SEGMENT_SAMPLES[-1], max(map(len, parts)))
    return None if explains(step_s, found, 1 / sample_s, length_s) else found


def _detection(
    onset_s: float,
    now_s: float,
    step_s: float,
    found: Period,
    other: Period | None,
    usual: float,
) -> Detection:
    """Return a detection of traffic that no longer repeats with the steps."""
    numbers = {"step_s": step_s, "strength": found.strength, "usual_strength": usual}
    text = (
        f"traffic repeats with the steps of {step_s:.2f} s to {found.strength:.0%} of "
        f"its variance, usually {usual:.0%}"
    )
    if other is not None:
        numbers |= {"period_s": other.period_s, "period_strength": other.strength}
        text += f"; it repeats every {other.period_s:.2f} s or an alias of that"
    return Detection(
        kind="aperiodic" if other is None else "other_period",
        onset_s=onset_s,
        until_s=now_s,
        score=max(1.0, usual / max(found.strength, 0.01)),
        evidence=text,
        numbers=numbers,
    )


def _text(known: PortPeriod) -> str:
    """Return the summary line of a port."""
    found, step_s = known.period, known.step_s
    step = "" if step_s is None else f"; the step takes {step_s:.3g} s"
    if found is None:
        return f"{known.verdict}{step}"
    chance = 10 ** max(LEAST_LOG10, found.log10_false_alarm)
    sure = f"{found.strength:.0%} of the variance, p {chance:.0e}"
    match known.verdict:
        case "no period":
            return f"no period: {sure}{step}"
        case "unknown step":
            others = ", ".join(f"{each:.3g}" for each in found.aliases_s)
            return (
                f"{found.period_s:.3g} s or its aliases ({others} s), {sure}; "
                "--work-dir decides"
            )
    return f"{found.period_s:.3g} s, {known.verdict}, {sure}{step}"
