"""Limits of a measurement: a fraction of a peak, or of the median of other hosts.

Input: baselines in TOML, and the results of other hosts. Output: the limits for a
measurement's name.
"""

import dataclasses
import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from mjax import checked_json
from mjax.cli import flags
from mjax.health.burn.measurements import KINDS, Measured, is_within, unit_of
from mjax.health.burn.result import Result

BASELINES = Path(__file__).with_name("baselines.toml")
LEAST_HOSTS = 3
"""Minimum number of hosts for a median. With 2, a slow host pulls the median halfway
down."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit:
    """Smallest value that is ok."""

    value: float
    text: str
    """Origin of the limit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peak values of one model of device."""

    device_kind: str
    source: str
    peak: Mapping[str, float]
    """Peak value by kind, in the unit of `unit_of`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baselines:
    """Required values of each hardware."""

    fraction: Mapping[str, float]
    """Required fraction of the peak, by kind."""
    hardware: tuple[Peaks, ...]

    def __post_init__(self) -> None:
        names = [*self.fraction, *(kind for one in self.hardware for kind in one.peak)]
        for name in names:
            if name not in KINDS:
                near = flags.nearest(name, KINDS)
                raise ValueError(f"unknown measurement {name}; the nearest is {near}")
        for name, fraction in self.fraction.items():
            if not 0 < fraction <= 1:
                raise ValueError(
                    f"fraction of {name} must be in (0, 1], got {fraction}"
                )
        for one in self.hardware:
            for name, peak in one.peak.items():
                if not (math.isfinite(peak) and peak > 0):
                    raise ValueError(
                        f"peak of {name} must be positive, got {peak} for "
                        f"{one.device_kind}"
                    )
        kinds = [one.device_kind for one in self.hardware]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
        if twice is not None:
            raise ValueError(f"device_kind {twice} is listed twice; remove one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Others:
    """Values of other hosts with the same hardware."""

    values: Mapping[str, Sequence[float]]
    """Values by name of the measurement."""
    fraction: float
    left_out: int = 0
    """Number of hosts with other hardware."""


def read_baselines(path: Path = BASELINES) -> Baselines:
    """Read a file of baselines.

    Raises:
      ValueError: it cannot be read or is not valid; the message names the file.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        return checked_json.check(found, Baselines, "")
    except (OSError, ValueError) as error:
        raise ValueError(f"--baselines {path}: {error}") from error


def check_results(results: Sequence[Result]) -> None:
    """Raise if results of other hosts cannot be compared.

    Raises:
      ValueError: a host appears twice, or a value is not in the unit of `unit_of`.
    """
    names = [result.host for result in results]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"--compare has host {twice} twice; give one file per host")
    for result in results:
        for check in result.checks:
            if check.unit not in ("", unit_of(check.name)):
                raise ValueError(
                    f"--compare: {check.name} of {result.host} is in {check.unit}, "
                    f"expected {unit_of(check.name)}; measure it with this version"
                )


def others(
    results: Sequence[Result], host: str, hardware: str, fraction: float
) -> Others:
    """Collect the values of other hosts with the same hardware.

    Args:
      results: results of other hosts; a result of this host is ignored.
      host: name of this host.
      hardware: hardware of this host; results of other hardware are ignored.
      fraction: required fraction of their median.
    """
    values: dict[str, list[float]] = {}
    foreign = [one for one in results if one.host != host]
    same = [one for one in foreign if one.hardware == hardware]
    for result in same:
        for check in result.checks:
            if check.value is not None and check.unit:
                values.setdefault(check.name, []).append(check.value)
    return Others(values=values, fraction=fraction, left_out=len(foreign) - len(same))


def limits(
    measured: Measured, hardware: str, baselines: Baselines, others: Others
) -> tuple[list[Limit], str]:
    """Return the limits of a measurement, and why other limits are missing.

    Args:
      measured: result of the measurement in any round.
      hardware: model of the device, as jax names it.
      baselines: baselines of all hardware.
      others: values of hosts with the same hardware.
    """
    found, missing = [], []
    kind = next((kind for kind in KINDS if is_within(measured.name, kind)), "")
    peaks = next((p for p in baselines.hardware if p.device_kind == hardware), None)
    peak = None if peaks is None else peaks.peak.get(kind)
    fraction = baselines.fraction.get(kind)
    if peak is None or fraction is None:
        missing.append(f"no baseline for {hardware}")
    else:
        text = f"{fraction:g} of the peak {peak:g} of {hardware}"
        found.append(Limit(value=fraction * peak, text=text))
    values = others.values.get(measured.name, [])
    if len(values) < LEAST_HOSTS:
        missing.append(
            f"{len(values)} other hosts to compare with, {LEAST_HOSTS} are needed"
            + (f" ({others.left_out} have other hardware)" if others.left_out else "")
        )
    else:
        median = statistics.median(values)
        text = f"{others.fraction:g} of the median {median:.4g} of {len(values)} hosts"
        found.append(Limit(value=others.fraction * median, text=text))
    return found, "; ".join(missing)
