"""Tokenize documents into two token streams on disk: training and held-out.

Documents of an indexed dataset are already token ids, which are copied. The corpus is
read twice, a few megabytes at a time. The first pass hashes it, finds bad input before
the long second pass, and decides the split; the second pass tokenizes. The position is
saved every few seconds, so a killed process loses only a few seconds of work.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import logging
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int64

from mjax.data.cache_files import BlockWriter, DamagedFileError, Written
from mjax.data.chat_samples import ANSWER, END
from mjax.data.chats import Chat, encode_chat
from mjax.data.corpora import Document
from mjax.data.megatron import TokenIds
from mjax.data.tokenizers import Tokenizer
from mjax.data.unfinished import Meter, Unfinished

Documents = Callable[[], Iterator[Document]]
"""Function that starts reading the corpus from its first document."""
Side = Literal["train", "held_out"]
SIDES: tuple[Side, Side] = ("train", "held_out")

_BATCH_CHARS = 1 << 22  # characters tokenized together, to use all cores
# If a tokenizer loses a larger fraction of the text, bits per byte are meaningless.
_MAX_LOST = 0.01
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Survey:
    """Result of the first pass over the corpus."""

    corpus_hash: str
    """SHA-256 over the names and contents of the documents, in order. If a copy of a
    document would be on the other side (training or held-out) by its own name, its
    side is hashed too."""
    num_documents: int
    num_bytes: int
    num_repeated_bytes: int
    """Bytes in files with the same content as an earlier file of the corpus."""
    split: Literal["document", "position"]
    """How the text is split into training and held-out text, see `split_pieces`."""


@dataclasses.dataclass(frozen=True)
class SideCounts:
    """Counts of one side of a tokenized corpus: training or held-out."""

    num_tokens: int
    """Number of tokens, including the end token of each document; chats have none."""
    num_bytes: int
    """Number of bytes of text, in UTF-8."""
    num_documents: int
    """Number of documents that end on this side."""
    max_token_id: int
    byte_counts: list[int]
    """Element i is the number of bytes of value i; for chats, in the answers only."""
    num_targets: int = 0
    """For chats: number of tokens in answers, without the first token of a chat."""
    num_unlike: int = 0
    """For chats: number of chats with a prompt that differs from the whole text."""
    unlike: str = ""
    """File and line of the first of these, and its tokens."""


class Place(NamedTuple):
    """The position after a piece of a corpus; positions sort in the order of pieces."""

    source_index: int
    row: int
    """Line or row of the document in its file; 0 if the document is the whole file."""
    num_pieces: int
    """Number of pieces of the document before this position."""


class Piece(NamedTuple):
    """Text or token ids of one side; may be empty if it only ends a document."""

    side: Side
    text: str
    is_end: bool
    chat: Chat | None = None
    """The chat of the text; None if the text is no chat, or a chat ends here."""
    name: str = ""
    """For a chat: the name of its file and its line."""
    place: Place = Place(0, 0, 0)
    """Position after the piece, where reading continues."""
    ids: Int64[np.ndarray, "_"] | None = None
    """Token ids instead of text; None if the piece is text."""


Pieces = Callable[[Place | None], Iterator[Piece]]
"""Function that yields the pieces after a position; None means the beginning."""


def is_held_out(name: str, fraction: float) -> bool:
    """Return whether a document is held out, decided by a hash of its name.

    So the result for a document does not change when other documents are added or
    removed.
    """
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def survey(
    documents: Documents,
    held_out_fraction: float,
    on_document: Callable[[], None] = lambda: None,
) -> Survey:
    """Read the corpus once and decide how it is split.

    Args:
      documents: function that starts reading the corpus.
      held_out_fraction: fraction of the documents that are held out.
      on_document: called after each document.
    Raises:
      ValueError: the input is bad, see `corpora.documents`, or there is no text.
    """
    total, num_documents, num_bytes = hashlib.sha256(), 0, 0
    num_repeated_bytes, sides = 0, set()
    for document in documents():
        content, size, is_empty = hashlib.sha256(), 0, True
        for piece in document.pieces:
            encoded, num_piece_bytes = _content(piece)
            content.update(encoded)
            size += num_piece_bytes
            is_empty = is_empty and not encoded
        if is_empty:
            continue
        if document.chat is not None:
            content.update(str(document.chat.answers).encode())
            content.update(str(document.chat.starts or "").encode())
        total.update(document.name.encode() + b"\0" + content.digest())
        side = is_held_out(document.first_name, held_out_fraction)
        if side != is_held_out(document.name, held_out_fraction):
            total.update(b"held out" if side else b"trained on")
        num_documents += 1
        num_bytes += size
        num_repeated_bytes += size * document.source.is_repeat
        sides.add(side)
        on_document()
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


def _content(piece: str | TokenIds) -> tuple[bytes, int]:
    """Return the bytes of a piece to hash, and the number of bytes of its text."""
    if isinstance(piece, TokenIds):
        return piece.ids.astype("<u4").tobytes(), int(piece.num_bytes.sum())
    encoded = piece.encode()
    return encoded, len(encoded)


def split_pieces(
    documents: Documents, found: Survey, held_out_fraction: float
) -> Iterator[Piece]:
    """Read the corpus again and split it into training and held-out text.

    The corpus is split by document (see `is_held_out`) if both sides then have text.
    Otherwise it has few documents and is split by position: its end is held out, and
    the document at the boundary is divided. Copies of a document count as being at the
    position of the first copy, so they are split in the same way. A chat is never
    divided: the chat at the boundary is held out, unless it is the first chat.
    """
    document, num_pieces = None, 0
    for current, piece in _split_documents(documents, found, held_out_fraction):
        num_pieces = num_pieces + 1 if current is document else 1
        document = current
        place = Place(document.source_index, document.index or 0, num_pieces)
        yield piece._replace(place=place)


def pieces_behind(place: Place | None, pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Yield the pieces of a corpus after a position.

    Args:
      place: the position; None means the beginning.
      pieces: pieces from the beginning, or from the document of the position.
    """
    if place is None:
        return pieces
    return itertools.dropwhile(lambda piece: piece.place <= place, pieces)


def _split_documents(
    documents: Documents, found: Survey, held_out_fraction: float
) -> Iterator[tuple[Document, Piece]]:
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
            if document.chat is not None:
                assert isinstance(text, str)
                position += len(text.encode())
                if found.split == "position":
                    first = position == len(text.encode())
                    side = SIDES[position > border and not first]
                chat, name = document.chat, document.name
                yield document, Piece(side, text, False, chat, name)
            elif found.split == "document":
                yield document, _piece(side, text)
            else:
                side, parts = _cut(text, border - position)
                position += _content(text)[1]
                yield from ((document, part) for part in parts)
        if not is_repeat:
            end = position
        if not is_empty:
            yield document, Piece(side, "", True)


def _piece(side: Side, content: str | TokenIds) -> Piece:
    if isinstance(content, TokenIds):
        return Piece(side, "", False, ids=content.ids)
    return Piece(side, content, False)


def _cut(content: str | TokenIds, num_bytes: int) -> tuple[Side, list[Piece]]:
    """Divide a piece after num_bytes into training and held-out text.

    Returns:
      The side on which the piece ends, and the parts that are not empty.
    """
    if isinstance(content, TokenIds):
        before, after = content.split_at(num_bytes)
    else:
        before, after = _split_text_at(content, num_bytes)
    parts = zip(SIDES, (before, after), strict=True)
    return SIDES[len(after) > 0], [_piece(side, part) for side, part in parts if part]


def write_streams(
    pieces: Pieces,
    tokenizer: Tokenizer,
    folder: pathlib.Path,
    unfinished: Unfinished,
    meter: Meter,
) -> dict[Side, SideCounts]:
    """Tokenize pieces of text into the files `stream_path(folder, side)`.

    Checksums of their blocks are written too, see `cache_files.BlockWriter`.

    Args:
      pieces: function that yields the pieces after a position.
      tokenizer: tokenizer of the text.
      folder: folder of the files.
      unfinished: progress of an earlier process, from which the files continue.
      meter: logs the progress.
    Returns:
      Side -> its counts.
    Raises:
      ValueError: the tokenizer loses text.
    """
    dtype = token_dtype(tokenizer)
    paths = {side: stream_path(folder, side) for side in SIDES}
    with contextlib.ExitStack() as stack:
        streams = _Streams(list(paths.values()), unfinished, stack)
        files = dict(zip(SIDES, streams.files, strict=True))
        counts = streams.counts
        for batch in _batched(pieces(streams.place)):
            texts = [piece.text for piece in batch if piece.text]
            encoded = iter(tokenizer.encode_batch(texts) if texts else [])
            for piece in batch:
                if piece.is_end:
                    ids = np.array([tokenizer.eos_id])
                else:
                    ids = next(encoded) if piece.ids is None else piece.ids
                counts[piece.side].add(piece, ids, tokenizer)
                files[piece.side].write(ids.astype(dtype).tobytes())
            streams.advance(batch[-1].place, meter)
    num_bytes = sum(count.num_bytes for count in counts.values())
    num_kept = sum(count.num_token_bytes for count in counts.values())
    if abs(num_kept - num_bytes) > _MAX_LOST * num_bytes:
        raise ValueError(
            f"the tokens of --data.tokenizer encode {num_kept} bytes of a text of "
            f"{num_bytes} bytes: text would be lost (unknown characters, or a "
            "normalizer that removes some); use bytes or a byte-level BPE"
        )
    return {side: counts[side].total() for side in SIDES}


def write_chats(
    pieces: Pieces,
    tokenizer: Tokenizer,
    folder: pathlib.Path,
    unfinished: Unfinished,
    meter: Meter,
) -> dict[Side, SideCounts]:
    """Tokenize chats as `write_streams` tokenizes text, and write flags per token.

    The flags are written to `flags_path(folder, side)`, see `chat_samples`. No end
    token is added after a chat, because the template ends each turn. Arguments and
    result as in `write_streams`.
    """
    dtype = token_dtype(tokenizer)
    paths = [stream_path(folder, side) for side in SIDES]
    paths += [flags_path(folder, side) for side in SIDES]
    with contextlib.ExitStack() as stack:
        streams = _Streams(paths, unfinished, stack)
        counts = streams.counts
        for piece in pieces(streams.place):
            if piece.chat is None:
                continue  # the end of a chat, which its last flag marks
            ids, is_answer, unlike = encode_chat(piece.chat, tokenizer)
            flags = is_answer.astype(np.uint8) * np.uint8(ANSWER)
            flags[-1] |= END
            counts[piece.side].add_chat(piece, ids, is_answer)
            counts[piece.side].add_unlike(piece, unlike)
            number = SIDES.index(piece.side)
            streams.files[number].write(ids.astype(dtype).tobytes())
            streams.files[number + len(SIDES)].write(flags.tobytes())
            streams.advance(piece.place, meter)
    return {side: counts[side].total() for side in SIDES}


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """Return the smallest unsigned integer dtype that holds every token id."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


def stream_path(folder: pathlib.Path, side: Side) -> pathlib.Path:
    """Return the path of the file of token ids of one side."""
    return folder / f"{side}.tokens"


def flags_path(folder: pathlib.Path, side: Side) -> pathlib.Path:
    """Return the path of the flags of one side of chats, one byte per token."""
    return folder / f"{side}_flags.bits"


class _Streams:
    """The files being written, their counts, and the current position."""

    def __init__(
        self,
        paths: list[pathlib.Path],
        unfinished: Unfinished,
        stack: contextlib.ExitStack,
    ) -> None:
        """Begin the files, or continue from the position of an earlier process.

        Args:
          paths: paths of the files.
          unfinished: holds that position, under "streams".
          stack: exit stack that closes the files.
        """
        self._unfinished, state = unfinished, unfinished.get("streams")
        if state is not None:
            written = [Written(*numbers) for numbers in state["written"]]
            try:
                self.files = _open_writers(paths, written, stack)
            except (DamagedFileError, FileNotFoundError) as error:
                _log.warning("%s; it is tokenized again from the beginning", error)
                state = None
        if state is None:
            self.files = _open_writers(paths, [Written()] * len(paths), stack)
        self.place = Place(*state["place"]) if state else None
        self.counts: dict[Side, _Counts] = {side: _Counts() for side in SIDES}
        if state is not None:
            for side in SIDES:
                self.counts[side].restore(state["counts"][side])
        self._num_reported = self._done()

    def advance(self, place: Place, meter: Meter) -> None:
        """Report progress, and save the position if a save is due."""
        done = self._done()
        before, self._num_reported = self._num_reported, done
        num_bytes, num_documents, num_tokens = np.subtract(done, before).tolist()
        meter.add(num_bytes, documents=num_documents, tokens=num_tokens)
        if self._unfinished.is_due:
            state = {
                "place": place,
                "written": [file.sync() for file in self.files],
                "counts": {side: self.counts[side].state() for side in SIDES},
            }
            self._unfinished.put("streams", state)

    def _done(self) -> tuple[int, int, int]:
        """Return the number of bytes, documents and tokens, summed over both sides."""
        counts = self.counts.values()
        return (
            sum(count.num_bytes for count in counts),
            sum(count.num_documents for count in counts),
            sum(count.num_tokens for count in counts),
        )


def _open_writers(
    paths: list[pathlib.Path], written: list[Written], stack: contextlib.ExitStack
) -> list[BlockWriter]:
    return [
        stack.enter_context(BlockWriter(path, numbers))
        for path, numbers in zip(paths, written, strict=True)
    ]


class _Counts:
    """Counts of the contents of one stream, while it is written."""

    def __init__(self) -> None:
        self.num_tokens = self.num_bytes = self.num_documents = 0
        self.num_token_bytes = self.max_token_id = self.num_targets = 0
        self.byte_counts = np.zeros(256, np.int64)
        self.num_unlike, self.unlike = 0, ""

    def add(
        self, piece: Piece, ids: Int64[np.ndarray, "n"], tokenizer: Tokenizer
    ) -> None:
        if piece.ids is None:
            text = np.frombuffer(piece.text.encode(), np.uint8)
        else:
            text = tokenizer.text_bytes(ids)
        self.num_tokens += len(ids)
        self.num_bytes += len(text)
        self.num_documents += piece.is_end
        self.num_token_bytes += int(tokenizer.token_num_bytes[ids].sum())
        self.max_token_id = max(self.max_token_id, int(ids.max(initial=0)))
        self.byte_counts += np.bincount(text, minlength=256)

    def add_chat(
        self, piece: Piece, ids: Int64[np.ndarray, "n"], is_answer: np.ndarray
    ) -> None:
        """Count a chat; byte frequencies are counted in its answers only."""
        assert piece.chat is not None
        answers = "".join(piece.text[start:end] for start, end in piece.chat.answers)
        text = np.frombuffer(answers.encode(), np.uint8)
        self.num_tokens += len(ids)
        self.num_bytes += len(piece.text.encode())
        self.num_documents += 1
        self.num_targets += int(is_answer[1:].sum())
        self.max_token_id = max(self.max_token_id, int(ids.max(initial=0)))
        self.byte_counts += np.bincount(text, minlength=256)

    def add_unlike(self, piece: Piece, unlike: str) -> None:
        """Count a chat whose prompts differ from it; keep the first difference."""
        if unlike:
            self.num_unlike += 1
            self.unlike = self.unlike or f"{piece.name}: {unlike}"

    def state(self) -> dict[str, Any]:
        """Return all counts as a JSON object."""
        return {**vars(self), "byte_counts": self.byte_counts.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the counts that `state` returned."""
        vars(self).update(state)
        self.byte_counts = np.array(state["byte_counts"], np.int64)

    def total(self) -> SideCounts:
        return SideCounts(
            num_tokens=self.num_tokens,
            num_bytes=self.num_bytes,
            num_documents=self.num_documents,
            max_token_id=self.max_token_id,
            byte_counts=self.byte_counts.tolist(),
            num_targets=self.num_targets,
            num_unlike=self.num_unlike,
            unlike=self.unlike,
        )


def _batched(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch, num_chars = [], 0
    for piece in pieces:
        batch.append(piece)
        num_chars += len(piece.text) if piece.ids is None else len(piece.ids)
        if num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _split_text_at(text: str, num_bytes: int) -> tuple[str, str]:
    """Return the longest prefix of at most num_bytes bytes of UTF-8, and the rest."""
    encoded = text.encode()
    if num_bytes >= len(encoded):
        return text, ""
    before = encoded[: max(num_bytes, 0)].decode(errors="ignore")
    return before, text[len(before) :]
