"""Documents in, pieces of token sequences out, and the true bytes of what is scored.

What is a sequence, and what precedes and ends a document, is as the model was trained
(`Layout`). Bytes are those of the text in UTF-8, not of a table of tokens: a tokenizer
may put a space before a text, or replace what it does not know.
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
"""Chosen, as in `data.prepare`: tokenized together, so that the library can use all
cores."""
_MAX_LOST = 0.01
"""Chosen, as in `data.prepare`: if a tokenizer changes more of the text, bits per byte
are of another text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How documents become sequences."""

    isolate: bool
    """Each document is a sequence of its own; otherwise all are one, in their order."""
    start_ids: tuple[int, ...]
    """Tokens before a sequence, which are not scored; without any, the first token of
    the text has no context and is not scored."""
    end_id: int
    """Token that ends a document."""
    score_end: bool
    """Whether it is scored. It stands between documents that are one sequence even if
    it is not."""


@dataclasses.dataclass(kw_only=True)
class Counts:
    """What was read so far."""

    documents: int = 0
    """With text."""
    empty_documents: int = 0
    text_bytes: int = 0
    """Of all text, in UTF-8."""
    unscored_bytes: int = 0
    """Of these, in first tokens that have no context."""
    tokens: int = 0
    """That are scored."""
    unscored_tokens: int = 0
    """Of the text, without context."""
    digest: Any = dataclasses.field(default_factory=hashlib.sha256)
    """Hash of all documents with text, in their order."""

    @property
    def scored_bytes(self) -> int:
        """Bytes of text that the scored tokens stand for."""
        return self.text_bytes - self.unscored_bytes


class _Part(NamedTuple):
    """A part of a document that is tokenized at once."""

    text: str
    is_first: bool
    is_last: bool
    """Then it has no text."""


def pieces_of(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    layout: Layout,
    *,
    vocab_size: int,
    counts: Counts,
) -> Iterator[Piece]:
    """Tokenize documents one after the other; a few megabytes are held at a time.

    Args:
      documents: any number, also empty ones.
      tokenizer: of the model.
      layout: what is a sequence.
      vocab_size: of the model.
      counts: gets what was read.
    Raises:
      ValueError: bad input of `corpora.documents`, the tokenizer does not keep the
        text, or the model lacks one of its tokens.
    """
    is_new = True  # no sequence has begun
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
    """Cut documents into parts, and count them; an empty one has none."""
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
        counts.digest.update(b"\0")  # two documents are not one of both texts
        yield _Part("", False, True)


def _tokenized(
    parts: Iterable[_Part], tokenizer: Tokenizer
) -> Iterator[tuple[_Part, Int64[np.ndarray, "_"]]]:
    """Tokenize many parts at once; refuse a tokenizer that changes the text."""
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
                "(unknown characters, or a normalizer that changes some), so its loss "
                "is of another text; give text that the model's tokenizer keeps"
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
    """Count the bytes of the lines of a text that decoding changes.

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
    """Count the bytes at the beginning of a text that its first token stands for.

    The token alone decodes to them, without the space that a tokenizer may have put
    before the text. Where it is a part of a character, the table of tokens says it.
    """
    if len(ids) == 0:
        return 0
    decoded = tokenizer.decode(ids[:1])
    if decoded and text.startswith(decoded):
        return len(decoded.encode())
    return int(tokenizer.token_num_bytes[ids[0]])


def _check_ids(ids: Int64[np.ndarray, "n"], vocab_size: int) -> None:
    """Refuse tokens that the model lacks."""
    largest = int(ids.max(initial=0))
    if largest >= vocab_size:
        raise ValueError(
            f"the text has token {largest}, and the vocabulary of the model has only "
            f"{vocab_size}; give the tokenizer of the model with --tokenizer"
        )
