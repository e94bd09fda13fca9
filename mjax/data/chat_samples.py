"""Make samples of whole chats from tokens and their flags.

A sample holds as many consecutive chats of the stream as fit into its length, then
padding. No chat is truncated, so an answer always has its full context. Only the tokens
of answers are targets.
"""

import dataclasses

import numpy as np
from jaxtyping import Int, Int32, Int64

from mjax.data.samples import NO_TARGET, Tokens, one_sample

ANSWER = 1
"""Bit of the flags: the token belongs to an answer, so it is a target."""
END = 2
"""Bit of the flags: the token is the last one of its chat."""


def chat_starts(flags: Tokens) -> Int64[np.ndarray, "_"]:
    """Return the position of each chat's first token, and the end of the last chat."""
    ends = np.flatnonzero(flags[0 : len(flags)] & END) + 1
    return np.concatenate([np.zeros(1, np.int64), ends.astype(np.int64)])


def group_chats(
    starts: Int64[np.ndarray, "_"], seq_len: int, *, packed: bool, skip_longer: bool
) -> Int64[np.ndarray, "n 2"]:
    """Divide chats among samples, in order.

    Args:
      starts: result of `chat_starts`.
      seq_len: T, tokens per sample.
      packed: whether a sample holds as many chats as fit, or one chat.
      skip_longer: whether to leave out chats of more than T tokens; if not, there must
        be none.
    Returns:
      For each sample, the indices of its first chat and of the chat after its last.
    """
    sizes = np.diff(starts)
    fits = sizes <= seq_len
    assert skip_longer or fits.all()
    if not packed:
        chosen = np.flatnonzero(fits)
        return np.stack([chosen, chosen + 1], axis=1)
    groups: list[tuple[int, int]] = []
    for run in np.split(np.arange(len(sizes)), np.flatnonzero(~fits)):
        kept = run[fits[run]]
        first = int(kept[0]) if len(kept) else 0
        stop = first + len(kept)
        while first < stop:
            end = int(starts[first]) + seq_len
            after = int(np.searchsorted(starts, end, side="right")) - 1
            groups.append((first, min(after, stop)))
            first = groups[-1][1]
    return np.array(groups, np.int64).reshape(-1, 2)


@dataclasses.dataclass(frozen=True)
class ChatSamples:
    """Samples of whole chats of a token stream."""

    stream: Tokens
    flags: Tokens
    """For each token, the bits `ANSWER` and `END`."""
    starts: Int64[np.ndarray, "_"]
    """Result of `chat_starts`."""
    groups: Int64[np.ndarray, "_ 2"]
    """Result of `group_chats` for this seq_len."""
    seq_len: int
    eos_id: int
    """Token used for padding."""
    isolate_documents: bool

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> dict[str, Int32[np.ndarray, "T"]]:
        """Return one sample."""
        return one_sample(self, index)

    @property
    def num_targets(self) -> int:
        """Number of targets in all samples."""
        parts = [self.flags[int(a) : int(b)] for a, b in self.starts[self.groups]]
        is_target = [((p[1:] & ANSWER) > 0) & ((p[:-1] & END) == 0) for p in parts]
        return int(sum(map(np.count_nonzero, is_target)))

    def rows(
        self, indices: Int[np.ndarray, "B"]
    ) -> dict[str, Int32[np.ndarray, "B T"]]:
        """Return several samples: tokens, targets, segments, positions.

        If documents are isolated, segments number the chats of a sample and positions
        restart at each chat; otherwise a sample is one segment. Padding comes last, as
        one more segment.
        """
        shape = (len(indices), self.seq_len)
        tokens = np.full(shape, self.eos_id, np.int32)
        targets = np.full(shape, NO_TARGET, np.int32)
        segments = np.zeros(shape, np.int32)
        positions = np.zeros(shape, np.int32)
        for row, index in enumerate(indices.tolist()):
            first, stop = self.starts[self.groups[index]].tolist()
            size = stop - first
            ids, flags = self.stream[first:stop], self.flags[first:stop]
            is_target = (flags[1:] & ANSWER > 0) & (flags[:-1] & END == 0)
            tokens[row, :size] = ids
            targets[row, : size - 1] = np.where(
                is_target, ids[1:].astype(np.int32), NO_TARGET
            )
            is_start = np.zeros(self.seq_len + 1, bool)
            if self.isolate_documents:
                is_start[1 : size + 1] = flags & END > 0
            is_start[size] = True  # padding
            is_start = is_start[: self.seq_len]
            segments[row] = np.cumsum(is_start)
            place = np.arange(self.seq_len)
            positions[row] = place - np.maximum.accumulate(np.where(is_start, place, 0))
        return {
            "tokens": tokens,
            "targets": targets,
            "segments": segments,
            "positions": positions,
        }
