"""Thresholds of the detectors, with units and where each is from.

"Tuned" means: chosen on series of `TUNING_SEEDS` of tests/health/series.py on
2026-11-23, never on those that are reported. "Severity" means the weakest fault and the
strongest disturbance that tests/health/series_severity.py names.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlapThresholds:
    """See `mjax.health.watch.flaps`."""

    retransmissions: int = 7
    """Of one burst. Severity: a dip has at most 3, a flap at least 8."""
    background_ratio: float = 4.0
    """Times the expected retransmissions. Tuned: rising symbol errors cost some too."""
    burst_s: float = 6.0
    """Time in which a burst comes. Tuned."""
    lead_s: float = 2.0
    """Traffic may stop before the first retransmission is read. Tuned."""
    longest_stall_s: float = 15.0
    """Beyond it the run itself has stopped. Tuned: restarts take 20 s and more."""
    stalled_part: float = 0.55
    """Part of the usual rate; a stall of 1 s empties half of one sample. Severity."""
    back_part: float = 0.2
    """Part of the usual rate at which traffic has come back. Tuned."""
    back_samples: int = 2
    """In a row, that show that traffic is back. Tuned: the second in which a run ends
    is half full."""
    history_s: float = 120.0
    """For the usual rates. Chosen: many steps, and little memory."""
    most_kept: int = 600
    """Increments. Chosen: `history_s` at 5 samples a second."""
    merge_s: float = 15.0
    """Between flaps that count as one. Chosen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CongestionThresholds:
    """See `mjax.health.watch.congestion`."""

    bin_s: float = 20.0
    """Tuned: a step or more in most runs, and short against a neighbour of 150 s."""
    recent_bins: int = 2
    """That are compared with the usual. Tuned."""
    least_bins: int = 3
    """Before anything is usual. Tuned."""
    most_bins: int = 90
    """Kept. Chosen: half an hour."""
    usual_quantile: float = 0.4
    """Of the bins. Tuned: pulses of contention lie above it."""
    least_traffic_s: float = 0.5
    """Of traffic in a bin; a bin with less says nothing. Tuned."""
    least_wait_ticks: float = 1000.0
    """A second of traffic, InfiniBand: less is taken for this much. Tuned."""
    least_marks: float = 0.5
    """A second of traffic, Ethernet: less is taken for this much. Tuned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NeighbourThresholds:
    """See `mjax.health.watch.neighbours`."""

    begin_ratio: float = 2.5
    """Congestion, times the usual, at which an episode begins. Tuned."""
    mean_ratio: float = 3.0
    """Of the whole episode, for a neighbour. Tuned."""
    end_ratio: float = 1.7
    """Below which it ends. Tuned."""
    end_s: float = 80.0
    """Time below end_ratio that ends it. Tuned."""
    least_s: float = 60.0
    """Of an episode before it is judged. Severity: a neighbour loads for 150 s."""
    usual_s: float = 300.0
    """Of steps before the episode that are usual. Chosen: a neighbour takes as long."""
    slower_part: float = 0.07
    """By which steps are longer. Severity: 0.05 is healthy, 0.10 is not."""
    clip: float = 2.5
    """Times the usual step; a longer one counts as this. Tuned: restarts, saves."""
    slow_burst_part: float = 0.9
    """Of the usual rate of bursts; a window below it is slow. Tuned."""
    even_part: float = 0.8
    """A window whose bursts differ by more is slow. Tuned."""
    slow_windows_part: float = 0.25
    """Part of the windows in an episode that are slow. Tuned."""
    least_windows: int = 2
    """In an episode; with less it is judged blind. Tuned."""
    usual_windows: int = 6
    """Before the episode. Tuned."""
    most_windows: int = 100
    """Kept of an episode. Chosen."""
    most_s: float = 400.0
    """Of an episode; one that is no neighbour's by then is given up. Tuned."""
    blind_s: float = 150.0
    """Of an episode without windows before it is judged. Severity."""
    blind_ratio: float = 5.0
    """Congestion without windows, times the usual. Tuned."""
    blind_slower_part: float = 0.10
    """By which steps are longer if no window was taken. Tuned."""
    most_kept: int = 4000
    """Steps. Chosen: half an hour of steps of 0.5 s."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplanationThresholds:
    """See `mjax.health.watch.explain`."""

    drift_part: float = 0.03
    """Of the rate, over the windows. Severity: 0.03 is healthy."""
    slow_part: float = 0.07
    """Of windows that are slow by themselves. Tuned."""
    loaded_part: float = 0.6
    """Of windows that are slow under the load of a neighbour. Tuned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecayThresholds:
    """See `mjax.health.watch.decay`."""

    busy_part: float = 0.1
    """Of the rate of the wire, below which a gap of milliseconds is quiet. Tuned."""
    least_windows: int = 6
    """That are explained. Tuned: there are 9 to 60 in a series."""
    most_windows: int = 128
    """Kept. Chosen: more than `judge_s` has at one each 20 s."""
    judge_s: float = 1800.0
    """Between judgements; the end of the run is one too. Chosen: a decay is slow."""
    burst_std: float = 0.03
    """Of the logarithm of the rate of a burst. Tuned."""
    most_bursts: int = 6
    """That count as independent in a window. Tuned."""
    class_std: float = 0.004
    """More for each class in a window. Tuned."""
    window_std: float = 0.008
    """More for each window. Tuned."""
    cut_std: float = 0.06
    """Of a burst that is cut off: its phase is unknown. Tuned."""
    same_size_part: float = 0.05
    """By which sizes of one class differ. Tuned."""
    most_bursts_kept: int = 64
    """Of a window. Chosen: bounds the memory, few have more."""
    over_nothing: float = 4.0
    """Logarithm of the likelihood ratio to nothing. Tuned."""
    over_neighbour: float = 4.0
    """The same to a neighbour. Tuned."""
    over_found_neighbour: float = 14.0
    """The same if congestion and steps say neighbour too. Tuned."""
    found_congestion: float = 6.0
    """Times the usual, from which that counts. Tuned: a port with one lane of four
    waits 4 times as long by itself."""
    errors_s: float = 90.0
    """In which symbol errors are counted. Tuned."""
    most_samples: int = 450
    """Kept. Chosen: `errors_s` at 5 samples a second."""
    dropped_samples: int = 4
    """The highest of them are left out: single bursts of errors are healthy. Tuned."""
    errors_ratio: float = 4.0
    """Times the specified rate. Severity: 1 is healthy, 10 is not."""
    least_errors: int = 8
    """In `errors_s`, to be more than chance. Tuned: low rates of slow ports."""
    around_flap_s: float = 10.0
    """After a flap, in which errors are those of the flap. Tuned."""
    rearm_s: float = 600.0
    """Until a decay that goes on is reported again. Chosen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Of all detectors."""

    longest_gap_s: float = 10.0
    """Between samples, beyond which a reset is a reboot. Chosen."""
    flaps: FlapThresholds = FlapThresholds()
    congestion: CongestionThresholds = CongestionThresholds()
    neighbours: NeighbourThresholds = NeighbourThresholds()
    explanations: ExplanationThresholds = ExplanationThresholds()
    decay: DecayThresholds = DecayThresholds()
