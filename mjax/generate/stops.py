"""Decode tokens one by one, and detect the texts that end an answer.

Input: the tokens of one answer, one by one. Output: pieces of text that can be shown.
A piece has complete characters only, and no text that may begin a stop text. The joined
pieces are the answer, independent of how tokens split it.
"""

from collections.abc import Sequence

import numpy as np

from mjax.data.tokenizers import Tokenizer

_BROKEN = "\ufffd"
"""Replacement character for bytes that are not (yet) a complete character."""
_MOST_HELD = 8
"""Maximum number of tokens held until a character is complete. A character has at most
4 bytes, and a token of a byte-level vocabulary at least one, so 4 tokens suffice. Twice
that number."""


class Words:
    """Decodes tokens and caches the text of each single token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start with an empty cache, which holds at most one text per token."""
        self._decode = tokenizer.decode
        self._alone: dict[int, str] = {}

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        if len(tokens) != 1:
            return self._decode(np.asarray(tokens, np.int64))
        text = self._alone.get(tokens[0])
        if text is None:
            text = self._alone[tokens[0]] = self._decode(np.asarray(tokens, np.int64))
        return text


class TextOfTokens:
    """Decodes one answer."""

    def __init__(
        self,
        words: Words,
        stop: Sequence[str] = (),
        *,
        before: Sequence[int] = (),
    ) -> None:
        """Start before the first token of the answer.

        Args:
          words: decoder of the model's tokenizer.
          stop: texts that end the answer; they are not shown.
          before: tokens of the prompt. The last ones affect the text of the first
            answer token, because SentencePiece drops the space at the beginning of a
            text.
        """
        self._words = words
        self._stop = tuple(stop)
        self._tokens = list(before[-_MOST_HELD:])
        self._shown_from = 0
        """Tokens before this index only provide context for decoding, because a
        tokenizer may treat the first token of a text differently."""
        self._read_to = len(self._tokens)
        """Tokens before this index are in the text."""
        self._held = ""

    def add(self, token: int) -> tuple[str, bool]:
        """Add a token; return the text to show now, and whether the answer ends."""
        self._tokens.append(token)
        return self._release(self._new_text(flush=False), flush=False)

    def end(self) -> tuple[str, bool]:
        """Return the text held back until now, and whether a stop text ends it."""
        return self._release(self._new_text(flush=True), flush=True)

    def _new_text(self, *, flush: bool) -> str:
        """Return the text of the tokens since the last call, once it is complete."""
        tokens = self._tokens[self._shown_from :]
        num_read = self._read_to - self._shown_from
        before = self._words.text(tokens[:num_read])
        whole = self._words.text(tokens)
        waits = len(tokens) - num_read
        if whole.endswith(_BROKEN) and waits < _MOST_HELD and not flush:
            return ""
        self._shown_from, self._read_to = self._read_to, len(self._tokens)
        return whole[len(before) :]

    def _release(self, new: str, *, flush: bool) -> tuple[str, bool]:
        if not self._stop:
            return new, False
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        held = 0 if flush else _overlap(text, self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False


def check_stops(tokenizer: Tokenizer, stop: Sequence[str]) -> None:
    """Refuse a stop text that cannot occur in an answer.

    Args:
      tokenizer: tokenizer of the model.
      stop: stop texts, none empty.
    Raises:
      ValueError: the tokenizer cannot produce a text; the message begins with that
        text.
    """
    for text in stop:
        if tokenizer.decode(tokenizer.encode(text)).strip() != text.strip():
            raise ValueError(
                f"{text!r} is a text that the tokenizer cannot produce, so no answer "
                "would ever end with it; leave it out or change it"
            )


def _overlap(text: str, stop: Sequence[str]) -> int:
    """Return the number of last characters of a text that may begin a stop text."""
    most = max((len(s) - 1 for s in stop), default=0)
    return next(
        (
            n
            for n in range(min(most, len(text)), 0, -1)
            if any(s.startswith(text[-n:]) for s in stop)
        ),
        0,
    )
