"""Convert documents to pieces of token sequences, and count the bytes scored.

`Layout` describes sequences and the tokens around documents as in training. Bytes are
counted in the UTF-8 text and not from a table of tokens, because a tokenizer may put a
space before a text or replace unknown characters.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from mjax.data.corpora import Document
from mjax.data.samples import NO_TARGET
from mjax.data.tokenizers import Tokenizer
from mjax.evaluate.windows import Piece

_BATCH_CHARS = 1 << 22
"""Characters tokenized together, so that the library can use all cores. The same as in
`data.prepare`."""
_MAX_LOST = 0.01
"""Largest share of the text that a tokenizer may change; beyond it, bits per byte would
be of another text. The same as in `data.prepare`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How documents become sequences."""

    isolate: bool
    """Whether each document is a sequence; otherwise all documents are one sequence."""
    start_ids: tuple[int, ...]
    """Tokens before a sequence, not scored; without any, the first token of the text
    has no context and is not scored."""
    end_id: int
    """End-of-document token."""
    score_end: bool
    """Whether the end token is scored. It separates the documents of one sequence in
    any case."""


@dataclasses.dataclass(kw_only=True)
class Counts:
    """Counts of the text read so far."""

    documents: int = 0
    """Number of documents with text."""
    empty_documents: int = 0
    text_bytes: int = 0
    """UTF-8 bytes of all text."""
    unscored_bytes: int = 0
    """UTF-8 bytes of first tokens without context, which are not scored."""
    tokens: int = 0
    """Number of scored tokens."""
    unscored_tokens: int = 0
    """Number of unscored tokens of the text, which have no context."""
    digest: Any = dataclasses.field(default_factory=hashlib.sha256)
    """Hash of all documents with text, in order."""

    @property
    def scored_bytes(self) -> int:
        """Text bytes of the scored tokens."""
        return self.text_bytes - self.unscored_bytes


class _Part(NamedTuple):
    """Part of a document that is tokenized at once."""

    text: str
    is_first: bool
    is_last: bool
    """Whether this marks the end of a document; it then has no text."""


def pieces_of(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    layout: Layout,
    *,
    vocab_size: int,
    counts: Counts,
) -> Iterator[Piece]:
    """Tokenize documents in order, holding a few megabytes at a time.

    Args:
      documents: any number of texts, which may be empty.
      tokenizer: tokenizer of the model.
      layout: how documents form sequences.
      vocab_size: vocabulary size of the model.
      counts: updated with the counts.
    Raises:
      ValueError: `corpora.documents` refuses a document, the tokenizer changes the
        text, or the model lacks a token.
    """
    is_new = True  # no sequence has started
    is_bare = False  # the sequence has no token yet
    for part, ids in _tokenized(_parts(documents, counts), tokenizer):
        _check_ids(ids, vocab_size)
        begins = part.is_first and (layout.isolate or is_new)
        is_new = is_new and not part.is_first
        start_ids = layout.start_ids if begins else ()
        has_end = part.is_last and (layout.score_end or not layout.isolate)
        tokens = np.concatenate(
            [
                np.array(start_ids, np.int32),
                ids.astype(np.int32),
                np.array([layout.end_id] if has_end else [], np.int32),
            ]
        )
        scored = tokens.copy()
        scored[: len(start_ids)] = NO_TARGET
        if has_end and not layout.score_end:
            scored[-1] = NO_TARGET
        is_bare = not start_ids if begins else is_bare
        if is_bare and len(ids) > 0:
            is_bare = False
            scored[0] = NO_TARGET
            counts.unscored_tokens += 1
            counts.unscored_bytes += first_token_bytes(tokenizer, ids, part.text)
        counts.tokens += int((scored != NO_TARGET).sum())
        yield Piece(tokens=tokens, scored=scored, begins=begins)


def _parts(documents: Iterable[Document], counts: Counts) -> Iterator[_Part]:
    """Split documents into parts and count them; an empty document has no part."""
    for document in documents:
        is_first = True
        for text in document.pieces:
            if not text:
                continue
            assert isinstance(text, str)  # see corpora.check_text
            encoded = text.encode()
            counts.text_bytes += len(encoded)
            counts.digest.update(encoded)
            yield _Part(text, is_first, False)
            is_first = False
        if is_first:
            counts.empty_documents += 1
            continue
        counts.documents += 1
        counts.digest.update(
            b"\0"
        )  # two documents hash differently from their concatenation
        yield _Part("", False, True)


def _tokenized(
    parts: Iterable[_Part], tokenizer: Tokenizer
) -> Iterator[tuple[_Part, Int64[np.ndarray, "_"]]]:
    """Yield (part, its tokens); refuse a tokenizer that changes the text."""
    num_bytes = num_lost = 0
    for batch in _batched(parts):
        encoded = tokenizer.encode_batch([part.text for part in batch])
        for part, ids in zip(batch, encoded, strict=True):
            num_bytes += len(part.text.encode())
            num_lost += lost_bytes(part.text, tokenizer.decode(ids))
        if num_lost > _MAX_LOST * num_bytes:
            raise ValueError(
                f"the tokenizer does not keep the text: of the first {num_bytes} "
                f"bytes, lines of {num_lost} bytes come back changed from its tokens "
                "(unknown characters, or a normalizer that changes some), so the loss "
                "would be of another text; give text that the model's tokenizer keeps"
            )
        yield from zip(batch, encoded, strict=True)


def _batched(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    batch, num_chars = [], 0
    for part in parts:
        batch.append(part)
        num_chars += len(part.text)
        if num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def lost_bytes(text: str, decoded: str) -> int:
    """Count the bytes of the lines that are changed by encoding and decoding.

    If the number of lines differs, all bytes of the text count.
    """
    if text == decoded:
        return 0
    lines, others = text.splitlines(True), decoded.splitlines(True)
    if len(lines) != len(others):
        return len(text.encode())
    return sum(
        len(line.encode())
        for line, other in zip(lines, others, strict=True)
        if line != other
    )


def first_token_bytes(
    tokenizer: Tokenizer, ids: Int64[np.ndarray, "n"], text: str
) -> int:
    """Count the bytes of a text's first token.

    The token is decoded alone, so a space that the tokenizer put before the text does
    not count. If the token is only part of a character, the tokenizer's table gives its
    bytes.
    """
    if len(ids) == 0:
        return 0
    decoded = tokenizer.decode(ids[:1])
    if decoded and text.startswith(decoded):
        return len(decoded.encode())
    return int(tokenizer.token_num_bytes[ids[0]])


def _check_ids(ids: Int64[np.ndarray, "n"], vocab_size: int) -> None:
    """Refuse tokens outside the model's vocabulary."""
    largest = int(ids.max(initial=0))
    if largest >= vocab_size:
        raise ValueError(
            f"the text has token {largest}, and the vocabulary of the model has only "
            f"{vocab_size}; give the tokenizer of the model with --tokenizer"
        )
