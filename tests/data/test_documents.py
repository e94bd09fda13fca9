import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.data import documents
from mjax.data.documents import DocumentSamples, index_documents
from mjax.data.samples import NO_TARGET

EOS, START = 9, 10
texts = st.lists(st.lists(st.integers(0, 8), max_size=30), min_size=1, max_size=8)


def unpacked(
    stream: np.ndarray, seq_len: int, start_id: int | None = None
) -> DocumentSamples:
    index = index_documents(stream, EOS, seq_len, has_starts=start_id is not None)
    return DocumentSamples(stream, index, seq_len, EOS, start_id)


def as_stream(docs: list[list[int]], is_cut: bool = False) -> np.ndarray:
    tokens = [token for doc in docs for token in [*doc, EOS]]
    return np.array(tokens[:-1] if is_cut else tokens, np.uint16)


@given(
    docs=texts,
    seq_len=st.integers(1, 12),
    is_cut=st.booleans(),
    start=st.sampled_from([None, EOS, START]),
)
def test_samples_equal_a_token_by_token_reading(docs, seq_len, is_cut, start):
    samples, expected = unpacked(as_stream(docs, is_cut), seq_len, start), []
    for number, doc in enumerate(docs):
        whole = doc if is_cut and number == len(docs) - 1 else [*doc, EOS]
        whole = whole if start is None else [start, *whole]
        for place in range(0, len(whole) - 1, seq_len):
            expected.append(whole[place : place + seq_len + 1])
    assert len(samples) == len(expected)
    rows = samples.rows(np.arange(len(samples)))
    assert {array.shape for array in rows.values()} == {(len(expected), seq_len)}
    for row, piece in enumerate(expected):
        size, rest = len(piece) - 1, seq_len - len(piece) + 1
        row_of = {name: array[row].tolist() for name, array in rows.items()}
        assert row_of["tokens"] == piece[:-1] + rest * [EOS]
        assert row_of["targets"] == piece[1:] + rest * [NO_TARGET]
        assert row_of["segments"] == size * [0] + rest * [1]
        assert row_of["positions"] == [*range(size), *range(rest)]


@given(docs=texts, seq_len=st.integers(1, 12), start=st.sampled_from([None, START]))
def test_every_token_but_in_version_1_the_first_is_a_target_once(docs, seq_len, start):
    samples = unpacked(as_stream(docs), seq_len, start)
    targets = samples.rows(np.arange(len(samples)))["targets"]
    first = int(start is None)
    expected = [token for doc in docs for token in [*doc, EOS][first:]]
    assert targets[targets != NO_TARGET].tolist() == expected


def test_a_start_token_in_the_ids_of_a_document_is_not_doubled():
    stream = as_stream([[START, 1, 2], [3], [START, 4, 5, 6, 7, 8]])
    samples = unpacked(stream, 4, START)
    rows = samples.rows(np.arange(len(samples)))
    kept = [
        (t[s == 0].tolist(), y[s == 0].tolist())
        for t, y, s in zip(
            rows["tokens"], rows["targets"], rows["segments"], strict=True
        )
    ]
    assert kept == [
        ([START, 1, 2], [1, 2, EOS]),
        ([START, 3], [3, EOS]),
        ([START, 4, 5], [4, 5, 6]),
        ([6, 7, 8], [7, 8, EOS]),
    ]


def test_the_index_does_not_depend_on_how_the_stream_is_looked_through(monkeypatch):
    stream = as_stream([[1] * n for n in (3, 0, 0, 11, 1, 7)])
    whole = index_documents(stream, EOS, 4)
    for size in (1, 4, 5):
        monkeypatch.setattr(documents, "_BLOCK_TOKENS", size)
        assert (index_documents(stream, EOS, 4) == whole).all()


def test_documents_that_hold_no_target_have_no_sample():
    """In version 1; with a start token, the end token of each document is a target."""
    assert len(unpacked(as_stream([[], []]), 4, START)) == 2
    assert len(unpacked(as_stream([[], []]), 4)) == 0
    assert len(unpacked(np.zeros(0, np.uint16), 4)) == 0
    samples = unpacked(as_stream([[], [1], [], [], [2]]), 4)
    assert [samples[i]["tokens"][0] for i in range(len(samples))] == [1, 2]
    with pytest.raises(IndexError):
        samples[2]


def test_a_document_of_any_size_is_read_a_piece_at_a_time():
    """A million tokens: a sample takes the few that it holds, first and last too."""
    stream = np.append(np.arange(1_000_000, dtype=np.uint32) % EOS, np.uint32(EOS))
    samples = unpacked(stream, 300)
    assert len(samples) == 3334
    assert samples[-1]["targets"][99] == EOS
    assert samples[-1]["segments"].tolist() == 100 * [0] + 200 * [1]
    assert samples[3]["tokens"].tolist() == stream[900:1200].tolist()
