"""Rate of the bursts in a window of millisecond samples.

Input: a `Window`. Output: the rate of the port while it sends.

A gap is the time between two reads. A read is late by a fraction of its gap, so a
single gap is unreliable. Successive gaps in which the port sends form a burst. Its
first and last gap are excluded from the rate, since the burst may begin and end inside
them: the rate is the bytes of the inner gaps over their time. The size of the burst
includes them.
"""

import dataclasses

import numpy as np

from mjax.health.watch.samples import WORD_BYTES, Port, Window

LEAST_GAPS = 2
"""Minimum number of whole gaps in a burst. The lateness of a read is too large a part
of one gap."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Burst:
    """A burst of a window."""

    rate: float
    """Rate as a fraction of the wire rate."""
    length_s: float
    """Time of the inner gaps."""
    size_s: float | None
    """Size of the burst, as seconds at the full wire rate; None if the window cuts it
    off."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bursts:
    """The bursts of one window."""

    each: tuple[Burst, ...]

    @property
    def rate(self) -> float:
        """Rate over the time of all bursts, as a fraction of the wire rate."""
        sent = sum(each.rate * each.length_s for each in self.each)
        return sent / sum(each.length_s for each in self.each)


def find_bursts(port: Port, window: Window, busy_part: float) -> Bursts | None:
    """Return the bursts of a window that are long enough; None if there is none.

    The result is also None if the counter was reset in the window.

    Args:
      port: port of the window.
      window: reads of its byte counter.
      busy_part: fraction of the wire rate below which a gap is quiet.
    """
    words = np.diff(window.port_xmit_data.astype(np.int64))
    if port.data_counter_bits == 32:
        words %= 2**32
    gap_s = np.diff(window.time_s)
    if not len(gap_s) or (words < 0).any():
        return None
    busy = words * WORD_BYTES > busy_part * port.data_bytes_per_s * gap_s
    edges = np.flatnonzero(np.diff(np.concatenate(([False], busy, [False]))))
    kept = edges[1::2] - edges[::2] >= LEAST_GAPS + 2
    starts, ends = edges[::2][kept], edges[1::2][kept]
    if not len(starts):
        return None
    sent_s = np.concatenate(([0], np.cumsum(words))) * WORD_BYTES
    sent_s = sent_s / port.data_bytes_per_s
    length_s = window.time_s[ends - 1] - window.time_s[starts + 1]
    rates = (sent_s[ends - 1] - sent_s[starts + 1]) / length_s
    whole = (starts > 0) & (ends < len(busy))
    sizes = sent_s[ends] - sent_s[starts]
    return Bursts(
        each=tuple(
            Burst(rate=rate, length_s=length, size_s=size if uncut else None)
            for rate, length, size, uncut in zip(
                rates.tolist(),
                length_s.tolist(),
                sizes.tolist(),
                whole.tolist(),
                strict=True,
            )
        )
    )
