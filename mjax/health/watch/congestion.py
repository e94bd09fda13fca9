"""Measure how much the fabric delays the traffic of a port, in time bins.

Input: increments of counters. Output: congestion events and traffic of each bin.

- InfiniBand: port_xmit_wait, the ticks in which data waited for credits, per second in
  which the port sends. They are not counted per byte, because a port that has lost
  lanes waits longer for each byte without any congestion.
- Ethernet: rp_cnp_handled, the notifications that slow this sender down, per byte.
  np_cnp_sent is not used: the port itself sends these notifications, also if its own
  receive queue is slow.

Source of the meanings: Linux, Documentation/ABI/stable/sysfs-class-infiniband
(port_xmit_wait), commit e1f24a79f424 (counters of mlx5). Source of their rise when jobs
share a link: CASSINI, arXiv:2308.00852. The unit does not matter, because a port is
only compared with itself.
"""

from collections import deque

import numpy as np
from jaxtyping import Float

from mjax.health.watch.counters import Increment
from mjax.health.watch.samples import Port
from mjax.health.watch.thresholds import CongestionThresholds

INFINIBAND = "port_xmit_wait"
ETHERNET = "rp_cnp_handled"

type Array = np.ndarray


class Congestion:
    """Counts events in bins of equal length; keeps `most_bins` of them."""

    def __init__(self, port: Port, thresholds: CongestionThresholds) -> None:
        """Start with no bins.

        Args:
          port: determines the counter to read.
          thresholds: thresholds, which give the length and the number of bins.
        """
        self._limits = thresholds
        self._infiniband = port.link_layer == "InfiniBand"
        self._wire_bytes_per_s = port.data_bytes_per_s
        self._start_s: float | None = None
        self._bins: deque[tuple[int, float, float]] = deque(maxlen=thresholds.most_bins)

    def feed(self, increment: Increment) -> None:
        """Add an increment to the bin in which it ends."""
        name = INFINIBAND if self._infiniband else ETHERNET
        if increment.data_bytes is None or name not in increment.counts:
            return
        if self._start_s is None:
            self._start_s = increment.start_s
        index = int((increment.end_s - self._start_s) // self._limits.bin_s)
        traffic_s = increment.data_bytes / self._wire_bytes_per_s
        if self._infiniband:
            sends = traffic_s > self._limits.sends_part * increment.duration_s
            traffic_s = increment.duration_s if sends else 0.0
        if not self._bins or self._bins[-1][0] != index:
            self._bins.append((index, 0.0, 0.0))
        _, events, seconds = self._bins[-1]
        self._bins[-1] = (
            index,
            events + increment.counts[name],
            seconds + traffic_s,
        )

    @property
    def floor(self) -> float:
        """Lower bound of a rate, in events per second of traffic."""
        limits = self._limits
        return limits.least_wait_ticks if self._infiniband else limits.least_marks

    def bins(self) -> tuple[float, Float[Array, "B"], Float[Array, "B"]]:
        """Return the start of the first bin, the events of each bin, and its traffic.

        Traffic is in seconds: for InfiniBand, the time in which the port sends; for
        Ethernet, the time that the sent bytes take at the wire rate.
        """
        if self._start_s is None:
            return 0.0, np.zeros(0), np.zeros(0)
        index, events, seconds = np.array(self._bins).T
        index = index.astype(int)
        first = index[0]
        start_s = self._start_s + first * self._limits.bin_s
        return (
            float(start_s),
            np.bincount(index - first, events),
            np.bincount(index - first, seconds),
        )
