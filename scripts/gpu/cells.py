"""Numbers and outcomes as cells of a table."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

_WHY_LENGTH = 80


def fixed(number: float | None, digits: int) -> str:
    """Format a number; None is a dash."""
    return "-" if number is None else f"{number:.{digits}f}"


def outcome(row: Mapping[str, Any], field: str, digits: int) -> str:
    """Format a field of a row, or return the status of a row without it."""
    if not row:
        return "-"
    if row["status"] == "ok":
        return fixed(row[field], digits)
    why = row["why"].splitlines()[0] if row["why"] else ""
    return f"{row['status']}: {why[:_WHY_LENGTH]}"


def geometric_mean(numbers: Sequence[float]) -> float | None:
    """Return the geometric mean; None of an empty list."""
    if not numbers:
        return None
    return math.exp(sum(map(math.log, numbers)) / len(numbers))
