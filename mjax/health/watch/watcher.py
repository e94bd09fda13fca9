"""Run all detectors on the observations of one port.

Input: a `Port`, then samples, windows and steps in time order. Output: detections,
each at the observation that completes its evidence. A loss of rate and the load of a
neighbour look alike for a while; they are judged together every `judge_s`, and by
`finish` when the run ends. Memory is bounded, however long the run is.
"""

from collections.abc import Iterable

from mjax.health.watch.bursts import find_bursts
from mjax.health.watch.counters import Counters, Increment
from mjax.health.watch.decay import ErrorDecay, RateDecay
from mjax.health.watch.flaps import Flaps
from mjax.health.watch.neighbours import Neighbours
from mjax.health.watch.samples import (
    Detection,
    Observation,
    Port,
    Sample,
    Step,
    Window,
    seen_s,
)
from mjax.health.watch.step_traffic import StepTraffic
from mjax.health.watch.thresholds import Thresholds

DEFAULTS = Thresholds()


class Watcher:
    """Runs all detectors on one port."""

    def __init__(self, port: Port, thresholds: Thresholds = DEFAULTS) -> None:
        """Start with no observations.

        Args:
          port: the port to watch.
          thresholds: thresholds of the detectors.
        """
        self._port = port
        self._limits = thresholds
        self._counters = Counters(port, thresholds.longest_gap_s)
        self._flaps = Flaps(thresholds.flaps)
        self._neighbours = Neighbours(port, thresholds)
        self._rates = RateDecay(thresholds.decay, thresholds.explanations)
        self._errors = ErrorDecay(port, thresholds.decay)
        self.step_traffic = StepTraffic(port, thresholds.periods)
        self._judge_s: float | None = None
        self._judged_s = -float("inf")
        self._now_s = 0.0

    def feed(self, observation: Observation) -> list[Detection]:
        """Return the faults whose evidence this observation completes.

        Raises:
          ValueError: samples are not in time order.
        """
        match observation:
            case Sample():
                increment = self._counters.feed(observation)
                found = [] if increment is None else self._count(increment)
            case Window():
                self._see(observation)
                found = []
            case Step():
                self._neighbours.add_step(observation)
                self.step_traffic.add_step(observation)
                found = []
        return [each for each in found if each is not None]

    def _count(self, increment: Increment) -> list[Detection | None]:
        """Pass an increment to all detectors that read counters; return the results."""
        flap = self._flaps.feed(increment)
        errors = self._errors.feed(increment, self._flaps.last_s)
        self._neighbours.feed(increment)
        self._now_s = increment.end_s
        period = self.step_traffic.feed(increment)
        return [flap, errors, period, *self._judge(increment.end_s)]

    def _see(self, window: Window) -> None:
        """Pass a window to all detectors that compare rates."""
        self.step_traffic.add_window(window)
        bursts = find_bursts(self._port, window, self._limits.decay.busy_part)
        if bursts is not None:
            end_s = float(window.time_s[-1])
            self._neighbours.add_bursts(end_s, bursts)
            self._rates.feed(end_s, bursts)

    def _judge(self, now_s: float) -> list[Detection]:
        """Every `judge_s`, return the cause of slow bursts: a decay or a neighbour."""
        judge_s = self._limits.decay.judge_s
        if self._judge_s is None:
            self._judge_s = now_s + judge_s
        if now_s < self._judge_s:
            return []
        self._judge_s = now_s + judge_s
        return self.finish()

    def finish(self) -> list[Detection]:
        """Return the pending detections, at the end of a run or of `judge_s`.

        Both a decay and a neighbour make bursts slower; only the better explanation is
        reported. A load that ended before the last judgement was already judged then.
        """
        judged_s, self._judged_s = self._judged_s, self._now_s
        load = self._neighbours.explain()
        weight = self._limits.neighbours.decay_weight
        decay = self._rates.judge(0.0 if load is None else load.gain_over_decay(weight))
        if decay is not None:
            return [decay]
        neighbour = self._neighbours.detect(load)
        if neighbour is None or neighbour.until_s <= judged_s:
            return []
        return [neighbour]


def detect(
    port: Port,
    observations: Iterable[Observation],
    thresholds: Thresholds = DEFAULTS,
) -> list[Detection]:
    """Return the faults in a whole series, in order of detection.

    Args:
      port: the observed port.
      observations: samples, windows and steps, in any order.
      thresholds: thresholds of the detectors.
    """
    watcher = Watcher(port, thresholds)
    ordered = sorted(observations, key=seen_s)
    found = [found for each in ordered for found in watcher.feed(each)]
    return found + watcher.finish()
