"""Keep the rows of metrics.jsonl in columns, and thin them for charts.

Input: rows, one for each step. Output: columns of numbers for all steps, or for as
many as a chart needs. Thinning keeps the last rows, and before them the smallest and
the largest value of each part of a run, at their own steps.
"""

import array
import bisect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

MOST_COLUMNS = 40
"""Maximum number of columns. A row of the trainer has 15 fields."""
MOST_NOTED = 1000
_LAST = 0.1
"""Fraction of the rows kept by thinning that are the last ones of the run. A page
requests 2,000 rows and computes medians of 200."""
_MOST_STEP = 2**53


class Rows:
    """Growing columns. A later row of a step replaces the earlier one."""

    def __init__(self) -> None:
        self.revision = 0
        """Number of times that rows were replaced; row numbers from before are then
        void."""
        self._steps = array.array("q")
        self._columns: dict[str, array.array] = {}
        self.nonfinite: dict[int, str] = {}
        """Fields that were not finite, by step."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._steps)

    def clear(self) -> None:
        """Forget all rows."""
        self.revision += 1
        self._steps = array.array("q")
        self._columns = {}
        self.nonfinite = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row; a row without a step is ignored."""
        step = row.get("step")
        if type(step) is not int or not 0 <= step < _MOST_STEP:
            return
        self._note(step, row.get("nonfinite"))
        for name, value in row.items():
            if name == "step" or type(value) not in (int, float):
                continue
            if name not in self._columns and len(self._columns) < MOST_COLUMNS:
                nothing = [math.nan] * len(self._steps)
                self._columns[name] = array.array("d", nothing)
        at = len(self._steps)
        if at and self._steps[-1] >= step:
            self.revision += 1
            at = bisect.bisect_left(self._steps, step)
            if self._steps[at] == step:
                for name, column in self._columns.items():
                    column[at] = _float(row.get(name))
                return
        self._steps.insert(at, step)
        for name, column in self._columns.items():
            column.insert(at, _float(row.get(name)))

    def _note(self, step: int, told: Any) -> None:
        """Record the fields that were not finite, whose values are null."""
        self.nonfinite.pop(step, None)
        if isinstance(told, Mapping) and len(self.nonfinite) < MOST_NOTED:
            words = [f"{name} is {value}" for name, value in told.items()]
            self.nonfinite[step] = ", ".join(words)

    @property
    def newest_step(self) -> int:
        """The step of the last row; 0 if there is none."""
        return self._steps[-1] if self._steps else 0

    def step(self, number: int) -> int:
        """Return the step of a row; 0 if there is none."""
        return self._steps[number] if number < len(self._steps) else 0

    def copy(self, first: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return rows from number `first` on: steps, and columns with NaN if absent."""
        steps = np.array(self._steps[first:], np.int64)
        return steps, {
            name: np.array(column[first:], np.float64)
            for name, column in self._columns.items()
        }


def _float(value: Any) -> float:
    if type(value) not in (int, float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def thin(
    steps: np.ndarray, columns: Mapping[str, np.ndarray], points: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Thin rows, but keep the smallest and the largest value of each part.

    The last tenth of the kept rows are the consecutive last rows of the run: for these,
    charts compute means and medians, which would be wrong over extremes only.

    Args:
      steps: [T].
      columns: [T] each; NaN is absent.
      points: largest number of rows to keep.
    Returns:
      steps and columns of the kept rows, at most `points`, with unchanged values.
    """
    if len(steps) <= points:
        return steps, dict(columns)
    last = int(_LAST * points)
    num, points = len(steps) - last, points - last
    # Keep two rows for each part and column, and the first and last row.
    parts = max(1, (points - 2) // max(1, 2 * len(columns)))
    width = -(-num // parts)
    kept = {0, num - 1}
    for values in columns.values():
        padded = np.full(parts * width, np.nan)
        padded[:num] = np.where(np.isfinite(values[:num]), values[:num], np.nan)
        table = padded.reshape(parts, width)
        has = np.flatnonzero(~np.isnan(table).all(axis=1))
        if len(has):
            for found in (np.nanargmin(table[has], 1), np.nanargmax(table[has], 1)):
                kept.update((has * width + found).tolist())
    at = np.array(sorted(kept))
    if len(at) > points:  # more columns than points
        at = at[np.linspace(0, len(at) - 1, max(points, 1)).astype(int)]
    at = np.concatenate([at, np.arange(num, len(steps))])
    return steps[at], {name: values[at] for name, values in columns.items()}


def as_json(steps: np.ndarray, columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return rows for programs; numbers that are not finite become null."""
    return {
        "steps": steps.tolist(),
        "columns": {
            name: [value if math.isfinite(value) else None for value in values.tolist()]
            for name, values in columns.items()
        },
    }
