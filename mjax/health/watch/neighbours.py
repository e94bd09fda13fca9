"""Load of a neighbour: other jobs share a link, and the steps become longer.

Enters: congestion, rates of bursts, times of steps. Leaves: a detection for each
episode in which three things come together: congestion far above the usual, slower
bursts, and longer steps than just before. Congestion alone costs nothing if the
traffic is hidden behind compute; longer steps alone have many causes. Source: bursts of
jobs that share a link collide, and ECN marks rise; CASSINI, arXiv:2308.00852.
"""

from collections import deque

import numpy as np

from mjax.health.watch.bursts import Bursts
from mjax.health.watch.samples import Detection, Step
from mjax.health.watch.thresholds import NeighbourThresholds


class Neighbours:
    """Follows one episode of congestion at a time; keeps `most_kept` steps."""

    def __init__(self, thresholds: NeighbourThresholds) -> None:
        """Start outside an episode."""
        self._limits = thresholds
        self._steps: deque[Step] = deque(maxlen=thresholds.most_kept)
        self._bursts: deque[Bursts] = deque(maxlen=thresholds.most_windows)
        self._before: deque[float] = deque(maxlen=thresholds.usual_windows)
        self._begin_s: float | None = None
        self._quiet_since_s: float | None = None
        self._given_up = False
        self._reported = False
        self._ratio_sum = 0.0
        self._ratio_count = 0

    @property
    def congested(self) -> bool:
        """Whether an episode lasts that may be a neighbour's."""
        return self._begin_s is not None and not self._given_up

    def _mean_ratio(self) -> float:
        return self._ratio_sum / max(1, self._ratio_count)

    def add_step(self, step: Step) -> None:
        """Add a step of training."""
        self._steps.append(step)

    def add_bursts(self, bursts: Bursts) -> None:
        """Add the bursts of a window."""
        if self._begin_s is None:
            self._before.append(bursts.rate)
        else:
            self._bursts.append(bursts)

    def judge(self, now_s: float, bin_s: float, ratio: float) -> Detection | None:
        """Follow the congestion; return a neighbour once it is certain.

        Args:
          now_s: end of a bin.
          bin_s: length of a bin.
          ratio: congestion, times the usual.
        """
        limits = self._limits
        if self._begin_s is None:
            if ratio >= limits.begin_ratio:
                self._begin_s, self._quiet_since_s = now_s - bin_s, None
                self._reported = self._given_up = False
                self._ratio_sum, self._ratio_count = 0.0, 0
                self._bursts.clear()
            return None
        self._ratio_sum += ratio
        self._ratio_count += 1
        if ratio >= limits.end_ratio:
            self._quiet_since_s = None
        elif self._quiet_since_s is None:
            self._quiet_since_s = now_s
        elif now_s - self._quiet_since_s >= limits.end_s:
            self._begin_s = None
            return None
        lasted_s = now_s - self._begin_s
        if self._reported or self._given_up or lasted_s < limits.least_s:
            return None
        mean_ratio = self._mean_ratio()
        if mean_ratio < limits.mean_ratio and lasted_s <= limits.most_s:
            return None
        found = None
        if mean_ratio >= limits.mean_ratio:
            found = self._found(self._begin_s, now_s, mean_ratio)
        self._reported = found is not None
        if not self._reported and lasted_s > limits.most_s:
            self._given_up = True
        return found

    def _found(self, begin_s: float, now_s: float, ratio: float) -> Detection | None:
        """Return a detection if steps and bursts are slower since begin_s."""
        limits = self._limits
        slower = self._slower(begin_s)
        if slower is None:
            return None
        count = len(self._bursts)
        blind = count < limits.least_windows or not self._before
        if blind and (now_s - begin_s < limits.blind_s or ratio < limits.blind_ratio):
            return None
        usual = limits.slow_burst_part * float(np.median(self._before or [0.0]))
        slow = sum(
            each.rate < usual or each.evenness < limits.even_part
            for each in self._bursts
        )
        need = limits.blind_slower_part if blind else limits.slower_part
        if slower < need or slow < limits.slow_windows_part * count:
            return None
        return Detection(
            kind="neighbour",
            onset_s=begin_s,
            until_s=now_s,
            score=slower / need,
            evidence=f"congestion {ratio:.1f} times the usual, steps {slower:.0%} "
            f"longer, {slow} of {count} windows with slow bursts",
            numbers={
                "congestion_ratio": ratio,
                "slower_part": slower,
                "slow_windows_count": float(slow),
                "windows_count": float(count),
            },
        )

    def _slower(self, begin_s: float) -> float | None:
        """Part by which steps are longer since begin_s; None if there are too few."""
        limits = self._limits
        before = [
            step.step_s
            for step in self._steps
            if begin_s - limits.usual_s < step.end_s <= begin_s
        ]
        since = [
            step.step_s for step in self._steps if step.end_s - step.step_s > begin_s
        ]
        if len(before) < 2 or len(since) < 2:
            return None
        most_s = limits.clip * float(np.median(before))
        usual_s = float(np.minimum(before, most_s).mean())
        return float(np.minimum(since, most_s).mean()) / usual_s - 1
