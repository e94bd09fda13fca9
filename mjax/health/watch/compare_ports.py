"""Compare the traffic timing of the ports of a host.

Input: a `StepTraffic` for each port. Output: the period of each port, if known, and a
detection for each port that differs from the others: it has no period, another period,
or sends at another time of the step. Each port is compared with the median of the
others, so one bad port does not make the good ones look bad; the periods of at least
`least_ports` must be known. Source of the idea: MegaScale, arXiv:2402.15627, on the
traffic of a training job.

    z_s = sum over samples of segment s of rate * exp(-2 pi i h t / step)
    phase of two ports = angle of sum over s of z_s * conj(z'_s)

h is the strongest harmonic of the step.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from mjax.health.watch.period import HARMONICS, Period, Steps, Traffic
from mjax.health.watch.samples import Detection
from mjax.health.watch.step_traffic import PortPeriod, StepTraffic
from mjax.health.watch.thresholds import PeriodThresholds

type Block = tuple[list[Traffic], Steps]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of the ports of a host."""

    known: Mapping[str, PortPeriod]
    unlike: Mapping[str, Detection]
    """Maps a port that differs from the others to a detection with the reason."""


def compare(
    ports: Mapping[str, StepTraffic], now_s: float, limits: PeriodThresholds
) -> Comparison:
    """Compare the ports of a host.

    Args:
      ports: traffic of each port, by name.
      now_s: time of the comparison.
      limits: thresholds.
    """
    known = {name: port.summary() for name, port in ports.items()}
    unlike: dict[str, Detection] = {}
    found = {name: one.period for name, one in known.items() if _periodic(one)}
    seen = {name: period for name, period in found.items() if period is not None}
    blocks = {name: port.traffic() for name, port in ports.items()}
    in_step = {
        name: block
        for name, block in blocks.items()
        if block is not None and known[name].verdict in _IN_STEP and name in seen
    }
    phases = _phases(in_step, limits)
    for name, one in known.items():
        others = [period for other, period in seen.items() if other != name]
        if len(others) + 1 < limits.least_ports:
            continue
        reason = _reason(one, others, limits)
        if reason is None and name in phases:
            reason = _late(phases[name], limits)
        if reason is not None:
            text, numbers = reason
            block = blocks[name]
            onset_s = now_s if block is None else float(block[0][0].start_s[0])
            unlike[name] = Detection(
                kind="unlike_others",
                onset_s=min(onset_s, now_s),
                until_s=now_s,
                score=max(1.0, numbers.pop("score")),
                evidence=text,
                numbers=numbers,
            )
    return Comparison(known=known, unlike=unlike)


_IN_STEP = ("with the step", "an alias of the step")


def _periodic(one: PortPeriod) -> bool:
    """Return whether a period was found in the samples, not only in windows."""
    return one.verdict in (*_IN_STEP, "unlike the step", "unknown step")


def _reason(
    one: PortPeriod, others: Sequence[Period], limits: PeriodThresholds
) -> tuple[str, dict[str, float]] | None:
    """Return (text, numbers) if a port's period differs from the other periods."""
    periods_s = np.array([each.period_s for each in others])
    usual_s = float(np.median(periods_s))
    strength = float(np.median([each.strength for each in others]))
    spread = float(np.median(np.abs(periods_s / usual_s - 1)))
    numbers = {"others_period_s": usual_s, "others_strength": strength}
    if one.verdict == "no period" and one.period is not None:
        part = one.period.strength / max(strength, 1e-9)
        if strength < limits.least_strength or part >= limits.lost_part:
            return None
        text = (
            f"no period, {one.period.strength:.0%} of the variance; the others repeat "
            f"every {usual_s:.3g} s with {strength:.0%} (median)"
        )
        score = limits.lost_part / max(part, 0.01)
        return text, numbers | {"strength": one.period.strength, "score": score}
    if one.period is None or not _periodic(one):
        return None
    away = abs(one.period.period_s / usual_s - 1)
    most = max(limits.period_part, limits.most_spreads * spread)
    if away <= most:
        return None
    text = (
        f"traffic repeats every {one.period.period_s:.3g} s, that of the others every "
        f"{usual_s:.3g} s (median)"
    )
    return text, numbers | {"period_s": one.period.period_s, "score": away / most}


def _late(
    phase: tuple[float, float, float], limits: PeriodThresholds
) -> tuple[str, dict[str, float]] | None:
    """Return (text, numbers) if a port's phase differs from the other phases."""
    cycles, spread, unit_s = phase
    most = max(limits.phase_cycles, limits.most_spreads * spread)
    if abs(cycles) <= most:
        return None
    text = (
        f"traffic comes {cycles * unit_s:+.3g} s later than that of the others "
        f"(median), {cycles:+.2f} of {unit_s:.3g} s"
    )
    return text, {"late_s": cycles * unit_s, "score": abs(cycles) / most}


def _phases(
    blocks: Mapping[str, Block], limits: PeriodThresholds
) -> dict[str, tuple[float, float, float]]:
    """Compare the phases of the ports.

    Returns:
      for each port: its phase relative to the others and the spread of this phase, both
      in cycles, and the seconds of a cycle. Ports whose traffic is not coherent with
      the traffic of most others are absent.
    """
    if len(blocks) < limits.least_ports:
        return {}
    names = list(blocks)
    steps = blocks[names[0]][1]
    step_s = float(np.median(steps.step_s))
    from_s = max(block[0][0].start_s[0] for block in blocks.values())
    until_s = min(block[0][-1].end_s[-1] for block in blocks.values())
    num = int((until_s - from_s) / (limits.phase_steps * step_s))
    if num < limits.least_phase_segments:
        return {}
    edges_s = np.linspace(from_s, until_s, num + 1)
    z = np.stack([_amplitudes(blocks[name][0], edges_s, step_s) for name in names])
    harmonic = int(np.argmax((np.abs(z) ** 2).sum((0, 1))))
    z = z[:, :, harmonic]
    size = np.sqrt((np.abs(z) ** 2).sum(1))
    cross = z @ z.conj().T / np.maximum(size[:, None] * size, 1e-30)
    out = {}
    for row, name in enumerate(names):
        others = np.delete(cross[row], row)
        if float(np.median(np.abs(others))) < limits.least_coherence:
            continue
        cycles = -np.angle(others) / (2 * np.pi)
        middle = _circular_median(cycles)
        spread = float(np.median(np.abs(_wrapped(cycles - middle))))
        out[name] = (middle, spread, step_s / (harmonic + 1))
    return out


def _amplitudes(
    parts: Sequence[Traffic], edges_s: np.ndarray, step_s: float
) -> np.ndarray:
    """Return the complex amplitudes of the step's harmonics in each segment, [S, H]."""
    middle_s = np.concatenate([(part.start_s + part.end_s) / 2 for part in parts])
    rate = np.concatenate([part.rate for part in parts])
    rate = rate / max(float(np.abs(rate).max()), 1e-30)
    hz = np.arange(1, HARMONICS + 1) / step_s
    out = np.zeros((len(edges_s) - 1, HARMONICS), complex)
    bounds = np.searchsorted(middle_s, edges_s)
    for row, (first, last) in enumerate(itertools.pairwise(bounds)):
        if last - first >= 4:
            values = rate[first:last] - rate[first:last].mean()
            angle = 2j * np.pi * (middle_s[first:last, None] - edges_s[0]) * hz
            out[row] = values @ np.exp(-angle)
    return out


def _circular_median(cycles: np.ndarray) -> float:
    """Return the angle, in cycles, with the smallest sum of distances to all angles."""
    away = np.abs(_wrapped(cycles[:, None] - cycles)).sum(1)
    return float(cycles[int(np.argmin(away))])


def _wrapped(cycles: np.ndarray) -> np.ndarray:
    """Return angles between -0.5 and 0.5."""
    return cycles - np.round(cycles)
