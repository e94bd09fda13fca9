"""Cut a token stream into samples.

The stream contains all documents one after the other, each followed by an end token. A
sample is a window of seq_len + 1 tokens of the stream. Windows overlap by one token, so
every token except the first is a target once. Tokens after the last full window are
left out.
"""

import dataclasses
import operator
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int, Int32, UInt

NO_TARGET = -1


@runtime_checkable
class Tokens(Protocol):
    """Token ids of a stream: a numpy array, or an object with the same indexing."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> UInt[np.ndarray, "_"]: ...


@runtime_checkable
class Samples(Protocol):
    """Interface of samples: int32 tokens, targets, segments, positions."""

    @property
    def seq_len(self) -> int:
        """T, tokens per sample."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Int32[np.ndarray, "T"]]: ...

    def rows(
        self, indices: Int[np.ndarray, "B"]
    ) -> dict[str, Int32[np.ndarray, "B T"]]:
        """Return several samples, as {field: [B, T]}."""
        ...


def one_sample(samples: Samples, index: int) -> dict[str, Int32[np.ndarray, "T"]]:
    """Return one sample, as {field: [T]}; a negative index counts from the end.

    Raises:
      IndexError: there is no such sample.
    """
    batch = samples.rows(np.array([range(len(samples))[operator.index(index)]]))
    return {name: array[0] for name, array in batch.items()}


@dataclasses.dataclass(frozen=True)
class PackedSamples:
    """Windows of a token stream."""

    stream: Tokens
    seq_len: int
    eos_id: int
    isolate_documents: bool

    def __len__(self) -> int:
        return max(len(self.stream) - 1, 0) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, Int32[np.ndarray, "T"]]:
        """Return one sample."""
        return one_sample(self, index)

    def rows(
        self, indices: Int[np.ndarray, "B"]
    ) -> dict[str, Int32[np.ndarray, "B T"]]:
        """Return several samples: tokens, targets, segments, positions.

        If documents are isolated, segments number the documents in a window, positions
        restart at each document, and the last token of a document has no target.
        Otherwise a window is one segment.
        """
        windows = np.empty((len(indices), self.seq_len + 1), np.int32)
        for row, index in enumerate(indices):
            start = int(index) * self.seq_len
            windows[row] = self.stream[start : start + self.seq_len + 1]
        return pack(windows, self.eos_id if self.isolate_documents else None)


def pack(
    windows: Int32[np.ndarray, "B _"], eos_id: int | None
) -> dict[str, Int32[np.ndarray, "B T"]]:
    """Turn windows of T + 1 tokens into samples of T.

    Args:
      windows: [B, T + 1], consecutive token ids.
      eos_id: the token that ends a document; None does not isolate documents.
    Returns:
      tokens, targets, segments and positions by name, each [B, T].
    """
    tokens, targets = windows[:, :-1], windows[:, 1:].copy()
    index = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    if eos_id is None:
        segments, positions = np.zeros_like(tokens), index.copy()
    else:
        is_end = tokens == eos_id
        targets[is_end] = NO_TARGET
        is_start = np.zeros_like(is_end)
        is_start[:, 1:] = is_end[:, :-1]
        segments = np.cumsum(is_start, axis=1, dtype=np.int32)
        starts = np.maximum.accumulate(np.where(is_start, index, 0), axis=1)
        positions = index - starts
    return {
        "tokens": tokens.copy(),
        "targets": targets,
        "segments": segments,
        "positions": positions,
    }
