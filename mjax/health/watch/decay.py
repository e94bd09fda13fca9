"""Detect slow decay: bursts become slower for good, or errors become more frequent.

Input: bursts of windows, increments of counters. Output: a detection when a lasting
drop explains the rates better than no fault and better than a neighbour, or when symbol
errors exceed `errors_ratio` times the specified rate.
Sources: NVIDIA, "Cabling Data Centers": a damaged cable runs at a lower speed or with
fewer lanes. NVIDIA, "InfiniBand Cluster Bring-up Procedure", UFM Telemetry: InfiniBand
links are specified for 10^-12 errors per bit; a warning at 5 times, an error at 10
times this rate.
"""

from collections import deque

from mjax.health.watch.bursts import Burst, Bursts
from mjax.health.watch.counters import Increment
from mjax.health.watch.explain import explain
from mjax.health.watch.levels import find_levels
from mjax.health.watch.samples import Detection, Port
from mjax.health.watch.thresholds import DecayThresholds, ExplanationThresholds

SPECIFIED_BIT_ERROR_RATE = 1e-12
"""Specified rate of symbol errors per bit; for the source see the module."""


class RateDecay:
    """Compares explanations of the window rates; keeps `most_windows` windows."""

    def __init__(
        self, thresholds: DecayThresholds, explanations: ExplanationThresholds
    ) -> None:
        """Start with no window."""
        self._limits = thresholds
        self._explanations = explanations
        self._windows: deque[tuple[float, tuple[Burst, ...]]] = deque(
            maxlen=thresholds.most_windows
        )

    def feed(self, time_s: float, bursts: Bursts) -> None:
        """Add the bursts of a window that ends at time_s."""
        kept = bursts.each[: self._limits.most_bursts_kept]
        self._windows.append((time_s, kept))

    def judge(self, neighbour_gain: float) -> Detection | None:
        """Return a decay if it explains the rates better than all alternatives.

        Args:
          neighbour_gain: log-likelihood ratio of a neighbour to no fault.
        """
        limits = self._limits
        if len(self._windows) < limits.least_windows:
            return None
        levels = find_levels(self._windows, limits)
        best = explain(levels, self._explanations)
        if best.gain < max(limits.over_nothing, neighbour_gain):
            return None
        numbers = {
            "lost_part": best.lost_part,
            "over_nothing": best.gain,
            "over_neighbour": best.gain - neighbour_gain,
        }
        return Detection(
            kind="decay",
            onset_s=best.onset_s,
            until_s=float(levels.time_s[-1]),
            score=best.gain / limits.over_nothing,
            evidence=f"bursts have lost {best.lost_part:.0%} of their rate and never "
            f"reach it again; log-likelihood ratio {numbers['over_nothing']:.1f} to "
            f"no fault, {numbers['over_neighbour']:.1f} to a neighbour",
            numbers=numbers,
        )


class ErrorDecay:
    """Compares symbol errors with the specified rate; keeps `errors_s` of samples."""

    def __init__(self, port: Port, thresholds: DecayThresholds) -> None:
        self._limits = thresholds
        self._specified_per_s = port.rate_gbit_per_s * 1e9 * SPECIFIED_BIT_ERROR_RATE
        self._history: deque[tuple[float, float, int]] = deque(
            maxlen=thresholds.most_samples
        )
        self._reported_s: float | None = None

    def feed(self, increment: Increment, flap_s: float | None) -> Detection | None:
        """Add an increment; return a detection if errors are too frequent.

        Args:
          increment: increment of the counters.
          flap_s: time of the last flap; None if there was none.
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
