"""Detect link flaps: a port goes down or retrains, or a farther link stops traffic.

Input: increments of counters. Output: one detection for each flap, or for a series of
flaps in quick succession. Two rules:

- link_downed or carrier_changes has grown, or the port is not ACTIVE.
- A burst of retransmissions far above their usual rate; traffic stops, and returns
  within `longest_stall_s`. If it does not return, the run has stopped: no flap.

Source of the second rule: MegaScale, arXiv:2402.15627, on network interface flapping:
packets sent while the link is down are lost. The use of retransmissions is our own
choice: a reliable connection resends lost packets.
"""

import dataclasses
from collections import deque

from mjax.health.watch.counters import Increment
from mjax.health.watch.samples import ACTIVE, Detection
from mjax.health.watch.thresholds import FlapThresholds

RETRANSMISSIONS = ("local_ack_timeout_err", "packet_seq_err")
DOWN = ("link_downed", "carrier_changes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Second:
    """The part of an increment that this detector needs."""

    start_s: float
    end_s: float
    retransmissions: int
    bytes_per_s: float | None


class Flaps:
    """Detects flaps; keeps `history_s` of increments."""

    def __init__(self, thresholds: FlapThresholds) -> None:
        self._limits = thresholds
        self._history: deque[_Second] = deque(maxlen=thresholds.most_kept)
        self._suspect: _Second | None = None
        self.last_s: float | None = None
        """End of the last flap."""

    def feed(self, increment: Increment) -> Detection | None:
        """Return the flap that this increment shows, if any."""
        self._keep(increment)
        down = {name: increment.counts.get(name, 0) for name in DOWN}
        not_active = increment.state is not None and increment.state != ACTIVE
        if any(down.values()) or not_active:
            self._suspect = None
            return self._found(
                increment.start_s,
                increment.end_s,
                float(max(1, *down.values())),
                f"link_downed +{down['link_downed']}, carrier_changes "
                f"+{down['carrier_changes']}, state {increment.state}",
                {f"{name}_count": float(count) for name, count in down.items()},
            )
        return self._stall(increment)

    def _keep(self, increment: Increment) -> None:
        sent = increment.data_bytes
        self._history.append(
            _Second(
                start_s=increment.start_s,
                end_s=increment.end_s,
                retransmissions=sum(
                    increment.counts.get(name, 0) for name in RETRANSMISSIONS
                ),
                bytes_per_s=None if sent is None else sent / increment.duration_s,
            )
        )
        while self._history[0].end_s < increment.end_s - self._limits.history_s:
            self._history.popleft()

    def _stall(self, increment: Increment) -> Detection | None:
        """Return a flap when traffic returns after a burst of retransmissions.

        A burst after which traffic does not return in time is forgotten.
        """
        limits, now_s = self._limits, increment.end_s
        burst = [s for s in self._history if s.end_s > now_s - limits.burst_s]
        before = [s for s in self._history if s.end_s <= now_s - limits.burst_s]
        rates = sorted(s.bytes_per_s for s in before if s.bytes_per_s)
        if not rates:
            return None
        usual = rates[len(rates) // 2]
        if self._suspect is None:
            count = sum(s.retransmissions for s in burst)
            background = sum(s.retransmissions for s in before) / len(before)
            expected = background * len(burst)
            if count < limits.retransmissions + limits.background_ratio * expected:
                return None
            self._suspect = next(s for s in burst if s.retransmissions)
        start_s = self._suspect.start_s
        if now_s - start_s > limits.longest_stall_s:
            self._suspect = None
            self._forget_burst(start_s)
            return None
        during = [s for s in self._history if s.end_s > start_s - limits.lead_s]
        parts = [(s.bytes_per_s or 0.0) / usual for s in during]
        lowest = min(parts)
        after = parts[parts.index(lowest) + 1 :][-limits.back_samples :]
        if len(after) < limits.back_samples or min(after) < limits.back_part:
            return None
        if lowest > limits.stalled_part:
            if now_s - start_s > limits.burst_s:
                self._suspect = None
            return None
        self._suspect = None
        count = sum(s.retransmissions for s in during)
        self._forget_burst(start_s)
        return self._found_stall(start_s, now_s, count, lowest)

    def _found_stall(
        self, start_s: float, now_s: float, count: int, lowest: float
    ) -> Detection | None:
        """Return a flap of a farther link, which the counters `DOWN` do not show."""
        return self._found(
            start_s,
            now_s,
            count / self._limits.retransmissions,
            f"{count} retransmissions while traffic fell to "
            f"{lowest:.0%} of its usual rate and came back",
            {"retransmissions_count": float(count), "lowest_part": lowest},
        )

    def _forget_burst(self, start_s: float) -> None:
        """Set the retransmissions of a judged burst to 0, so that it counts once."""
        self._history = deque(
            (
                dataclasses.replace(s, retransmissions=0) if s.end_s > start_s else s
                for s in self._history
            ),
            maxlen=self._limits.most_kept,
        )

    def _found(
        self,
        start_s: float,
        end_s: float,
        score: float,
        evidence: str,
        numbers: dict[str, float],
    ) -> Detection | None:
        """Return a detection, unless the flap continues the last one."""
        last_s, self.last_s = self.last_s, end_s
        if last_s is not None and start_s - last_s < self._limits.merge_s:
            return None
        return Detection(
            kind="flap",
            onset_s=start_s,
            until_s=end_s,
            score=score,
            evidence=evidence,
            numbers=numbers,
        )
