"""How much the fabric holds the traffic of a port up, against what is usual for it.

Enters: increments of counters. Leaves: congestion per second of traffic over the last
bins, divided by its usual value. Counters: port_xmit_wait (InfiniBand: ticks in which
data waited for credits), CNPs and ECN marks (RoCE). Source of the meanings: Linux,
Documentation/ABI/stable/sysfs-class-infiniband (port_xmit_wait), commit e1f24a79f424
(counters of mlx5). That they rise when jobs share a link: CASSINI, arXiv:2308.00852.

The unit does not matter, because the port is only compared with itself.
"""

from collections import deque

import numpy as np

from mjax.health.watch.counters import Increment
from mjax.health.watch.samples import Port
from mjax.health.watch.thresholds import CongestionThresholds

INFINIBAND = ("port_xmit_wait",)
ETHERNET = ("rp_cnp_handled", "np_cnp_sent", "np_ecn_marked_roce_packets")


class Congestion:
    """Compares a port with itself; keeps `most_bins` bins."""

    def __init__(self, port: Port, thresholds: CongestionThresholds) -> None:
        self._limits = thresholds
        infiniband = port.link_layer == "InfiniBand"
        self._names = INFINIBAND if infiniband else ETHERNET
        self._floor = (
            thresholds.least_wait_ticks if infiniband else thresholds.least_marks
        )
        self._wire_bytes_per_s = port.data_bytes_per_s
        self._bins: deque[tuple[float, float]] = deque(maxlen=thresholds.most_bins)
        self._last: deque[tuple[float, float]] = deque(maxlen=thresholds.recent_bins)
        self._open = [0.0, 0.0]
        self._open_until_s: float | None = None

    def feed(self, increment: Increment, usual: bool) -> bool:
        """Add an increment; return whether it has closed a bin.

        Args:
          increment: of the counters.
          usual: the bin counts for what is usual.
        """
        if increment.data_bytes is None:
            return False
        if self._open_until_s is None:
            self._open_until_s = increment.start_s + self._limits.bin_s
        self._open[0] += sum(increment.counts.get(name, 0) for name in self._names)
        self._open[1] += increment.data_bytes / self._wire_bytes_per_s
        if increment.end_s < self._open_until_s:
            return False
        self._open_until_s = increment.end_s + self._limits.bin_s
        events, traffic_s = self._open
        self._open = [0.0, 0.0]
        if traffic_s < self._limits.least_traffic_s:
            return False
        self._last.append((events, traffic_s))
        if usual:
            self._bins.append((events, traffic_s))
        return True

    @property
    def ratio(self) -> float | None:
        """Congestion of the last bins divided by the usual; None until it is known."""
        if len(self._bins) < self._limits.least_bins:
            return None
        each = [events / traffic_s for events, traffic_s in self._bins]
        usual = max(float(np.quantile(each, self._limits.usual_quantile)), self._floor)
        events = sum(bin[0] for bin in self._last)
        return events / sum(bin[1] for bin in self._last) / usual
