"""Increments of counters, without false counts from wraps, resets or missing samples.

Input: `Sample`s, one by one. Output: an `Increment` for each sample but the first.

- A 32-bit byte counter that goes down has wrapped, unless another counter was reset.
- Any other counter that goes down was reset to 0. Its count since then is the
  increment, unless samples are missing: after a reboot the count includes the port's
  start.
"""

import dataclasses
from collections.abc import Mapping

from mjax.health.watch.samples import WORD_BYTES, Port, Sample

DATA = "port_xmit_data"
WRAPPING = frozenset({"port_xmit_data", "port_rcv_data"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Increment:
    """The events between two samples."""

    start_s: float
    end_s: float
    counts: Mapping[str, int]
    """Increments by counter, at least 0. A counter that is absent from either sample is
    absent."""
    data_bytes: int | None
    """Bytes sent; None if unknown: the counter was reset, or may have wrapped twice."""
    reset: bool
    """Whether at least one counter was reset to 0."""
    state: int | None
    """State of the port at the end."""

    @property
    def duration_s(self) -> float:
        """Time between the samples."""
        return self.end_s - self.start_s


class Counters:
    """Converts samples of one port to increments; keeps one sample."""

    def __init__(self, port: Port, longest_gap_s: float) -> None:
        """Start with no sample.

        Args:
          port: port of the samples, which gives the width of the byte counters.
          longest_gap_s: time between samples above which a reset is taken for a reboot.
        """
        self._port = port
        self._longest_gap_s = longest_gap_s
        self._last: Sample | None = None

    def feed(self, sample: Sample) -> Increment | None:
        """Return the increment since the last sample, None for the first.

        Raises:
          ValueError: the time does not increase.
        """
        last, self._last = self._last, sample
        if last is None:
            return None
        if sample.time_s <= last.time_s:
            self._last = last
            raise ValueError(
                f"samples must be in time order, got {sample.time_s} s after "
                f"{last.time_s} s: sort them, and use a clock that does not jump"
            )
        names = last.counters.keys() & sample.counters.keys()
        changes = {name: sample.counters[name] - last.counters[name] for name in names}
        gap = sample.time_s - last.time_s > self._longest_gap_s
        reset = {
            name
            for name, change in changes.items()
            if change < 0 and not (name in WRAPPING and self._wraps)
        }
        counts = {
            name: (0 if gap else sample.counters[name]) if name in reset else change
            for name, change in changes.items()
            if name not in WRAPPING
        }
        return Increment(
            start_s=last.time_s,
            end_s=sample.time_s,
            counts=counts,
            data_bytes=self._data_bytes(
                changes.get(DATA), sample.time_s - last.time_s, bool(reset)
            ),
            reset=bool(reset),
            state=sample.state,
        )

    @property
    def _wraps(self) -> bool:
        return self._port.data_counter_bits == 32

    def _data_bytes(
        self, change: int | None, elapsed_s: float, reset: bool
    ) -> int | None:
        """Return the bytes sent; None if the counter does not determine them."""
        most_words = self._port.data_bytes_per_s / WORD_BYTES * elapsed_s
        if change is None or (change < 0 and reset):
            return None
        if self._wraps:
            if most_words >= 2**32:
                return None
            change %= 2**32
        if change < 0 or change > 1.5 * most_words:
            return None
        return change * WORD_BYTES
