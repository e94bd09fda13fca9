"""Slow decay: bursts get slower for good, or symbol errors become frequent.

Enters: rates of bursts, increments of counters. Leaves: a detection when the rate has
fallen from what the port gave at first, without congestion, or when symbol errors
exceed the specified rate. Sources: a damaged cable comes up at a lower speed or with
fewer lanes; NVIDIA, "Cabling Data Centers". Symbol errors: 10^-12 a bit, the bit error
rate that InfiniBand links are specified for; a warning at 5 times, an error at 10
times; NVIDIA, "InfiniBand Cluster Bring-up Procedure", UFM Telemetry.
"""

from collections import deque

import numpy as np

from mjax.health.watch.counters import Increment
from mjax.health.watch.samples import Detection, Port
from mjax.health.watch.thresholds import DecayThresholds

SPECIFIED_BIT_ERROR_RATE = 1e-12
"""Source: see the module."""


class RateDecay:
    """Compares the last bursts with the first; keeps a few of each."""

    def __init__(self, thresholds: DecayThresholds) -> None:
        """Start without a window."""
        self._limits = thresholds
        self._first: list[float] = []
        self._last: deque[tuple[float, float]] = deque(maxlen=thresholds.most_windows)
        self._count = 0
        self._times_low = 0
        self._reported_s: float | None = None

    def feed(self, time_s: float, rate: float) -> Detection | None:
        """Add the rate of the bursts of one window.

        Args:
          time_s: of the window.
          rate: part of the wire.
        """
        limits = self._limits
        self._count += 1
        if len(self._first) < limits.most_windows:
            self._first.append(rate)
        self._last.append((time_s, rate))
        compared = min(self._count // 2, limits.most_windows)
        if compared < limits.least_windows:
            return None
        first = np.array(self._first[:compared])
        last = np.array([each for _, each in self._last][-compared:])
        recent = last[-max(limits.least_windows, compared // 2) :]
        usual = float(np.quantile(first, limits.rate_quantile))
        now = float(np.quantile(recent, limits.rate_quantile))
        lost = 1 - now / usual
        noise = _scatter(first, recent) / np.sqrt(len(recent)) / usual
        least = limits.lost_part + limits.lost_part_windows / compared
        need = max(least, limits.noise_ratio * float(noise))
        top = limits.top_quantile
        top_lost = 1 - float(np.quantile(recent, top) / np.quantile(first, top))
        slow, fast = np.quantile(recent, [0.2, 0.8])
        low = lost >= need and top_lost >= limits.top_lost_part
        low = low and slow >= limits.steady_part * fast
        self._times_low = self._times_low + 1 if low else 0
        if self._times_low < limits.times_low:
            return None
        silent_s = self._reported_s
        if silent_s is not None and time_s - silent_s < limits.rearm_s:
            return None
        self._reported_s = time_s
        return Detection(
            kind="decay",
            onset_s=self._last[-len(recent)][0],
            until_s=time_s,
            score=lost / need,
            evidence=f"bursts reach {now:.0%} of the wire, {usual:.0%} at first, "
            "without congestion",
            numbers={"lost_part": lost, "now_part": now, "usual_part": usual},
        )


def _scatter(*series: np.ndarray) -> float:
    """Standard deviation of a rate, from changes between windows: a trend is none.

    The median of the absolute difference of two normal variables is 0.954 times their
    standard deviation.
    """
    changes = np.concatenate([np.abs(np.diff(rates)) for rates in series])
    return float(np.median(changes)) / 0.954


class ErrorDecay:
    """Compares symbol errors with the specification; keeps `errors_s` of samples."""

    def __init__(self, port: Port, thresholds: DecayThresholds) -> None:
        self._limits = thresholds
        self._specified_per_s = port.rate_gbit_per_s * 1e9 * SPECIFIED_BIT_ERROR_RATE
        self._history: deque[tuple[float, float, int]] = deque()
        self._reported_s: float | None = None

    def feed(self, increment: Increment, flap_s: float | None) -> Detection | None:
        """Add an increment.

        Args:
          increment: of the counters.
          flap_s: time of the last flap, None without one.
        """
        limits, now_s = self._limits, increment.end_s
        if flap_s is not None and increment.start_s - flap_s < limits.around_flap_s:
            return None
        errors = increment.counts.get("symbol_error", 0)
        self._history.append((now_s, increment.duration_s, errors))
        while self._history[0][0] < now_s - limits.errors_s:
            self._history.popleft()
        counts = sorted(count for _, _, count in self._history)
        total = sum(counts[: -limits.dropped_samples])
        seconds = sum(duration_s for _, duration_s, _ in self._history)
        need = max(
            limits.errors_ratio * self._specified_per_s * seconds, limits.least_errors
        )
        if total < need:
            return None
        silent_s = self._reported_s
        if silent_s is not None and now_s - silent_s < limits.rearm_s:
            return None
        self._reported_s = now_s
        times = total / seconds / self._specified_per_s
        return Detection(
            kind="decay",
            onset_s=self._history[0][0],
            until_s=now_s,
            score=total / need,
            evidence=f"{total} symbol errors in {seconds:.0f} s, {times:.0f} times "
            "the specified rate",
            numbers={"errors_count": float(total), "times_specified": times},
        )
