"""Thresholds of the detectors, with units and sources.

"Tuned" means: chosen on the series with `TUNING_SEEDS` of tests/health/series.py on
2026-11-23, never on reported series. "Swept" lists other values that were tried on
seeds 600 to 799: the number of errors stayed between 10 and 12. "Severity" refers to
the weakest fault and the strongest disturbance in tests/health/series_severity.py.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlapThresholds:
    """Thresholds of `mjax.health.watch.flaps`."""

    retransmissions: int = 7
    """Minimum retransmissions of a burst. Severity: a dip has at most 3, a flap at
    least 8."""
    background_ratio: float = 4.0
    """Minimum multiple of the expected retransmissions. Tuned: rising symbol errors
    cause some too."""
    burst_s: float = 6.0
    """Duration of a burst. Tuned."""
    lead_s: float = 2.0
    """Time by which traffic may stop before the first retransmission is read. Tuned."""
    longest_stall_s: float = 15.0
    """Duration of a stall above which the run itself has stopped. Tuned: restarts take
    20 s and more."""
    stalled_part: float = 0.55
    """Fraction of the usual rate below which traffic has stopped; a stall of 1 s
    empties half of one sample. Severity."""
    back_part: float = 0.2
    """Fraction of the usual rate at which traffic has returned. Tuned."""
    back_samples: int = 2
    """Number of successive samples that show that traffic has returned. Tuned: the
    second in which a run ends is half full."""
    history_s: float = 120.0
    """Time over which usual rates are computed. It covers many steps, and needs little
    memory."""
    most_kept: int = 600
    """Number of increments kept. It covers `history_s` at 5 samples a second."""
    merge_s: float = 15.0
    """Maximum time between flaps that are reported as one. Not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CongestionThresholds:
    """Thresholds of `mjax.health.watch.congestion`."""

    bin_s: float = 20.0
    """Length of a bin. It is at least a step in most runs, and short compared with a
    neighbour of 150 s."""
    most_bins: int = 180
    """Number of bins kept. The bins cover an hour, which is `judge_s` twice."""
    sends_part: float = 0.02
    """Fraction of the wire rate above which the port counts as sending. It is above
    monitoring traffic."""
    least_wait_ticks: float = 500.0
    """Lower bound of the ticks per second, InfiniBand. 0.5 ms of 1 us ticks delay no
    step."""
    least_marks: float = 0.5
    """Lower bound of the marks per second of traffic, Ethernet. It is a few marks in a
    bin."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeighbourThresholds:
    """Thresholds of `mjax.health.watch.neighbours`. Logarithms are natural."""

    over_nothing: float = 4.0
    """Minimum log-likelihood ratio to no fault. Tuned."""
    contradiction: float = -2.0
    """Log-likelihood ratio below which one sign contradicts a neighbour. On seeds 600
    to 999 no sign of a reported neighbour is below -0.4."""
    decay_weight: float = 3.0
    """Weight of congestion if a decay explains the bursts too. Tuned: a harmless load
    rarely begins just when the port becomes slower. On seeds 1400 to 1999, 600 series
    of each kind, 8 neighbours are missed with 3 and 14 with 2, and 10 decays with
    both."""
    least_s: float = 100.0
    """Minimum length of a span. Severity: 150 s, with partly loaded bins at both
    ends."""
    outside_s: float = 60.0
    """Minimum time outside the span. It gives three bins to compare with."""
    usual_s: float = 300.0
    """Time on each side of a span whose steps count as usual. It is similar to the
    length of a neighbour."""
    clip: float = 2.5
    """Multiple of the median step at which steps are clipped. Restarts and saves take
    longer than that."""
    congested_ratios: tuple[float, float] = (0.4, 5.7)
    """Bounds of the logarithm of the congestion ratio under a neighbour. They are 1.5
    to 300 times the usual ratio."""
    congestion_std: float = 0.25
    """Deviation of the ratio of long spans. Not measured. Swept: 0.15 and 0.4."""
    bin_std: float = 0.8
    """Deviation of one bin. Congestion comes in clumps. Swept: 0.4 and 1.2."""
    fitting_part: float = 0.15
    """Fraction of spans with a harmless load from another job. Such a load is
    common."""
    fitting_ratios: tuple[float, float] = (-1.0, 2.3)
    """Bounds of the logarithm of the congestion ratio under a harmless load. The upper
    one is 10 times the usual ratio."""
    least_traffic_s: float = 1.0
    """Minimum traffic inside and outside the span to judge congestion. Not measured."""
    slower_steps: tuple[float, float] = (0.06, 1.0)
    """Bounds of the relative increase of the step time. Severity: 0.05 is healthy, 0.10
    is not."""
    steps_std: float = 0.02
    """Deviation of the ratio of many steps. Not measured. Swept: 0.01 and 0.03."""
    step_std: float = 0.15
    """Deviation of one step. Evaluations and saves change single steps. Swept: 0.08."""
    other_part: float = 0.25
    """Fraction of spans with another reason for longer or shorter steps. Slow hosts and
    new batch sizes are common."""
    other_steps: tuple[float, float] = (-0.7, 1.0)
    """Bounds of the relative change of the step time for another reason. They cover a
    factor of two, and lost connections."""
    pace_std: float = 0.05
    """Deviation of the logarithm of a window's rate: windows see different phases of a
    step. Tuned; swept 0.03 to 0.08, and 0.08 misses neighbours."""
    least_windows: int = 3
    """Minimum number of windows to judge the rate. Not measured."""
    most_windows: int = 180
    """Number of windows kept. The windows cover an hour at one every 20 s."""
    most_steps: int = 4000
    """Number of steps kept. The steps cover half an hour if they take 0.5 s, and an
    hour or more if they take longer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplanationThresholds:
    """Thresholds of `mjax.health.watch.explain`."""

    drift_part: float = 0.03
    """Healthy drift of the rate over the windows. Severity: 0.03 is healthy."""
    slow_part: float = 0.07
    """Fraction of windows that are slow for their own reason. Saves and contention
    affect a few windows in a hundred."""
    loaded_part: float = 0.6
    """Fraction of windows that are slow under the load of a neighbour. Another job
    sends for 0.3 to 0.9 of its step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecayThresholds:
    """Thresholds of `mjax.health.watch.decay`."""

    busy_part: float = 0.1
    """Fraction of the wire rate below which a gap of milliseconds is quiet. Tuned."""
    least_windows: int = 6
    """Minimum number of windows to explain. Tuned: there are 9 to 60 in a series."""
    most_windows: int = 128
    """Number of windows kept. It is more than `judge_s` has at one window every 20
    s."""
    judge_s: float = 1800.0
    """Time between judgements; there is also one at the end of the run. A decay is
    slow."""
    burst_std: float = 0.03
    """Deviation of the logarithm of a burst's rate. The lateness of reads is a few
    percent of a burst."""
    most_bursts: int = 6
    """Number of bursts that count as independent in a window. Tuned."""
    class_std: float = 0.004
    """Additional deviation of each class in a window. The rate of a phase is the same
    in all steps."""
    window_std: float = 0.008
    """Additional deviation of each window. Temperature and routes change the rate;
    0.014 misses weak decays."""
    cut_std: float = 0.06
    """Deviation of a burst that is cut off. Its phase is unknown, and the rates of
    phases differ by up to 15%."""
    same_size_part: float = 0.05
    """Maximum relative difference of sizes in a class. Monitoring and uploads add a few
    percent; 0.02 gives as many errors."""
    most_bursts_kept: int = 64
    """Number of bursts kept of a window. It bounds the memory, and few windows have
    more."""
    over_nothing: float = 7.0
    """Minimum log-likelihood ratio to no fault. Tuned."""
    errors_s: float = 90.0
    """Time over which symbol errors are counted. Tuned."""
    most_samples: int = 450
    """Number of samples kept. It covers `errors_s` at 5 samples a second."""
    dropped_samples: int = 4
    """Number of highest samples ignored: single error bursts are healthy. Tuned."""
    errors_ratio: float = 4.0
    """Multiple of the specified rate. Severity: 1 is healthy, 10 is not."""
    least_errors: int = 8
    """Minimum errors in `errors_s`, to exceed chance. Tuned: low rates of slow
    ports."""
    around_flap_s: float = 10.0
    """Time after a flap in which errors belong to the flap. Tuned."""
    rearm_s: float = 600.0
    """Time until a continuing decay is reported again. Not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeriodThresholds:
    """Thresholds of `mjax.health.watch.step_traffic`. "Tuned" means here: on the clean
    series of seeds 600 to 799."""

    block_s: float = 240.0
    """Length of the block that is judged together. A loss is reported some minutes
    later."""
    block_steps: float = 24.0
    """Minimum length of the block in steps. It is a segment of `period.PERIODS`."""
    judge_s: float = 60.0
    """Time between judgements. Not measured."""
    least_part: float = 0.5
    """Minimum fraction of the block with successive steps. Not measured."""
    least_steps: int = 8
    """Minimum number of steps in the block. Not measured."""
    least_samples: int = 64
    """Minimum number of samples without steps. It is one short segment."""
    most_samples: int = 2400
    """Number of samples kept. It covers `block_s` at 10 samples a second."""
    most_steps: int = 1200
    """Number of steps kept. It covers `block_s` of steps of 0.2 s."""
    log10_periodic: float = -4.0
    """Log10 of the false-alarm probability below which traffic is periodic. A periodic
    judgement is evidence, not an alarm; an alarm needs `least_usual` of them, and then
    a loss."""
    log10_lost: float = -5.0
    """Log10 of the false-alarm probability above which traffic may have lost its
    period. Tuned: traffic of another job resembles any step a little."""
    log10_unlike: float = -8.0
    """Maximum log10 of the false-alarm probability of a period other than the step.
    Tuned."""
    least_strength: float = 0.1
    """Usual strength, or strength of another period, below which nothing is reported.
    Tuned."""
    lost_part: float = 0.25
    """Fraction of the usual strength below which the period is lost. Tuned."""
    least_usual: int = 3
    """Minimum number of periodic judgements. Not measured."""
    most_usual: int = 30
    """Number of judgements kept. It covers half an hour."""
    least_times: int = 2
    """Number of successive judgements that must see the loss. Not measured."""
    bin_s: float = 0.05
    """Length of a bin of a window. It is shorter than single bursts, and longer than
    the lateness of reads."""
    most_bins: int = 256
    """Number of bins in a window. It is one segment."""
    most_windows: int = 16
    """Number of windows kept. Not measured."""
    least_windows: int = 4
    """Minimum number of windows to fit. Not measured."""
    window_steps: float = 2.0
    """Minimum number of steps in a window for its period to be visible. Not
    measured."""
    compare_s: float = 1800.0
    """Time between comparisons of the ports of a host. The same as `judge_s` of a
    decay."""
    least_ports: int = 3
    """Minimum number of ports with a period, including the judged one. Two do not show
    which one differs."""
    period_part: float = 0.05
    """Minimum relative difference of a port's period. It is above
    `period.TOLERANCE`."""
    most_spreads: float = 4.0
    """Minimum difference of a port, in median deviations of the other ports. Not
    measured."""
    phase_cycles: float = 0.1
    """Minimum difference of a port's phase. Not measured."""
    phase_steps: float = 4.0
    """Number of steps in a segment whose phase is measured. It is small because steps
    vary."""
    least_phase_segments: int = 4
    """Minimum number of segments for a phase. Fewer may agree by chance."""
    least_coherence: float = 0.5
    """Minimum coherence of a port with most other ports; below it, a phase is
    meaningless. Not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Thresholds of all detectors."""

    longest_gap_s: float = 10.0
    """Time between samples above which a reset is taken for a reboot. Not measured."""
    flaps: FlapThresholds = FlapThresholds()
    congestion: CongestionThresholds = CongestionThresholds()
    neighbours: NeighbourThresholds = NeighbourThresholds()
    explanations: ExplanationThresholds = ExplanationThresholds()
    decay: DecayThresholds = DecayThresholds()
    periods: PeriodThresholds = PeriodThresholds()
