"""Convert the stamps of a device to spans on the clock of its host.

Input: the log of one step (`mjax.kernels.stamp`), and the times at which the host
dispatched the step and received its metrics. Output: one span for each interval between
two rows, and one for the optimizer, from the last row to the metrics.

The clock of a device has 32 bits and its own zero. A step begins after its dispatch,
and its last row is written before the host receives the metrics. So each step bounds
the offset from both sides; the bounds are tightest if the device was idle. The bounds
of many steps are combined; older ones are widened by `MOST_DRIFT` of their age.
"""

import dataclasses
import itertools
from collections import deque

import numpy as np
from jaxtyping import Int32

from mjax.observe.clocks import MOST_DRIFT
from mjax.observe.spans import Kind, Span

UNIT_NS = 2**8
"""Nanoseconds per unit of the clock in a log."""
_WRAP_NS = 2**32 * UNIT_NS

INTERVALS: dict[int, tuple[str, Kind]] = {
    1: ("forward", "compute"),
    2: ("backward", "compute"),
    3: ("tick", "compute"),
    4: ("norm", "dp"),
}
"""Name and kind of the interval that ends at a row, by the row's tag
(`mjax.step.stamps`)."""
_BEGIN, _BACKWARD, _TICK = 0, 2, 3
_BESIDE_TICKS = {(_BEGIN, _TICK): 1, (_TICK, _BACKWARD): _TICK}
"""Exceptions to the rule that an interval has the tag of its later row: from (tag of
the earlier row, tag of the later row) to the tag of the interval. A tick writes its row
when it begins: the interval before the first such row is not a tick, and the interval
after the last one is."""
_MOST_BOUNDS = 64
"""Number of steps that bound the offset. Drift makes older ones useless."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bounds:
    """Bounds of host clock minus device clock, from one step."""

    time_ns: int
    least_ns: int
    most_ns: int


class DeviceClock:
    """Converts the clock of one device to that of its host."""

    def __init__(self, *, is_host_clock: bool) -> None:
        """Start without an offset.

        Args:
          is_host_clock: whether the device reads the clock of the host, as CPUs do.
        """
        self._is_host_clock = is_host_clock
        self._bounds: deque[_Bounds] = deque(maxlen=_MOST_BOUNDS)
        self._offset_ns = 0

    def spans(
        self,
        log: Int32[np.ndarray, "rows 2"],
        device: int,
        *,
        dispatched_ns: int,
        ready_ns: int,
    ) -> list[Span]:
        """Return the spans of a step; none if the log has fewer than two rows.

        Args:
          log: log of this device.
          device: number of the device in the mesh.
          dispatched_ns: a time before the host dispatched the step.
          ready_ns: a time after the host received the metrics of the step.
        """
        rows = log[1 : 1 + min(int(log[0, 0]), len(log) - 1)]
        if len(rows) < 2:
            return []
        clock_ns = self._unwrap(rows[:, 1], ready_ns)
        if not self._is_host_clock:
            self._bound(clock_ns, dispatched_ns, ready_ns)
        times_ns = [int(time_ns) + self._offset_ns for time_ns in clock_ns]
        found = []
        tags: list[int] = rows[:, 0].tolist()
        for number, pair in enumerate(itertools.pairwise(tags)):
            tag = _BESIDE_TICKS.get(pair, pair[1])
            name, kind = INTERVALS.get(tag, (f"tag {tag}", "compute"))
            start_ns, end_ns = times_ns[number], times_ns[number + 1]
            found.append(Span(name, kind, f"device:{device}", start_ns, end_ns))
        end_ns = max(ready_ns, times_ns[-1])
        stream = f"device:{device}"
        return [*found, Span("optimizer", "optimizer", stream, times_ns[-1], end_ns)]

    def _unwrap(self, clocks: Int32[np.ndarray, " rows"], ready_ns: int) -> list[int]:
        """Return the device's clock readings in ns, with wraps undone.

        On the host's clock, the last reading is just before `ready_ns`.
        """
        units = clocks.view(np.uint32).astype(np.int64)
        passed = np.diff(units, prepend=units[:1]) % 2**32
        since_ns = (np.cumsum(passed) * UNIT_NS).tolist()
        first_ns = int(units[0]) * UNIT_NS
        if not self._is_host_clock and not self._bounds:
            self._offset_ns = ready_ns - first_ns - since_ns[-1]
        last_ns = first_ns + since_ns[-1]
        # The host gets the metrics shortly after the last row, and the error of the
        # offset is much less than half a wrap. So the difference of the two times,
        # rounded, is the number of wraps.
        num_wraps = round((ready_ns - self._offset_ns - last_ns) / _WRAP_NS)
        return [first_ns + num_wraps * _WRAP_NS + ns for ns in since_ns]

    def _bound(self, clock_ns: list[int], dispatched_ns: int, ready_ns: int) -> None:
        self._bounds.append(
            _Bounds(
                time_ns=ready_ns,
                least_ns=dispatched_ns - clock_ns[0],
                most_ns=ready_ns - clock_ns[-1],
            )
        )
        drift = {b: int(MOST_DRIFT * (ready_ns - b.time_ns)) for b in self._bounds}
        least_ns = max(b.least_ns - drift[b] for b in self._bounds)
        most_ns = min(b.most_ns + drift[b] for b in self._bounds)
        self._offset_ns = (least_ns + most_ns) // 2
