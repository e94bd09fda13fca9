"""Judge a burn: compare the rounds of all measurements with limits. Pure.

Input: the measurements of each round, and limits. Output: a check for each
measurement. One failed round fails the burn, however many rounds passed.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from mjax.health.burn.limits import Limit
from mjax.health.burn.measurements import KINDS, Measured, Outcome, is_within
from mjax.health.burn.result import Check
from mjax.health.findings import State

LEAST_ROUNDS = 8
"""Minimum number of rounds to judge drift. With fewer, the normal approximation of the
null model is poor."""
_NORMAL_95 = 1.96  # two-sided 95% of the normal distribution

LimitsOf = Callable[[Measured], tuple[list[Limit], str]]
"""Returns the limits of a measurement, and why other limits are missing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """One pass over all measurements."""

    begin_s: float
    """Seconds burned before this round."""
    seconds: float
    hardware: str
    results: tuple[Measured, ...]


def judge(
    rounds: Sequence[Round], limits_of: LimitsOf, expected_devices: int | None
) -> tuple[Check, ...]:
    """Return one check for each measurement of a burn, in the order of `KINDS`.

    Args:
      rounds: the rounds in order, at least one.
      limits_of: returns the limits of a measurement.
      expected_devices: number of devices of this host; None: unknown.
    """
    by_round = [{one.name: one for one in each.results} for each in rounds]
    names = dict.fromkeys(name for each in by_round for name in each)
    checks = []
    for name in sorted(names, key=_order):
        series = [_of_round(each, name) for each in by_round]
        if name == "devices":
            checks.append(_devices(rounds, series, expected_devices))
        else:
            checks.append(_judge(name, series, rounds, limits_of))
    return tuple(checks)


def drift(
    times: Sequence[float], values: Sequence[float]
) -> tuple[float, float] | None:
    """Return the drift of values, and the drift expected from noise alone.

    The drift is the change of the least-squares line from the first time to the last,
    in percent of the mean. The null model: the same values in random order. Over all
    orders the slope has mean 0 and variance s^2 / Sxx, where s^2 is the sample variance
    (divisor n - 1) and Sxx the sum of squared deviations of the times. For many rounds
    it is normal (Wald and Wolfowitz 1944, Annals of Mathematical Statistics 15, 358).
    Warm-up and throttling are drift too, whatever their cause.

    Returns:
      drift in percent, and its bound in 95 of 100 random orders; None if there are too
      few rounds, or the times are all equal.
    """
    if len(values) < LEAST_ROUNDS:
        return None
    time, mean = statistics.fmean(times), statistics.fmean(values)
    deviations = [one - time for one in times]
    spread = math.fsum(one * one for one in deviations)
    span = max(times) - min(times)
    if spread == 0 or mean == 0:
        return None
    slope = math.fsum(d * v for d, v in zip(deviations, values, strict=True)) / spread
    null = _NORMAL_95 * statistics.stdev(values) / math.sqrt(spread)
    return 100 * slope * span / mean, 100 * null * span / mean


def _of_round(found: Mapping[str, Measured], name: str) -> Measured | None:
    """Return the result of a measurement in a round; None if another result covers it.

    If a kind could not be measured, one result covers all its parts. Otherwise the
    results of the parts cover the kind.
    """
    if name in found:
        return found[name]
    if any(is_within(other, name) or is_within(name, other) for other in found):
        return None
    return Measured(name=name, outcome="incomplete", note="no result")


def _judge(
    name: str,
    series: Sequence[Measured | None],
    rounds: Sequence[Round],
    limits_of: LimitsOf,
) -> Check:
    """Judge one measurement by its worst round."""
    said = [(i, one) for i, one in enumerate(series) if one is not None]
    values = [(i, x.value) for i, x in said if x.unit and x.value is not None]
    limits, missing = limits_of(said[0][1]) if values else ([], "")

    def first(*outcomes: Outcome) -> str | None:
        """Return the note of the first round with one of these outcomes."""
        bad = [(i, one.note) for i, one in said if one.outcome in outcomes]
        if not bad or len(rounds) == 1:
            return bad[0][1] if bad else None
        return f"round {bad[0][0] + 1} of {len(rounds)}: {bad[0][1]}"

    notes = [*dict.fromkeys(one.note for _, one in said if one.note)][:1]
    notes = [*(one.text for one in limits), *notes, *_statistics(values, rounds)]
    candidates: tuple[tuple[State, str | None], ...] = (
        (State.FAILED, first("wrong", "error")),
        (State.FAILED, _below(values, limits)),
        (State.INCOMPLETE, first("incomplete")),
        (State.UNKNOWN, first("absent")),
        (
            State.UNKNOWN,
            "; ".join([missing, *notes]) if values and not limits else None,
        ),
        (State.OK, "; ".join(notes)),
    )
    state, reason = next(pair for pair in candidates if pair[1] is not None)
    return Check(
        name=name,
        state=state,
        value=min((value for _, value in values), default=None),
        limit=max((one.value for one in limits), default=None),
        reason=reason or "",
        unit=next((one.unit for _, one in said if one.unit), ""),
    )


def _below(values: Sequence[tuple[int, float]], limits: Sequence[Limit]) -> str | None:
    """Return a text on the rounds below a limit; None if all limits are met."""
    for limit in limits:
        low = [(i, value) for i, value in values if not value >= limit.value]
        if low:
            index, value = min(low, key=lambda pair: pair[1])
            text = f"{value:.4g} is below {limit.value:.4g}, {limit.text}"
            if len(values) == 1:
                return text
            count = f"{len(low)} of {len(values)} rounds"
            return f"{count}, the worst is round {index + 1}: {text}"
    return None


def _statistics(
    values: Sequence[tuple[int, float]], rounds: Sequence[Round]
) -> list[str]:
    """Return texts that summarise the values of several rounds."""
    if len(values) < 2:
        return []
    numbers = [value for _, value in values]
    middle = statistics.median(numbers)
    notes = [f"min {min(numbers):.4g}, median {middle:.4g} of {len(numbers)} rounds"]
    times = [rounds[i].begin_s + rounds[i].seconds / 2 for i, _ in values]
    found = drift(times, numbers)
    if found is None:
        return [*notes, f"drift needs {LEAST_ROUNDS} rounds"]
    percent, null = found
    relation = "more" if abs(percent) > null else "no more"
    return [
        *notes,
        f"drift {percent:+.1f} % from first to last, {relation} than noise (up to "
        f"{null:.1f} % in 95 of 100 random orders)",
    ]


def _devices(
    rounds: Sequence[Round], series: Sequence[Measured | None], expected: int | None
) -> Check:
    """Check that all required devices are present, the same in every round."""
    base = _judge("devices", series, rounds, lambda _: ([], ""))
    if base.state is not State.OK:
        return base
    counts = [int(one.value or 0) for one in series if one is not None]
    limit = None if expected is None else float(expected)
    base = dataclasses.replace(base, value=float(min(counts)), limit=limit)
    first, state, reason = rounds[0].hardware, base.state, base.reason
    other = next((i for i, one in enumerate(rounds) if one.hardware != first), None)
    if other is not None:
        found = rounds[other].hardware
        state, reason = (
            State.FAILED,
            f"round {other + 1} found {found}, the first {first}",
        )
    elif {*counts} - {counts[0] if expected is None else expected}:
        state, reason = State.FAILED, f"{reason}; expected {expected or counts[0]}"
    elif expected is None:
        state = State.UNKNOWN
        reason = f"{reason}; give --expect-devices for the required number"
    return dataclasses.replace(base, state=state, reason=reason)


def _order(name: str) -> int:
    """Return a sort key: the index of the kind; results of a kind keep their order."""
    return next(
        (i for i, kind in enumerate(KINDS) if is_within(name, kind)), len(KINDS)
    )
