"""The heat map as bytes, one for each cell.

Input: a matrix of seconds. Output: 4 bytes with the length of a header, the header as
JSON, and a byte for each cell, row by row. 255 is no value; 0 to 254 are linear between
`lo` and `hi`. Rare extreme cells outside of this range get the nearer end of the scale.
`least` and `most` in the header give the full range.
"""

import json
import struct
from collections.abc import Sequence

import numpy as np

from mjax.observe.page.grids import Matrix

ABSENT = 255
_LEVELS = 254
_TAIL = 0.005
"""Fraction of the cells beyond each end of the scale. The first steps of a start take a
hundred times as long, and would make all others look alike."""
_ROOM = 2.0
"""The scale extends to at least this multiple of the median, or to the largest value if
that is smaller. One slow host among 4,096 ranks has far fewer cells than the fraction
above, but must be visible."""
_SAMPLE = 200_000
"""Number of cells sampled to compute the ends. That takes 10 ms."""


def encode(matrix: Matrix, phase: str, phases: Sequence[str]) -> bytes:
    """Return the answer for one phase."""
    ms = matrix.mean_s * np.float32(1e3)
    low, high, least, most = _scale(ms)
    header = {
        "phases": [*phases],
        "phase": phase,
        "ranks": [*matrix.ranks],
        "hosts": [*matrix.hosts],
        "steps": [*matrix.steps],
        "lo": low,
        "hi": high,
        "unit": "ms",
        "least": least,
        "most": most,
    }
    return _join(header, _levels(ms, low, high).tobytes())


def empty(phases: Sequence[str]) -> bytes:
    """Return the answer if there are no values."""
    lists = {name: [] for name in ("ranks", "hosts", "steps")}
    ends = dict.fromkeys(("lo", "hi", "least", "most"), 0.0)
    header = {"phases": [*phases], "phase": "", **lists, **ends, "unit": "ms"}
    return _join(header, b"")


def _join(header: dict[str, object], cells: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<I", len(text)) + text + cells


def _scale(ms: np.ndarray) -> tuple[float, float, float, float]:
    """Return the ends of the scale, and the smallest and largest value."""
    known = ms[np.isfinite(ms)]
    if not known.size:
        return 0.0, 0.0, 0.0, 0.0
    # An odd stride samples all columns and rows evenly.
    sample = known[:: max(1, known.size // _SAMPLE) | 1]
    low, middle, high = np.quantile(sample, [_TAIL, 0.5, 1 - _TAIL])
    least, most = float(known.min()), float(known.max())
    high = max(float(high), min(most, _ROOM * float(middle)))
    return float(low), high, least, most


def _levels(ms: np.ndarray, low: float, high: float) -> np.ndarray:
    width = max(high - low, 1e-9)
    scaled = np.rint((ms - np.float32(low)) * np.float32(_LEVELS / width))
    scaled = np.clip(scaled, 0, _LEVELS)
    return np.where(np.isnan(scaled), ABSENT, scaled).astype(np.uint8)
