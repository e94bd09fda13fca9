"""Cut a token stream into samples.

The stream contains all documents one after the other, each followed by an end token. A
sample is a window of seq_len + 1 tokens of the stream, preceded by one more end token.
Windows overlap by one token, so every token of the stream is a target once. Tokens
after the last full window are left out.

The end token of a document is the target of its last token. As an input it is the start
of the next document: it has position 0 of that document, does not see the document
before, and its target is the first token. A tokenizer that puts a token before each
text has that token there.

Data version 1 has no start tokens: the first token of a document is its position 0 and
never a target, and nor is the first token of the stream.
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
    start_id: int | None = None
    """Result of `tokenizers.start_of`: the token before each document, or None."""

    def __len__(self) -> int:
        return max(len(self.stream) - self._first, 0) // self.seq_len

    @property
    def _first(self) -> int:
        """Position in the stream of the first target."""
        return int(self.start_id is None)

    def __getitem__(self, index: int) -> dict[str, Int32[np.ndarray, "T"]]:
        """Return one sample."""
        return one_sample(self, index)

    def rows(
        self, indices: Int[np.ndarray, "B"]
    ) -> dict[str, Int32[np.ndarray, "B T"]]:
        """Return several samples: tokens, targets, segments, positions.

        If documents are isolated, segments number the documents in a window, and
        positions restart at each document. Otherwise a window is one segment.
        """
        windows = np.full((len(indices), self.seq_len + 1), self.eos_id, np.int32)
        for row, index in enumerate(indices.tolist()):
            stop = (index + 1) * self.seq_len + self._first
            start = max(stop - self.seq_len - 1, 0)
            windows[row, start - stop :] = self.stream[start:stop]
        return pack(
            windows, self.eos_id if self.isolate_documents else None, self.start_id
        )


def pack(
    windows: Int32[np.ndarray, "B _"], eos_id: int | None, start_id: int | None = None
) -> dict[str, Int32[np.ndarray, "B T"]]:
    """Turn windows of T + 1 tokens into samples of T.

    Args:
      windows: [B, T + 1], consecutive token ids.
      eos_id: the token that ends a document; None does not isolate documents.
      start_id: the token before each document, put in the place of the end token; None
        gives the end token no target (data version 1).
    Returns:
      tokens, targets, segments and positions by name, each [B, T].
    """
    tokens, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
    index = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    if eos_id is None:
        segments, positions = np.zeros_like(tokens), index.copy()
    else:
        # Ends that stay, because the next token begins the document: in version 1, and
        # if the ids of a file contain the start token.
        is_end = stays = tokens == eos_id
        if start_id is not None:
            stays = is_end & (targets == start_id) & (start_id != eos_id)
            tokens[is_end & ~stays] = start_id
        targets[stays] = NO_TARGET
        is_start = np.zeros_like(is_end)
        is_start[:, 1:] = stays[:, :-1] | (is_end & ~stays)[:, 1:]
        segments = np.cumsum(is_start, axis=1, dtype=np.int32)
        starts = np.maximum.accumulate(np.where(is_start, index, 0), axis=1)
        positions = index - starts
    return {
        "tokens": tokens,
        "targets": targets,
        "segments": segments,
        "positions": positions,
    }
