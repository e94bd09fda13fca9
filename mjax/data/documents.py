"""Make samples of one document each from a token stream, without packing.

A document of n tokens, including its end token, is preceded by a start token and has n
targets. It is split into pieces of at most seq_len + 1 tokens that overlap by one
token, so every token of the document is a target once. Each piece, with padding, is one
sample. In data version 1 there is no start token, and the first token of a document is
no target; a document of one token then has no sample.

A file next to the token files holds an array with the positions of the documents. It is
mapped into memory, so a process needs no more memory for more documents.
"""

import dataclasses

import numpy as np
from jaxtyping import Int, Int32, Int64, UInt

from mjax.data.samples import NO_TARGET, Tokens, one_sample

_BLOCK_TOKENS = 1 << 24  # tokens searched for document ends at a time


def index_documents(
    stream: Tokens, eos_id: int, seq_len: int, *, has_starts: bool = False
) -> Int64[np.ndarray, "2 _"]:
    """Find the documents of a stream, and count their samples.

    Args:
      stream: documents, each followed by eos_id; the last one may lack it.
      eos_id: the token that ends a document.
      seq_len: T, tokens per sample.
      has_starts: whether a start token precedes each document.
    Returns:
      [2, D + 1] for D documents: row 0 holds the start of each document in the stream,
      row 1 the number of samples before it. The last column holds the totals.
    """
    blocks = [
        np.flatnonzero(stream[start : start + _BLOCK_TOKENS] == eos_id) + start + 1
        for start in range(0, len(stream), _BLOCK_TOKENS)
    ]
    starts = np.concatenate([np.zeros(1, np.int64), *blocks])
    if starts[-1] != len(stream):  # a split by position ends anywhere
        starts = np.append(starts, len(stream))
    index = np.zeros((2, len(starts)), np.int64)
    index[0] = starts
    num_targets = np.diff(starts) - (not has_starts)
    np.cumsum(-(-num_targets // seq_len), out=index[1, 1:])
    return index


@dataclasses.dataclass(frozen=True)
class DocumentSamples:
    """Samples of the documents of a token stream, one document or piece each."""

    stream: Tokens
    index: Int64[np.ndarray, "2 _"]
    """Result of `index_documents` for this seq_len."""
    seq_len: int
    eos_id: int
    start_id: int | None = None
    """Result of `tokenizers.start_of`: the token before each document, or None."""

    def __len__(self) -> int:
        return int(self.index[1, -1])

    def __getitem__(self, index: int) -> dict[str, Int32[np.ndarray, "T"]]:
        """Return one sample."""
        return one_sample(self, index)

    def rows(
        self, indices: Int[np.ndarray, "B"]
    ) -> dict[str, Int32[np.ndarray, "B T"]]:
        """Return several samples: tokens, targets, segments, positions.

        The document is segment 0. Padding after it is segment 1, with positions of its
        own; it consists of the token that ends a document, and has no targets.
        """
        shape = (len(indices), self.seq_len)
        tokens = np.full(shape, self.eos_id, np.int32)
        targets = np.full(shape, NO_TARGET, np.int32)
        segments = np.ones(shape, np.int32)
        positions = np.empty(shape, np.int32)
        for row, piece in enumerate(map(self._piece, indices.tolist())):
            size = len(piece) - 1
            tokens[row, :size], targets[row, :size] = piece[:-1], piece[1:]
            segments[row, :size] = 0
            positions[row, :size] = np.arange(size)
            positions[row, size:] = np.arange(self.seq_len - size)
        return {
            "tokens": tokens,
            "targets": targets,
            "segments": segments,
            "positions": positions,
        }

    def _piece(self, sample: int) -> Int[np.ndarray, "_"] | UInt[np.ndarray, "_"]:
        """Return the tokens of a sample, one more than the number of its targets."""
        starts, firsts = self.index
        # A document without samples has the same entry in `firsts` as the next one.
        document = int(np.searchsorted(firsts, sample, side="right")) - 1
        begin, end = starts[document : document + 2].tolist()
        start = begin + (sample - int(firsts[document])) * self.seq_len
        start -= self.start_id is not None
        stop = min(start + self.seq_len + 1, end)
        ids = self.stream[max(start, begin) : stop]
        if start >= begin or (ids[0] == self.start_id != self.eos_id):
            return ids  # perhaps with a start token of its own
        return np.append(np.int64(self.start_id or 0), ids)
