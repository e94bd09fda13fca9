"""Watch one port: feed it what the sampler sees, it answers with detections.

Enters: a `Port`, then samples, windows and steps in order of time. Leaves: detections,
each at the observation that completes its evidence. Memory is bounded by the windows
of the detectors, however long the run is.
"""

from collections import deque
from collections.abc import Iterable

from mjax.health.watch.bursts import find_bursts
from mjax.health.watch.congestion import Congestion
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
from mjax.health.watch.thresholds import Thresholds

DEFAULTS = Thresholds()


class Watcher:
    """Runs all detectors over one port."""

    def __init__(self, port: Port, thresholds: Thresholds = DEFAULTS) -> None:
        """Start with nothing seen.

        Args:
          port: that is watched.
          thresholds: of the detectors.
        """
        self._port = port
        self._limits = thresholds
        self._counters = Counters(port, thresholds.longest_gap_s)
        self._flaps = Flaps(thresholds.flaps)
        self._congestion = Congestion(port, thresholds.congestion)
        self._neighbours = Neighbours(thresholds.neighbours)
        self._rates = RateDecay(thresholds.decay)
        self._errors = ErrorDecay(port, thresholds.decay)
        self._waiting: deque[tuple[float, float]] = deque(
            maxlen=thresholds.neighbours.most_windows
        )

    def feed(self, observation: Observation) -> list[Detection]:
        """Return the faults that this observation completes.

        Raises:
          ValueError: samples are not in order of time.
        """
        match observation:
            case Sample():
                increment = self._counters.feed(observation)
                found = [] if increment is None else self._count(increment)
            case Window():
                found = self._see(observation)
            case Step():
                self._neighbours.add_step(observation)
                found = []
        return [each for each in found if each is not None]

    def _count(self, increment: Increment) -> list[Detection | None]:
        """Let all that read counters see an increment."""
        flap = self._flaps.feed(increment)
        errors = self._errors.feed(increment, self._flaps.last_s)
        neighbour = None
        if self._congestion.feed(increment, usual=not self._neighbours.congested):
            ratio = self._congestion.ratio
            if ratio is not None:
                bin_s = self._limits.congestion.bin_s
                neighbour = self._neighbours.judge(increment.end_s, bin_s, ratio)
        return [flap, errors, neighbour]

    def _see(self, window: Window) -> list[Detection | None]:
        """Let all that compare rates see a window.

        Windows during congestion wait until it is certain whose fault they show.
        """
        bursts = find_bursts(self._port, window, self._limits.decay.busy_part)
        if bursts is None:
            return []
        neighbours = self._neighbours
        neighbours.add_bursts(bursts)
        self._waiting.append((float(window.time_s[-1]), bursts.rate))
        if neighbours.certain:
            self._waiting.clear()
        if neighbours.congested and not neighbours.alike:
            return []
        if len(self._waiting) > 1 and not (neighbours.alike or neighbours.given_up):
            self._waiting = deque([self._waiting[-1]], maxlen=self._waiting.maxlen)
        found = [self._rates.feed(*each) for each in self._waiting]
        self._waiting.clear()
        return list(found)


def detect(
    port: Port,
    observations: Iterable[Observation],
    thresholds: Thresholds = DEFAULTS,
) -> list[Detection]:
    """Return the faults of a whole series, in order of detection.

    Args:
      port: what was observed.
      observations: in any order.
      thresholds: of the detectors.
    """
    watcher = Watcher(port, thresholds)
    ordered = sorted(observations, key=seen_s)
    return [found for each in ordered for found in watcher.feed(each)]
