"""Split token sequences into batches of fixed shape, and return scores in order.

A *window* is the input of the model: n consecutive tokens and, for each, the next token
if this window scores it. Windows of a sequence begin every `stride` tokens. Each token
is scored exactly once, in the first window that can predict it. In that window, at
least `length - stride` tokens precede it, or all earlier tokens of the sequence if
there are fewer.

Several windows share a row. Segments keep attention within each window, and positions
restart. All batches have the same shape, so one program is compiled.

Source: sliding windows as in Baevski and Auli 2019, arXiv:1809.10853, section 5.1.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Int32

from mjax.data.samples import NO_TARGET

FIELDS = ("tokens", "targets", "segments", "positions")
"""Names of the arrays of a batch, each int32 [B, T]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Consecutive tokens of a sequence."""

    tokens: Int32[np.ndarray, "n"]
    scored: Int32[np.ndarray, "n"]
    """The tokens to score; NO_TARGET for context tokens."""
    begins: bool
    """Whether a new sequence begins here. Its first token has no context and cannot be
    scored."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Input of the model."""

    tokens: Int32[np.ndarray, "n"]
    targets: Int32[np.ndarray, "n"]
    """The next token of each position; NO_TARGET if this window does not score it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Position of a window in a batch."""

    row: int
    start: int
    length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """A batch and the positions of its windows, in the order of arrival."""

    arrays: dict[str, Int32[np.ndarray, "B T"]]
    places: tuple[Place, ...]


def check(length: int, stride: int) -> None:
    """Refuse an invalid length or stride.

    Raises:
      ValueError: length or stride is out of range.
    """
    if length < 1:
        raise ValueError(f"--seq-len must be at least 1, got {length}")
    if not 1 <= stride <= length:
        raise ValueError(
            f"--stride must be from 1 to --seq-len {length}, got {stride}: a larger "
            "one would skip tokens"
        )


def windows_of(
    pieces: Iterable[Piece], *, length: int, stride: int
) -> Iterator[Window]:
    """Split sequences into windows; hold one window and one piece at a time.

    Args:
      pieces: pieces of the sequences, in order.
      length: maximum number of tokens of a window.
      stride: tokens between the starts of windows, at most `length`. If it equals
        `length`, the model computes every token once, which costs least.
    """
    check(length, stride)
    sequence = _Sequence(length, stride)
    for piece in pieces:
        if piece.begins:
            yield from sequence.rest()
            sequence = _Sequence(length, stride)
        sequence.add(piece)
        yield from sequence.full()
    yield from sequence.rest()


class _Sequence:
    """The part of a sequence that later windows still need."""

    def __init__(self, length: int, stride: int) -> None:
        self._length, self._stride = length, stride
        self._tokens = self._scored = np.zeros(0, np.int32)
        # Number of targets in the buffer that an earlier window has scored. The buffer
        # begins at the start of the next window.
        self._num_done = 0

    def add(self, piece: Piece) -> None:
        self._tokens = np.concatenate([self._tokens, piece.tokens])
        self._scored = np.concatenate([self._scored, piece.scored])

    def full(self) -> Iterator[Window]:
        """Yield the windows that further tokens cannot change."""
        start = 0
        while len(self._tokens) - start > self._length:
            yield from self._next(start)
            start += self._stride
        self._tokens, self._scored = self._tokens[start:], self._scored[start:]

    def rest(self) -> Iterator[Window]:
        """Yield the remaining window of a complete sequence, if any.

        There is at most one, because full windows were yielded before.
        """
        if len(self._tokens) - 1 > self._num_done:
            yield from self._next(0)

    def _next(self, start: int) -> Iterator[Window]:
        """Yield the window at an offset of the buffer if it scores any token."""
        part = slice(start, start + self._length + 1)
        tokens, targets = self._tokens[part][:-1], self._scored[part][1:].copy()
        targets[: self._num_done] = NO_TARGET
        self._num_done = len(tokens) - self._stride
        if (targets != NO_TARGET).any():
            yield Window(tokens=tokens, targets=targets)


def pack(windows: Iterable[Window], *, num_rows: int, row_len: int) -> Iterator[Packed]:
    """Pack windows into batches of one shape, each into the first row with space.

    Args:
      windows: windows of at most row_len tokens.
      num_rows: B.
      row_len: T.
    Raises:
      ValueError: a window is longer than a row.
    """
    batch = _Batch(num_rows, row_len)
    for window in windows:
        if not batch.take(window):
            yield batch.packed()
            batch = _Batch(num_rows, row_len)
            if not batch.take(window):
                raise ValueError(
                    f"a window of {len(window.tokens)} tokens is longer than a row of "
                    f"{row_len}"
                )
    if batch.places:
        yield batch.packed()


class _Batch:
    """A batch that is being filled."""

    def __init__(self, num_rows: int, row_len: int) -> None:
        shape = (num_rows, row_len)
        self.places: list[Place] = []
        self._used = [0] * num_rows
        self._num_windows = [0] * num_rows
        self._tokens = np.zeros(shape, np.int32)
        self._targets = np.full(shape, NO_TARGET, np.int32)
        self._segments = np.zeros(shape, np.int32)
        self._positions = np.zeros(shape, np.int32)

    def take(self, window: Window) -> bool:
        """Put a window into the first row with space; return False if there is none."""
        size, row_len = len(window.tokens), self._tokens.shape[1]
        rows = (r for r, used in enumerate(self._used) if used + size <= row_len)
        row = next(rows, None)
        if row is None:
            return False
        start = self._used[row]
        part = slice(start, start + size)
        self._tokens[row, part] = window.tokens
        self._targets[row, part] = window.targets
        self._segments[row, part] = self._num_windows[row]
        self._positions[row, part] = np.arange(size)
        self._used[row] += size
        self._num_windows[row] += 1
        self.places.append(Place(row=row, start=start, length=size))
        return True

    def packed(self) -> Packed:
        """Return the batch; the rest of a row is a segment without targets."""
        for row, used in enumerate(self._used):
            self._segments[row, used:] = self._num_windows[row]
            self._positions[row, used:] = np.arange(self._tokens.shape[1] - used)
        arrays = (self._tokens, self._targets, self._segments, self._positions)
        return Packed(
            arrays=dict(zip(FIELDS, arrays, strict=True)), places=tuple(self.places)
        )
