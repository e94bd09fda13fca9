"""Strength of events: measures, the weakest fault, the strongest disturbance.

Input: a `Run`, and a `Timeline` made from it. Output: the fractions by which the
timeline is slower. `WEAKEST` is the weakest fault that is generated, `STRONGEST_CLEAN`
the strongest disturbance of a healthy series; nothing is generated between the two.
"""

import dataclasses

from tests.health.series_run import Array, Run, Timeline, at


@dataclasses.dataclass(frozen=True, kw_only=True)
class Severity:
    """Strength of the events of a series, measured on the generated data."""

    links_downed: int
    """Number of times that the port went down."""
    longest_stall_s: float
    """Longest delay of traffic by an incident; 0 for a port with nothing to send."""
    most_retransmissions: int
    """Most local_ack_timeout_err and packet_seq_err that one incident counts."""
    rate_loss: float
    """Part of the rate of a burst that is gone in the last tenth of the series."""
    errors: float
    """Rate of symbol errors at the end, as a multiple of the specified rate."""
    step_cost: float
    """Part by which contention and decay lengthen the steps, from onset to offset."""


WEAKEST = Severity(
    links_downed=1,
    longest_stall_s=1.0,
    most_retransmissions=8,
    rate_loss=0.10,
    errors=10.0,
    step_cost=0.10,
)
"""A flap has links_downed, or the stall together with the retransmissions. A decay has
rate_loss or errors. A neighbour has step_cost, for NEIGHBOUR_S at least. All chosen."""

STRONGEST_CLEAN = Severity(
    links_downed=0,
    longest_stall_s=0.3,
    most_retransmissions=3,
    rate_loss=0.03,
    errors=1.0,
    step_cost=0.05,
)
"""Bound of a series without a fault, over all its events. A series with a fault stays
within it in everything that the fault does not affect. All chosen but errors, the bit
error rate of the specification. Saves, restarts and reboots stop the traffic for
longer: the run sends nothing. So a restart may count timeouts (`LOST_PEERS`), and its
pause is longer than STALL_S."""


def step_cost(
    run: Run, healthy: Timeline, timeline: Timeline, span_s: tuple[float, float]
) -> float:
    """Part by which the training steps that begin in a span are longer than healthy."""
    start_s = timeline.start_s[:, 0]
    rows = run.trained & (start_s >= span_s[0]) & (start_s < span_s[1])
    if not rows.any():
        return 0.0
    took = (timeline.end_s[rows, -2] - start_s[rows]).sum()
    usual = (healthy.end_s[rows, -2] - healthy.start_s[rows, 0]).sum()
    return float(took / usual - 1)


def rate_loss(run: Run, own: Array, timeline: Timeline) -> float:
    """Part of the rate of a burst that decay has taken in the last tenth.

    Args:
      own: [G], part of its rate that the port still gives, see `Conditions`.
    """
    rows = timeline.end_s[:, -1] > 0.9 * run.duration_s
    usual = run.burst_s[rows, :-1]
    left = at(own, timeline.start_s[rows, :-1])
    return float(1 - usual.sum() / (usual / left).sum())
