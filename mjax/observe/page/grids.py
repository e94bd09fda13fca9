"""Seconds of each phase of each rank in each step, for the heat map.

Input: lines of spans. Output: matrices of ranks and steps. A column is one step. When
there are too many columns, pairs of columns are merged, and a cell is then the mean of
its steps. So memory is bounded for a run of any length.

A phase is the name of a span. Its value is the sum of its spans in a step, for devices
the mean over the devices of the process. Spans outside of steps are ignored.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from mjax.observe.places import DEVICE
from mjax.observe.spans import Header, Line

MOST_CELLS = 2**23
"""Maximum number of cells of a phase, 50 MB. It is enough for 4,096 ranks times 2,048
steps."""
MOST_COLUMNS = 2**14
MOST_PHASES = 32
"""Maximum number of phases. A trainer writes 15."""
_FEW = 64
_MOST_LEAP = 1_000_000
"""Largest accepted jump in steps. A run resumes where it stopped, and one wrong line
must not widen all columns."""


@dataclasses.dataclass(kw_only=True)
class _Grid:
    """Sums and counts of one phase."""

    sum_s: np.ndarray
    """[R, C], float32."""
    count: np.ndarray
    """[R, C], uint16: number of steps that have the phase."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrix:
    """Values of a phase: R ranks, ascending; C columns."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    steps: tuple[int, ...]
    """First step of each column."""
    mean_s: np.ndarray
    """[R, C], float32; NaN marks an absent value."""


class Grids:
    """All phases of a run, which share rows and columns."""

    def __init__(self, most_cells: int = MOST_CELLS) -> None:
        """Start without rows and columns.

        Args:
          most_cells: largest number of cells of a phase.
        """
        self._most_cells = most_cells
        self._grids: dict[str, _Grid] = {}
        self._row_of: dict[int, int] = {}
        self._host_of: dict[int, tuple[int, str]] = {}
        self._begins: dict[int, dict[int, int]] = {}
        self._width = 1
        """Number of steps in a column."""
        self._first: int | None = None
        """Number of the first column: its first step divided by the width."""
        self._used = 0
        """Number of columns in use."""
        self.left_out: set[str] = set()
        """Phases that are ignored, beyond `MOST_PHASES`."""

    @property
    def phases(self) -> list[str]:
        """Names of the phases, in order of arrival."""
        return [*self._grids]

    def add(self, header: Header, lines: Sequence[Line]) -> None:
        """Add lines of a process."""
        rank = header.rank
        found, steps = _collect(header, self._current(header, lines))
        generation, _ = self._host_of.get(rank, (-1, ""))
        if header.generation >= generation:
            self._host_of[rank] = header.generation, header.host
        if not steps:
            return
        row = self._row_of.setdefault(rank, len(self._row_of))
        self._reach(min(steps), max(steps))
        for phase, (at, took_s) in found.items():
            grid = self._grid(phase)
            if grid is None:
                self.left_out.add(phase)
                continue
            columns = np.array(at) // self._width - self._first
            np.add.at(grid.sum_s[row], columns, np.array(took_s, np.float32))
            distinct = np.unique(np.array(at)) // self._width - self._first
            np.add.at(grid.count[row], distinct, 1)

    def matrix(self, phase: str, first: int | None, last: int | None) -> Matrix:
        """Return a phase for a range of steps, both ends included.

        Raises:
          KeyError: there is no such phase.
        """
        grid = self._grids[phase]
        begin = self._first or 0
        low, high = 0, self._used
        if first is not None:
            low = min(max(first // self._width - begin, 0), self._used)
        if last is not None:
            high = max(low, min(last // self._width - begin + 1, self._used))
        ranks = sorted(self._row_of)
        order = np.array([self._row_of[rank] for rank in ranks], int)
        counts = grid.count[order, low:high]
        if self._width == 1:
            counts = np.minimum(counts, 1)
        mean_s = np.full(counts.shape, np.nan, np.float32)
        np.divide(grid.sum_s[order, low:high], counts, out=mean_s, where=counts > 0)
        return Matrix(
            ranks=tuple(ranks),
            hosts=tuple(self._host_of[rank][1] for rank in ranks),
            steps=tuple((begin + at) * self._width for at in range(low, high)),
            mean_s=mean_s,
        )

    def _current(self, header: Header, lines: Sequence[Line]) -> list[Line]:
        """Return the lines of steps that no later start repeated.

        Results of earlier starts for these steps are cleared.
        """
        begins = self._begins.setdefault(header.rank, {})
        end = _MOST_LEAP + ((self._first or 0) + self._used) * self._width
        most = end if self._used else np.inf
        stepped = [line for line in lines if 0 < line.step < most and line.spans]
        if not stepped:
            return []
        later = [at for start, at in begins.items() if start > header.generation]
        end = min(later, default=None)
        if header.generation not in begins:
            begins[header.generation] = first = min(line.step for line in stepped)
            if any(older < header.generation for older in begins):
                self._void(header.rank, first, end)
        return [line for line in stepped if end is None or line.step < end]

    def _void(self, rank: int, first: int, end: int | None) -> None:
        """Clear the steps of a rank from `first` to `end` - 1."""
        row = self._row_of.get(rank)
        if row is None or self._first is None:
            return
        low = max(0, first // self._width - self._first)
        high = None if end is None else max(low, end // self._width - self._first)
        for grid in self._grids.values():
            grid.sum_s[row, low:high] = 0
            grid.count[row, low:high] = 0

    def _grid(self, phase: str) -> _Grid | None:
        """Return the grid of a phase, enlarged if needed; None beyond `MOST_PHASES`."""
        grid = self._grids.get(phase)
        rows = _capacity(len(self._row_of))
        columns = _capacity(self._used)
        if grid is None:
            if len(self._grids) >= MOST_PHASES:
                return None
            grid = self._grids[phase] = _Grid(
                sum_s=np.zeros((rows, columns), np.float32),
                count=np.zeros((rows, columns), np.uint16),
            )
        held_rows, held_columns = grid.sum_s.shape
        if held_rows < len(self._row_of) or held_columns < self._used:
            more = (
                (0, max(0, rows - held_rows)),
                (0, max(0, columns - held_columns)),
            )
            grid.sum_s, grid.count = np.pad(grid.sum_s, more), np.pad(grid.count, more)
        return grid

    def _reach(self, first: int, last: int) -> None:
        """Make room for steps: add columns before or after, or widen all."""
        low, high = first // self._width, last // self._width
        if self._first is None:
            self._first, self._used = low, 1
        low, high = min(low, self._first), max(high, self._first + self._used - 1)
        most = min(MOST_COLUMNS, max(_FEW, self._most_cells // len(self._row_of)))
        while high - low + 1 > most:
            self._widen()
            low = min(first // self._width, self._first)
            high = max(last // self._width, self._first + self._used - 1)
        if low < self._first:
            before = self._first - low
            for grid in self._grids.values():
                wide = ((0, 0), (before, 0))
                grid.sum_s = np.pad(grid.sum_s[:, : self._used], wide)
                grid.count = np.pad(grid.count[:, : self._used], wide)
        self._first, self._used = low, high - low + 1
        for phase in self._grids:
            self._grid(phase)

    def _widen(self) -> None:
        """Merge pairs of columns."""
        assert self._first is not None
        odd = self._first % 2
        used = -(-(self._used + odd) // 2)
        for grid in self._grids.values():
            for name in ("sum_s", "count"):
                old = getattr(grid, name)[:, : self._used]
                if self._width == 1 and name == "count":
                    old = np.minimum(old, 1)
                whole = np.pad(old, ((0, 0), (odd, 2 * used - odd - self._used)))
                new = whole.reshape(len(old), used, 2).sum(axis=2, dtype=old.dtype)
                setattr(grid, name, new)
        self._first, self._used, self._width = self._first // 2, used, 2 * self._width


def _capacity(needed: int) -> int:
    """Return a size with spare room, so that growing is rare."""
    return max(16, needed + needed // 4)


def _collect(
    header: Header, lines: Sequence[Line]
) -> tuple[dict[str, tuple[list[int], list[float]]], list[int]]:
    """Return steps and seconds of spans by phase, and all steps."""
    share = 1e-9 / max(1, len(header.devices))
    found: dict[str, tuple[list[int], list[float]]] = {}
    for line in lines:
        for name, _, stream, start_ns, end_ns in line.spans:
            at = found.get(name)
            if at is None:
                at = found[name] = [], []
            factor = share if stream.startswith(DEVICE) else 1e-9
            at[0].append(line.step)
            at[1].append((end_ns - start_ns) * factor)
    return found, [line.step for line in lines]
