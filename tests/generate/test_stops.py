"""Streamed text has complete characters, no stop text, and equals the full text."""

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
import tokenizers
import tokenizers.decoders
import tokenizers.models
from hypothesis import given, settings
from hypothesis import strategies as st

from mjax.data.tokenizers import BytesTokenizer, HuggingFaceTokenizer, train_bpe
from mjax.generate.stops import TextOfTokens, Words

BYTES = BytesTokenizer()
LINES = [
    "for i in range(10):",
    "    return naïve 😀 façade",
    "日本語のテキスト",
    "stop here",
]
BPE = HuggingFaceTokenizer(train_bpe(LINES * 3, 300), origin="trained")


def pieces_of(tokenizer, tokens: Iterable[int], stop=()) -> tuple[list[str], bool]:
    """Feed tokens until a stop text is found; return the pieces."""
    text, pieces = TextOfTokens(Words(tokenizer), stop), []
    for token in tokens:
        piece, stopped = text.add(int(token))
        pieces.append(piece)
        if stopped:
            return pieces, True
    piece, stopped = text.end()
    return [*pieces, piece], stopped


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
@given(text=st.text(max_size=30))
@settings(max_examples=60, deadline=None)
def test_the_pieces_are_the_text_and_no_character_comes_in_parts(tokenizer, text):
    tokens = tokenizer.encode(text)
    pieces, stopped = pieces_of(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert not stopped
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(
    tokens=st.lists(st.integers(0, 255), max_size=24),
)
@settings(max_examples=80, deadline=None)
def test_bytes_that_are_no_text_are_shown_as_broken_and_end(tokens):
    pieces, _ = pieces_of(BYTES, tokens)
    shown = "".join(pieces)
    whole = BYTES.decode(np.asarray(tokens, np.int64))
    # Complete characters are in order; the number of replacement characters may differ.
    assert shown.replace("\ufffd", "") == whole.replace("\ufffd", "")


def all_texts(longest: int) -> list[str]:
    """All texts of the letters a and b, up to a length."""
    lengths = range(1, longest + 1)
    return ["".join(t) for n in lengths for t in itertools.product("ab", repeat=n)]


@given(
    text=st.text(alphabet="ab\u00e9", max_size=20),
    stop=st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=100, deadline=None)
def test_an_answer_ends_before_the_first_stop_text(text, stop):
    check_stops(text, stop)


def test_two_stop_texts_that_end_together_cut_at_the_longer_in_either_order():
    for text in all_texts(4):
        for stop in itertools.product(all_texts(2), repeat=2):
            check_stops(text, stop)


def check_stops(text, stop):
    pieces, stopped = pieces_of(BYTES, BYTES.encode(text), stop)
    # The first completed stop text ends the answer, at its first occurrence.
    ends = [
        end
        for end in range(1, len(text) + 1)
        if any(text[:end].endswith(s) for s in stop)
    ]
    if not ends:
        assert not stopped
        assert "".join(pieces) == text
        return
    seen = text[: ends[0]]
    assert stopped
    assert "".join(pieces) == seen[: min(seen.find(s) for s in stop if s in seen)]


def test_what_may_begin_a_stop_text_is_held_back_until_it_is_decided():
    text = TextOfTokens(Words(BYTES), ["END"])
    shown = [text.add(ord(char))[0] for char in "aENb"]
    assert shown == ["a", "", "", "ENb"]
    assert text.end() == ("", False)
    text.add(ord("E"))
    assert text.end() == ("E", False)


def test_an_answer_begins_with_the_space_that_follows_the_prompt():
    """SentencePiece writes a space before each word except the first."""
    vocab = {"<unk>": 0, "</s>": 1, "\u2581one": 2, "\u2581two": 3, "\u2581three": 4}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>"))
    library.decoder = tokenizers.decoders.Metaspace()
    found = HuggingFaceTokenizer(library.to_str(), origin="words")
    assert found.decode(np.array([2, 3])) == "one two"
    text = TextOfTokens(Words(found), before=[2, 3])
    assert [text.add(4)[0], text.add(2)[0]] == [" three", " one"]
    assert TextOfTokens(Words(found)).add(4)[0] == "three"
