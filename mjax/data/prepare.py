"""Documents in, two token streams on disk out: training and held-out.

The corpus is read twice, holding a few megabytes of it at a time: once to hash it, to
find bad input before the long part, and to decide the split; once to tokenize it.
"""

import contextlib
import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int64

from mjax.data.cache_files import BlockWriter
from mjax.data.chat_samples import ANSWER, END
from mjax.data.chats import Chat, encode_chat
from mjax.data.corpora import Document
from mjax.data.tokenizers import Tokenizer

Documents = Callable[[], Iterator[Document]]
"""Starts reading the corpus from its first document."""
Side = Literal["train", "held_out"]
SIDES: tuple[Side, Side] = ("train", "held_out")

_BATCH_CHARS = 1 << 22  # tokenized together, so that the library can use all cores
# A tokenizer that loses more of the text than this makes bits per byte meaningless.
_MAX_LOST = 0.01


@dataclasses.dataclass(frozen=True)
class Survey:
    """What the first reading of the corpus found."""

    corpus_hash: str
    """SHA-256 over the names and contents of the documents, in order, and over the
    sides of those that are not on the side of their own name."""
    num_documents: int
    num_bytes: int
    num_repeated_bytes: int
    """Of these, in files whose content an earlier file of the corpus has."""
    split: Literal["document", "position"]
    """How training and held-out text are told apart, see `split_pieces`."""


@dataclasses.dataclass(frozen=True)
class SideCounts:
    """One side of a tokenized corpus in numbers."""

    num_tokens: int
    """With one token per document that ends it."""
    num_bytes: int
    """Of text, in UTF-8."""
    num_documents: int
    """Documents that end in this side."""
    max_token_id: int
    byte_counts: list[int]
    """How often each of the 256 bytes occurs; of chats, in the answers."""
    num_targets: int = 0
    """Of chats: tokens of answers."""


class Piece(NamedTuple):
    """Some text of one side; empty text and is_end end a document."""

    side: Side
    text: str
    is_end: bool
    answers: tuple[tuple[int, int], ...] | None = None
    """Of a whole chat, where its answers are, in characters."""
    name: str = ""
    """Of a whole chat: its file and line."""


def is_held_out(name: str, fraction: float) -> bool:
    """Decide by a hash of its name alone whether a document is held out.

    A document therefore stays on its side when others come or go.
    """
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def survey(documents: Documents, held_out_fraction: float) -> Survey:
    """Read the corpus once and decide how it is split.

    Raises:
      ValueError: bad input of `corpora.documents`, or no text at all.
    """
    total, num_documents, num_bytes = hashlib.sha256(), 0, 0
    num_repeated_bytes, sides = 0, set()
    for document in documents():
        content, size = hashlib.sha256(), 0
        for piece in document.pieces:
            encoded = piece.encode()
            content.update(encoded)
            size += len(encoded)
        if size == 0:
            continue
        if document.answers is not None:
            content.update(str(document.answers).encode())
        total.update(document.name.encode() + b"\0" + content.digest())
        side = is_held_out(document.first_name, held_out_fraction)
        if side != is_held_out(document.name, held_out_fraction):
            total.update(b"held out" if side else b"trained on")
        num_documents += 1
        num_bytes += size
        num_repeated_bytes += size * document.source.is_repeat
        sides.add(side)
    if num_bytes == 0:
        raise ValueError("the corpus holds no text; give documents with text")
    split = "document" if len(sides) == 2 else "position"
    if split == "position" and num_repeated_bytes:
        total.update(b"repeats on the sides of the originals")
    return Survey(
        corpus_hash=total.hexdigest(),
        num_documents=num_documents,
        num_bytes=num_bytes,
        num_repeated_bytes=num_repeated_bytes,
        split=split,
    )


def split_pieces(
    documents: Documents, found: Survey, held_out_fraction: float
) -> Iterator[Piece]:
    """Read the corpus again and tell training from held-out text.

    By document, where that leaves both sides some text (see `is_held_out`). A corpus of
    one or few documents is split by position: its end is held out, and the document
    that lies across the border has its beginning in the training text. Copies of a
    document have the position of the first, so that they are split as it is. A chat
    is never cut: the one across the border is held out, unless it is the first.
    """
    num_distinct = found.num_bytes - found.num_repeated_bytes
    border = round(num_distinct * (1 - held_out_fraction))
    end, positions = 0, {}
    for document in documents():
        side = SIDES[is_held_out(document.first_name, held_out_fraction)]
        is_empty, is_repeat = True, document.source.is_repeat
        position = end
        if found.split == "position":
            position = positions.setdefault(document.content, end)
        for text in document.pieces:
            is_empty = False
            if document.answers is not None:
                position += len(text.encode())
                if found.split == "position":
                    first = position == len(text.encode())
                    side = SIDES[position > border and not first]
                yield Piece(side, text, False, document.answers, document.name)
            elif found.split == "document":
                yield Piece(side, text, False)
            else:
                side, parts = _cut(text, border - position)
                position += len(text.encode())
                yield from parts
        if not is_repeat:
            end = position
        if not is_empty:
            yield Piece(side, "", True)


def _cut(text: str, num_bytes: int) -> tuple[Side, list[Piece]]:
    """Divide a text between both sides; return also the side of its end."""
    before, after = _split_text_at(text, num_bytes)
    parts = zip(SIDES, (before, after), strict=True)
    return SIDES[bool(after)], [Piece(side, t, False) for side, t in parts if t]


def write_streams(
    pieces: Iterator[Piece], tokenizer: Tokenizer, folder: pathlib.Path
) -> dict[Side, SideCounts]:
    """Tokenize pieces of text to the files `stream_path(folder, side)`.

    Checksums of their blocks go beside them, see `cache_files.BlockWriter`.

    Raises:
      ValueError: the tokenizer does not keep the text.
    """
    dtype = token_dtype(tokenizer)
    counts = {side: _Counts() for side in SIDES}
    paths = {side: stream_path(folder, side) for side in SIDES}
    with BlockWriter(paths["train"]) as train, BlockWriter(paths["held_out"]) as held:
        files = {"train": train, "held_out": held}
        for batch in _batched(pieces):
            encoded = tokenizer.encode_batch([piece.text for piece in batch])
            for piece, ids in zip(batch, encoded, strict=True):
                if piece.is_end:
                    ids = np.array([tokenizer.eos_id])
                counts[piece.side].add(piece, ids, tokenizer)
                files[piece.side].write(ids.astype(dtype).tobytes())
    num_bytes = sum(count.num_bytes for count in counts.values())
    num_kept = sum(count.num_token_bytes for count in counts.values())
    if abs(num_kept - num_bytes) > _MAX_LOST * num_bytes:
        raise ValueError(
            f"the tokens of --data.tokenizer stand for {num_kept} bytes of a text of "
            f"{num_bytes} bytes: it does not keep this text (unknown characters, or a "
            "normalizer that removes some); use bytes or a byte-level BPE"
        )
    return {side: counts[side].total() for side in SIDES}


def write_chats(
    pieces: Iterator[Piece], tokenizer: Tokenizer, folder: pathlib.Path
) -> dict[Side, SideCounts]:
    """Tokenize chats as `write_streams` does text, with a flag of each token.

    The flags go to `flags_path(folder, side)`, see `chat_samples`. No token is added
    behind a chat: what ends a turn is the template's.
    """
    dtype = token_dtype(tokenizer)
    counts = {side: _Counts() for side in SIDES}
    with contextlib.ExitStack() as stack:
        files = {
            side: tuple(
                stack.enter_context(BlockWriter(path))
                for path in (stream_path(folder, side), flags_path(folder, side))
            )
            for side in SIDES
        }
        for piece in pieces:
            if piece.answers is None:
                continue  # the end of a chat, which its last flag says
            ids, is_answer = encode_chat(Chat(piece.text, piece.answers), tokenizer)
            flags = is_answer.astype(np.uint8) * np.uint8(ANSWER)
            flags[-1] |= END
            counts[piece.side].add_chat(piece, ids, is_answer)
            tokens_file, flags_file = files[piece.side]
            tokens_file.write(ids.astype(dtype).tobytes())
            flags_file.write(flags.tobytes())
    return {side: counts[side].total() for side in SIDES}


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the smallest unsigned integer that holds every id."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


def stream_path(folder: pathlib.Path, side: Side) -> pathlib.Path:
    """Return the file of one side: token ids, one after the other."""
    return folder / f"{side}.tokens"


def flags_path(folder: pathlib.Path, side: Side) -> pathlib.Path:
    """Return the file of the flags of one side of chats: a byte each token."""
    return folder / f"{side}_flags.bits"


class _Counts:
    """Counts what goes into one stream."""

    def __init__(self) -> None:
        self.num_tokens = self.num_bytes = self.num_documents = 0
        self.num_token_bytes = self.max_token_id = self.num_targets = 0
        self.byte_counts = np.zeros(256, np.int64)

    def add(
        self, piece: Piece, ids: Int64[np.ndarray, "n"], tokenizer: Tokenizer
    ) -> None:
        text = np.frombuffer(piece.text.encode(), np.uint8)
        self.num_tokens += len(ids)
        self.num_bytes += len(text)
        self.num_documents += piece.is_end
        self.num_token_bytes += int(tokenizer.token_num_bytes[ids].sum())
        self.max_token_id = max(self.max_token_id, int(ids.max(initial=0)))
        self.byte_counts += np.bincount(text, minlength=256)

    def add_chat(
        self, piece: Piece, ids: Int64[np.ndarray, "n"], is_answer: np.ndarray
    ) -> None:
        """Count a chat; the bytes that are counted one by one are of its answers."""
        assert piece.answers is not None
        answers = "".join(piece.text[start:end] for start, end in piece.answers)
        text = np.frombuffer(answers.encode(), np.uint8)
        self.num_tokens += len(ids)
        self.num_bytes += len(piece.text.encode())
        self.num_documents += 1
        self.num_targets += int(is_answer[1:].sum())
        self.max_token_id = max(self.max_token_id, int(ids.max(initial=0)))
        self.byte_counts += np.bincount(text, minlength=256)

    def total(self) -> SideCounts:
        return SideCounts(
            num_tokens=self.num_tokens,
            num_bytes=self.num_bytes,
            num_documents=self.num_documents,
            max_token_id=self.max_token_id,
            byte_counts=self.byte_counts.tolist(),
            num_targets=self.num_targets,
        )


def _batched(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch, num_chars = [], 0
    for piece in pieces:
        batch.append(piece)
        num_chars += len(piece.text)
        if num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _split_text_at(text: str, num_bytes: int) -> tuple[str, str]:
    """Cut text after at most num_bytes bytes of UTF-8, between two characters."""
    encoded = text.encode()
    if num_bytes >= len(encoded):
        return text, ""
    before = encoded[: max(num_bytes, 0)].decode(errors="ignore")
    return before, text[len(before) :]
