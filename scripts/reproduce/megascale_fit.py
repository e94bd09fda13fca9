"""Fit the step-time model on two rows of MegaScale's table 2, and simulate the others.

Input: rows of the paper (`scripts.reproduce.megascale_cases`). Output: the two
constants, and simulated steps.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from mjax.estimate.formulas.step_time import StepTime, mfu, simulate
from scripts.reproduce import megascale_cases as paper
from scripts.reproduce.megascale_cases import (
    SYSTEMS,
    Fit,
    Model,
    Row,
    System,
    SystemName,
)

Systems = Mapping[SystemName, System]
FITTED_GPUS = (256, 1024)
"""The fitted MegaScale rows: those of the smaller clusters that differ most in
microbatches. All rows with a batch of 6144 are then predictions.
"""


def solve(rows: Sequence[Row], systems: Systems = SYSTEMS) -> Fit | None:
    """Find the two constants that reproduce the paper's time of two rows.

    Args:
      rows: two of one system. No other row is used.
      systems: how the systems run, without these constants.
    Returns:
      None if that needs an efficiency above 1 or below 0.3, or a fixed time below 0.
    """
    first, second = rows

    def without_fixed_s(row: Row, slowness: float) -> float:
        trial = Fit(product_efficiency=1 / slowness, fixed_s=0.0)
        return simulate_row(row, trial, systems).total_s

    def difference(slowness: float) -> float:
        simulated = [without_fixed_s(row, slowness) for row in rows]
        return (first.step_s - simulated[0]) - (second.step_s - simulated[1])

    slowness = find_zero(difference, 1.0, 1 / 0.3)
    if slowness is None:
        return None
    fixed_s = first.step_s - without_fixed_s(first, slowness)
    if fixed_s < 0:
        return None
    return Fit(product_efficiency=1 / slowness, fixed_s=fixed_s)


def find_zero(
    function: Callable[[float], float], low: float, high: float
) -> float | None:
    """Find the zero of a nearly linear function by secants; None if it is outside.

    A step's time is linear in 1 / efficiency unless transfers outlast the matmuls.
    """
    (x, y), (next_x, next_y) = (low, function(low)), (high, function(high))
    for _ in range(50):
        if abs(next_y) < 1e-12:
            return next_x
        if next_y == y:
            return None
        x, next_x = next_x, next_x - next_y * (next_x - x) / (next_y - y)
        if not low <= next_x <= high:
            return None
        y, next_y = next_y, function(next_x)
    raise RuntimeError(f"no zero found: at {next_x} the function is still {next_y}")


def simulate_model(
    model: Model, system: System, gpus: int, batch: int, fit: Fit
) -> tuple[StepTime, float]:
    """Return the simulated step, and its MFU by the paper's formula."""
    case = paper.make_case(model, system, gpus, batch)
    time = simulate(case, paper.A100, system.constants_for(model, fit))
    flops = paper.flops_per_token(model, system)
    return time, mfu(case, paper.A100, time.total_s, flops)


def simulate_row(row: Row, fit: Fit, systems: Systems = SYSTEMS) -> StepTime:
    """Simulate a row of table 2. Only the layout of the paper's row is used."""
    system = systems[row.system]
    return simulate_model(paper.GPT_175B, system, row.gpus, row.batch, fit)[0]


def errors(rows: Sequence[Row], fit: Fit, systems: Systems = SYSTEMS) -> list[float]:
    """Return the relative error of each row's simulated time."""
    return [simulate_row(row, fit, systems).total_s / row.step_s - 1 for row in rows]


def scaled(name: str, factor: float) -> Systems:
    """Multiply a constant of both systems; a share stays at most 1."""

    def change(system: System) -> System:
        value = factor * getattr(system.constants, name)
        if name.endswith(("_efficiency", "_overlap")):
            value = min(value, 1.0)
        constants = dataclasses.replace(system.constants, **{name: value})
        return dataclasses.replace(system, constants=constants)

    return MappingProxyType({key: change(system) for key, system in SYSTEMS.items()})


def windowed(window: int | None) -> Systems:
    """Give MegaScale another window."""
    changed = dict(SYSTEMS)
    changed["MegaScale"] = dataclasses.replace(changed["MegaScale"], window=window)
    return MappingProxyType(changed)


def fitted_rows(rows: Sequence[Row]) -> list[Row]:
    """Pick the rows that are fitted."""
    return [r for r in rows if r.system == "MegaScale" and r.gpus in FITTED_GPUS]


def largest(values: Sequence[float]) -> float:
    """Return the largest absolute value."""
    return max(map(abs, values))
