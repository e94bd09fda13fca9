"""Text of tokens as they come, and the texts that end it.

Enters: the tokens of one answer, one by one. Leaves: pieces of text that can be shown.
A piece has whole characters only, and nothing that may be the beginning of a stop text;
the pieces together are the answer, whatever the tokens were cut into.
"""

from collections.abc import Sequence

import numpy as np

from mjax.data.tokenizers import Tokenizer

_BROKEN = "\ufffd"
"""What stands for bytes that are not a whole character (yet)."""
_MOST_HELD = 8
"""Tokens that may wait for the end of a character: one has 4 bytes at most, and a token
of a byte-level vocabulary holds one byte at least. Chosen, twice that."""


class Words:
    """Decodes tokens, and caches the text of each single token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Remember nothing yet; at most one text for each token."""
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
        """Begin with no tokens of the answer.

        Args:
          words: of the model's tokenizer.
          stop: texts that end the answer; they are not shown.
          before: tokens of the prompt. Its last ones decide how the first of the answer
            is written: SentencePiece drops the space that a text begins with.
        """
        self._words = words
        self._stop = tuple(stop)
        self._tokens = list(before[-_MOST_HELD:])
        self._shown_from = 0
        """Tokens before this one are only there so that others decode as they would
        in the whole text; a tokenizer may treat the first of a text differently."""
        self._read_to = len(self._tokens)
        """Tokens before this one are in the text."""
        self._held = ""

    def add(self, token: int) -> tuple[str, bool]:
        """Take a token; return what can be shown now, and whether a stop text came."""
        self._tokens.append(token)
        return self._release(self._new_text(flush=False), flush=False)

    def end(self) -> tuple[str, bool]:
        """Return what was held back, when no token is to come."""
        return self._release(self._new_text(flush=True), flush=True)

    def _new_text(self, *, flush: bool) -> str:
        """Return the text of the tokens since the last call, once it is whole."""
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
    """Refuse a stop text that no answer can end with.

    Args:
      tokenizer: of the model.
      stop: texts, none of them empty.
    Raises:
      ValueError: the tokenizer cannot write one; the message begins with it.
    """
    for text in stop:
        if tokenizer.decode(tokenizer.encode(text)).strip() != text.strip():
            raise ValueError(
                f"{text!r} is a text that the tokenizer cannot write, so no answer "
                "would ever end with it; leave it out, or write it otherwise"
            )


def _overlap(text: str, stop: Sequence[str]) -> int:
    """Return how many last characters of a text may begin a stop text."""
    most = max((len(s) - 1 for s in stop), default=0)
    return next(
        (
            n
            for n in range(min(most, len(text)), 0, -1)
            if any(s.startswith(text[-n:]) for s in stop)
        ),
        0,
    )
