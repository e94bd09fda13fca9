"""Rate of the bursts in one window of milliseconds.

Enters: a `Window`. Leaves: the rate that the port reaches while it sends.

A read is late by a part of its gap, so single gaps say little. Gaps in a row in which
the port sends form a burst; its first and last gap are cut, since the burst may begin
and end inside them. The rate of a burst is its bytes divided by its time.
"""

import dataclasses

import numpy as np

from mjax.health.watch.samples import WORD_BYTES, Port, Window

LEAST_GAPS = 2
"""Whole gaps in a burst. Chosen: one gap is late by too large a part of itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bursts:
    """The bursts of one window."""

    rate: float
    """Part of the wire that a fifth of the time in bursts exceeds."""
    evenness: float
    """Rate that four fifths of the time exceed, divided by `rate`; at most 1."""


def find_bursts(port: Port, window: Window, busy_part: float) -> Bursts | None:
    """Return the rates of the bursts in a window, None if it has no whole burst.

    Args:
      port: of the window.
      window: reads of its byte counter.
      busy_part: of the rate of the wire; a gap below it is quiet.
    """
    words = np.diff(window.port_xmit_data.astype(np.int64))
    if port.data_counter_bits == 32:
        words %= 2**32
    gap_s = np.diff(window.time_s)
    if not len(gap_s) or (words < 0).any():
        return None
    busy = words * WORD_BYTES > busy_part * port.data_bytes_per_s * gap_s
    edges = np.flatnonzero(np.diff(np.concatenate(([False], busy, [False]))))
    starts, ends = edges[::2] + 1, edges[1::2] - 1
    kept = ends - starts >= LEAST_GAPS
    starts, ends = starts[kept], ends[kept]
    if not len(starts):
        return None
    sent = np.concatenate(([0], np.cumsum(words)))
    length_s = window.time_s[ends] - window.time_s[starts]
    rates = (sent[ends] - sent[starts]) * WORD_BYTES / length_s / port.data_bytes_per_s
    order = np.argsort(rates)
    share = np.cumsum(length_s[order]) / length_s.sum()
    low, high = rates[order][np.searchsorted(share, [0.2, 0.8])]
    return Bursts(rate=float(high), evenness=float(low / high))
