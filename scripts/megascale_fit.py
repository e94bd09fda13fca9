"""Fit the step-time model on two rows of MegaScale's table 2, and simulate the others.

Enters: rows of the paper (`scripts.megascale_cases`). Leaves: the two constants, and
simulated steps.
"""

from collections.abc import Callable, Sequence

from mjax.sim.step_time import StepTime, mfu, simulate
from scripts import megascale_cases as paper
from scripts.megascale_cases import Fit, Model, Row, System

FITTED_GPUS = (256, 1024)
"""The MegaScale rows that are fitted: of the smaller clusters, those that differ most
in microbatches. All rows with a batch of 6144 are then predictions."""


def solve(rows: Sequence[Row]) -> Fit | None:
    """Find the two constants that make the simulated time of two rows the paper's.

    Args:
      rows: two of one system. No other row is seen.
    Returns:
      None if that takes an efficiency outside of 0.3 to 1, or a fixed time below 0.
    """
    first, second = rows

    def without_fixed_s(row: Row, efficiency: float) -> float:
        trial = Fit(product_efficiency=efficiency, fixed_s=0.0)
        return simulate_row(row, trial).total_s

    def difference(efficiency: float) -> float:
        simulated = [without_fixed_s(row, efficiency) for row in rows]
        return (first.step_s - simulated[0]) - (second.step_s - simulated[1])

    efficiency = find_zero(difference, 0.3, 1.0)
    if efficiency is None:
        return None
    fixed_s = first.step_s - without_fixed_s(first, efficiency)
    if fixed_s < 0:
        return None
    return Fit(product_efficiency=efficiency, fixed_s=fixed_s)


def find_zero(
    function: Callable[[float], float], low: float, high: float
) -> float | None:
    """Halve an interval until it is a zero; None if the ends have the same sign."""
    falls = function(low) > 0
    if falls == (function(high) > 0):
        return None
    for _ in range(60):  # to the spacing of float64
        middle = (low + high) / 2
        if (function(middle) > 0) == falls:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def simulate_model(
    model: Model, system: System, gpus: int, batch: int, fit: Fit
) -> tuple[StepTime, float]:
    """Return the simulated step, and its MFU by the paper's formula."""
    case = paper.make_case(model, system, gpus, batch)
    time = simulate(case, paper.A100, system.constants_for(model, fit))
    flops = paper.flops_per_token(model, system)
    return time, mfu(case, paper.A100, time.total_s, flops)


def simulate_row(row: Row, fit: Fit) -> StepTime:
    """Simulate a row of table 2. Of the paper's row only the layout is used."""
    system = paper.SYSTEMS[row.system]
    return simulate_model(paper.GPT_175B, system, row.gpus, row.batch, fit)[0]


def errors(rows: Sequence[Row], fit: Fit) -> list[float]:
    """Return the relative error of each row's simulated time."""
    return [simulate_row(row, fit).total_s / row.step_s - 1 for row in rows]


def fitted_rows(rows: Sequence[Row]) -> list[Row]:
    """Pick the rows that are fitted."""
    return [r for r in rows if r.system == "MegaScale" and r.gpus in FITTED_GPUS]


def largest(values: Sequence[float]) -> float:
    """Return the largest absolute value."""
    return max(map(abs, values))
