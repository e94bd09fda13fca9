import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.data.samples import NO_TARGET, PackedSamples

EOS, START = 9, 10
streams = st.lists(
    st.lists(st.integers(0, 8), min_size=1, max_size=12), min_size=1, max_size=8
).map(lambda docs: np.array([t for doc in docs for t in [*doc, EOS]], np.uint16))


def packed(stream, seq_len, isolate=True, start_id=None) -> PackedSamples:
    return PackedSamples(stream, seq_len, EOS, isolate, start_id)


@given(stream=streams, seq_len=st.integers(1, 20), start=st.sampled_from([EOS, START]))
def test_packed_samples_equal_a_token_by_token_reading(stream, seq_len, start):
    """Each document is [start, its tokens]; the target of the last one is EOS."""
    samples, before = packed(stream, seq_len, start_id=start), [EOS, *stream.tolist()]
    assert len(samples) == len(stream) // seq_len
    for index in range(len(samples)):
        segment, position, sample = 0, 0, samples[index]
        for t in range(seq_len):
            token, target = before[index * seq_len + t : index * seq_len + t + 2]
            if token == EOS:
                segment, position, token = segment + (t > 0), 0, start
            row = [sample[n][t] for n in ("tokens", "targets", "segments", "positions")]
            assert row == [token, target, segment, position]
            position += 1


@given(stream=streams, seq_len=st.integers(1, 20), isolate=st.booleans())
def test_every_token_of_the_stream_is_a_target_once(stream, seq_len, isolate):
    samples = packed(stream, seq_len, isolate, EOS)
    rows = samples.rows(np.arange(len(samples)))
    assert rows["targets"].ravel().tolist() == stream[: rows["targets"].size].tolist()


def test_a_start_token_in_the_ids_of_a_document_is_not_doubled():
    stream = np.array([START, 1, 2, EOS, 3, EOS, START, 4, EOS, START, 5], np.uint16)
    sample = packed(stream, len(stream), start_id=START)[0]
    assert sample["tokens"].tolist() == [
        *(EOS, START, 1, 2, START, 3, EOS, START, 4, EOS, START),
    ]
    assert sample["targets"].tolist() == [
        *(NO_TARGET, 1, 2, EOS, 3, EOS, NO_TARGET, 4, EOS, NO_TARGET, 5),
    ]
    assert sample["segments"].tolist() == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    assert sample["positions"].tolist() == [0, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0]


@given(stream=streams, seq_len=st.integers(1, 20))
def test_samples_of_version_1_equal_a_token_by_token_reading(stream, seq_len):
    samples = packed(stream, seq_len)
    assert len(samples) == (len(stream) - 1) // seq_len
    for index in range(len(samples)):
        segment = position = 0
        sample = samples[index]
        for t in range(seq_len):
            token, following = stream[index * seq_len + t : index * seq_len + t + 2]
            target = NO_TARGET if token == EOS else following
            row = [sample[n][t] for n in ("tokens", "targets", "segments", "positions")]
            assert row == [token, target, segment, position]
            position += 1
            if token == EOS:
                segment, position = segment + 1, 0


@given(stream=streams, seq_len=st.integers(1, 20))
def test_in_version_1_every_token_but_the_first_is_a_target_without_isolation(
    stream, seq_len
):
    samples = packed(stream, seq_len, isolate=False)
    rows = samples.rows(np.arange(len(samples)))
    np.testing.assert_array_equal(
        rows["targets"].ravel(), stream[1 : 1 + len(samples) * seq_len]
    )
    assert not rows["segments"].any()
    assert (rows["positions"] == np.arange(seq_len)).all()


def test_arrays_are_int32_and_independent_of_each_other_and_of_the_stream():
    stream = np.arange(9, dtype=np.uint16)
    for isolate in (True, False):
        rows = packed(stream, 4, isolate).rows(np.array([1, 0]))
        assert {array.dtype for array in rows.values()} == {np.dtype(np.int32)}
        rows["targets"][:] = -7
        assert rows["tokens"].tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert stream.tolist() == list(range(9))


def test_an_index_out_of_range_is_refused():
    samples = packed(np.arange(9, dtype=np.uint16), 4)
    with pytest.raises(IndexError):
        samples[2]
    assert samples[-1]["tokens"].tolist() == [4, 5, 6, 7]
