"""Token sequences in, rows of fixed size out, and the scores back in their order.

A *window* is what the model sees at once: n consecutive tokens and, for each, the token
that follows if that is to be scored here. Windows of a sequence begin every `stride`
tokens; each token is scored in the first window that has it, so exactly once, with at
least `length - stride` tokens before it where the sequence has so many.

Several windows share a row: segments keep attention inside each of them, and positions
begin anew. All batches have one shape, so one program is compiled.

Source: sliding windows as in Baevski and Auli 2019, arXiv:1809.10853, section 5.1.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Int32

from mjax.data.samples import NO_TARGET

FIELDS = ("tokens", "targets", "segments", "positions")
"""Names of the arrays of a batch, int32 [B, T] each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Consecutive tokens of a sequence."""

    tokens: Int32[np.ndarray, "n"]
    scored: Int32[np.ndarray, "n"]
    """The tokens again; NO_TARGET where one is context only."""
    begins: bool
    """Whether a new sequence begins here. Its first token has no context and cannot be
    scored."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """What the model sees at once."""

    tokens: Int32[np.ndarray, "n"]
    targets: Int32[np.ndarray, "n"]
    """The token that follows each; NO_TARGET where it is not scored here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a window is in a batch."""

    row: int
    start: int
    length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
    """A batch, and where its windows are, in the order in which they came."""

    arrays: dict[str, Int32[np.ndarray, "B T"]]
    places: tuple[Place, ...]


def check(length: int, stride: int) -> None:
    """Refuse windows that cannot be made.

    Raises:
      ValueError: length or stride is out of range.
    """
    if length < 1:
        raise ValueError(f"--seq-len must be at least 1, got {length}")
    if not 1 <= stride <= length:
        raise ValueError(
            f"--stride must be from 1 to --seq-len {length}, got {stride}: a larger "
            "one would leave tokens out"
        )


def windows_of(
    pieces: Iterable[Piece], *, length: int, stride: int
) -> Iterator[Window]:
    """Cut sequences into windows; holds one window and one piece at a time.

    Args:
      pieces: of one sequence after the other.
      length: largest number of tokens in a window.
      stride: tokens between the starts of windows, at most length. A stride of length
        computes every token once, which costs least.
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
    """The part of one sequence that windows still need."""

    def __init__(self, length: int, stride: int) -> None:
        self._length, self._stride = length, stride
        self._tokens = self._scored = np.zeros(0, np.int32)
        # How many targets of the buffer an earlier window has scored. The buffer begins
        # where the next window does.
        self._num_done = 0

    def add(self, piece: Piece) -> None:
        self._tokens = np.concatenate([self._tokens, piece.tokens])
        self._scored = np.concatenate([self._scored, piece.scored])

    def full(self) -> Iterator[Window]:
        """Yield the windows that no further token can change."""
        start = 0
        while len(self._tokens) - start > self._length:
            yield from self._next(start)
            start += self._stride
        self._tokens, self._scored = self._tokens[start:], self._scored[start:]

    def rest(self) -> Iterator[Window]:
        """Yield the windows that are left when the sequence is complete.

        At most one: longer ones were full.
        """
        if len(self._tokens) - 1 > self._num_done:
            yield from self._next(0)

    def _next(self, start: int) -> Iterator[Window]:
        """Yield the window that begins at a place of the buffer, if it scores any."""
        part = slice(start, start + self._length + 1)
        tokens, targets = self._tokens[part][:-1], self._scored[part][1:].copy()
        targets[: self._num_done] = NO_TARGET
        self._num_done = len(tokens) - self._stride
        if (targets != NO_TARGET).any():
            yield Window(tokens=tokens, targets=targets)


def pack(windows: Iterable[Window], *, num_rows: int, row_len: int) -> Iterator[Packed]:
    """Put windows into batches of one shape, each into the first row with room.

    Args:
      windows: none longer than row_len.
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
        """Put a window into the first row with room; say whether there was one."""
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
        """Return the batch; what is left of a row is a segment without targets."""
        for row, used in enumerate(self._used):
            self._segments[row, used:] = self._num_windows[row]
            self._positions[row, used:] = np.arange(self._tokens.shape[1] - used)
        arrays = (self._tokens, self._targets, self._segments, self._positions)
        return Packed(
            arrays=dict(zip(FIELDS, arrays, strict=True)), places=tuple(self.places)
        )
