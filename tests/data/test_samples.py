import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.data.samples import NO_TARGET, PackedSamples

EOS = 9
streams = st.lists(
    st.lists(st.integers(0, 8), min_size=1, max_size=12), min_size=1, max_size=8
).map(lambda docs: np.array([t for doc in docs for t in [*doc, EOS]], np.uint16))


def packed(stream, seq_len, isolate=True) -> PackedSamples:
    return PackedSamples(stream, seq_len, EOS, isolate)


@given(stream=streams, seq_len=st.integers(1, 20))
def test_packed_samples_equal_a_token_by_token_reading(stream, seq_len):
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
def test_without_isolation_every_token_but_the_first_is_a_target_once(stream, seq_len):
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
