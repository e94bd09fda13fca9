"""Each token of a sequence is scored once, with the context of its stride."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.data.corpora import Document, Source
from mjax.data.samples import NO_TARGET
from mjax.data.tokenizers import BytesTokenizer
from mjax.evaluate import texts, windows
from mjax.evaluate.windows import Piece


def pieces(sizes: list[int], cut: int) -> list[Piece]:
    """Sequences of consecutive, unique numbers, in pieces of some tokens."""
    found, first = [], 0
    for size in sizes:
        tokens = np.arange(first, first + size, dtype=np.int32)
        first += size
        for start in range(0, size, cut):
            part = tokens[start : start + cut]
            found.append(Piece(tokens=part, scored=part.copy(), begins=start == 0))
    return found


@given(
    st.lists(st.integers(1, 40), max_size=6),
    st.integers(1, 9),
    st.integers(1, 12),
    st.data(),
)
def test_every_token_with_context_is_scored_exactly_once_in_order(
    sizes: list[int], cut: int, length: int, data: st.DataObject
):
    stride = data.draw(st.integers(1, length))
    found = list(windows.windows_of(pieces(sizes, cut), length=length, stride=stride))
    firsts = np.cumsum([0, *sizes])[:-1]
    wanted = sorted(set(range(sum(sizes))) - {int(f) for f in firsts})
    scored = [w.targets[w.targets != NO_TARGET] for w in found]
    assert np.concatenate([*scored, np.zeros(0, int)]).tolist() == wanted
    for window in found:
        at = np.flatnonzero(window.targets != NO_TARGET)
        assert (window.targets[at] == window.tokens[at] + 1).all()
        start = int(firsts[firsts <= window.tokens[0]].max())
        for place in at.tolist():
            before = int(window.targets[place]) - start
            assert place + 1 >= min(before, length - stride + 1)


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(1, 4))
def test_packed_windows_are_found_again_where_they_were_put(
    sizes: list[int], num_rows: int
):
    cut = list(
        windows.windows_of(pieces([n + 1 for n in sizes], 5), length=9, stride=9)
    )
    found = []
    for batch in windows.pack(cut, num_rows=num_rows, row_len=12):
        spans = {(p.row, p.start + i) for p in batch.places for i in range(p.length)}
        assert len(spans) == sum(place.length for place in batch.places)
        for p in batch.places:
            part = p.row, slice(p.start, p.start + p.length)
            found.append(batch.arrays["tokens"][part])
            assert len(set(batch.arrays["segments"][part].tolist())) == 1
            assert batch.arrays["positions"][part].tolist() == list(range(p.length))
        used = np.zeros((num_rows, 12), bool)
        for row, column in spans:
            used[row, column] = True
        assert (batch.arrays["targets"][~used] == NO_TARGET).all()
    assert [f.tolist() for f in found] == [w.tokens.tolist() for w in cut]


def test_a_stride_that_leaves_tokens_out_is_refused():
    with pytest.raises(ValueError, match="--stride must be from 1 to --seq-len 8, got"):
        windows.check(8, 9)


def documents(source: Source, contents: list[str]) -> list[Document]:
    return [Document(source, i, iter([t])) for i, t in enumerate(contents)]


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("start", [(), (256,), (256, 7)])
@pytest.mark.parametrize("end", [True, False])
def test_the_counts_of_documents_are_those_of_their_text(
    tmp_path, isolate: bool, start: tuple[int, ...], end: bool
):
    contents = ["", "aé", "", "b", "xyz"]
    layout = texts.Layout(isolate=isolate, start_ids=start, end_id=256, score_end=end)
    counts = texts.Counts()
    found = list(
        texts.pieces_of(
            documents(Source("a", tmp_path, "jsonl"), contents),
            BytesTokenizer(),
            layout,
            vocab_size=257,
            counts=counts,
        )
    )
    assert (counts.documents, counts.empty_documents) == (3, 2)
    assert counts.text_bytes == 7
    num_bare = 0 if start else 3 if isolate else 1
    assert counts.unscored_tokens == counts.unscored_bytes == num_bare
    assert counts.tokens == 7 - num_bare + 3 * end
    cut = windows.windows_of(found, length=4, stride=2)
    scored = np.concatenate([w.targets[w.targets != NO_TARGET] for w in cut])
    assert len(scored) == counts.tokens
    assert sum(p.begins for p in found) == (3 if isolate else 1)


def digest_of(contents: list[str], tmp_path) -> str:
    counts = texts.Counts()
    list(
        texts.pieces_of(
            documents(Source("a", tmp_path, "jsonl"), contents),
            BytesTokenizer(),
            texts.Layout(isolate=True, start_ids=(), end_id=256, score_end=True),
            vocab_size=257,
            counts=counts,
        )
    )
    return counts.digest.hexdigest()


def test_the_digest_is_of_the_documents_with_text_in_their_order(tmp_path):
    found = digest_of(["ab", "", "c"], tmp_path)
    assert found == digest_of(["ab", "c"], tmp_path)
    others = (["a", "bc"], ["abc"], ["c", "ab"], ["ab", "c", "c"])
    assert found not in {digest_of(other, tmp_path) for other in others}


def test_lines_that_a_tokenizer_changes_are_counted():
    assert texts.lost_bytes("one\nTwo\n", "one\ntwo\n") == 4
    assert texts.lost_bytes("one", "o\nne") == 3


class Lower(BytesTokenizer):
    def encode(self, text: str):
        return super().encode(text.lower())


def test_a_tokenizer_that_changes_letters_is_refused_though_bytes_are_as_many(tmp_path):
    read = texts.pieces_of(
        documents(Source("a", tmp_path, "jsonl"), ["Every Line", "Changes"]),
        Lower(),
        texts.Layout(isolate=True, start_ids=(), end_id=256, score_end=True),
        vocab_size=257,
        counts=texts.Counts(),
    )
    with pytest.raises(ValueError, match="does not keep the text: of the first 17"):
        list(read)
