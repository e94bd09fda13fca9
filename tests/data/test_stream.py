import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.data.stream import Stream
from mjax.data.synthetic import SyntheticSamples

# (samples, seed, step, batch size): the samples read before there were mixtures, by the
# function that this stream replaced (mjax 0.1, sampler.train_indices).
RECORDED = [
    (1, 0, 0, 5, [0, 0, 0, 0, 0]),
    (7, 0, 0, 5, [6, 4, 1, 5, 0]),
    (7, 7, 3, 4, [6, 4, 0, 3]),
    (100, 7, 3, 4, [65, 84, 0, 51]),
    (100, 2**32 - 1, 1000, 3, [60, 62, 0]),
    (4096, 2**32 - 1, 1000, 3, [2131, 2461, 3217]),
    (4097, 7, 3, 4, [3366, 2230, 3630, 1232]),
    (1_000_000, 0, 0, 5, [275232, 94824, 987297, 672072, 29473]),
    (1_000_000, 2**32 - 1, 1000, 3, [995215, 703384, 273709]),
]


def one_corpus(num_samples: int, seed: int = 0) -> Stream:
    return Stream((SyntheticSamples(num_samples, 4, 0, 0),), (1.0,), seed)


@pytest.mark.parametrize(("num", "seed", "step", "batch_size", "expected"), RECORDED)
def test_one_corpus_is_read_in_the_order_it_always_was(
    num, seed, step, batch_size, expected
):
    ids = one_corpus(num, seed).ids(step, batch_size)
    assert ids.tolist() == [[0, sample] for sample in expected]


@given(st.integers(0, 1000), st.integers(0, 7), st.integers(0, 8))
def test_part_of_the_rows_is_part_of_the_batch(step, start, size):
    stream, rows = one_corpus(37, seed=5), slice(start, start + size)
    whole, part = stream.rows(step, 8), stream.rows(step, 8, rows)
    assert stream.ids(step, 8, rows).tolist() == stream.ids(step, 8)[rows].tolist()
    for name, array in part.items():
        np.testing.assert_array_equal(array, whole[name][rows], strict=True)


def test_the_order_of_samples_does_not_depend_on_the_batch_size():
    stream = one_corpus(30)
    small = np.concatenate([stream.ids(step, 4) for step in range(15)])
    large = np.concatenate([stream.ids(step, 12) for step in range(5)])
    assert small.tolist() == large.tolist()


def test_impossible_requests_are_refused():
    with pytest.raises(
        ValueError, match=r"every corpus must have samples.*\[0\] samples"
    ):
        one_corpus(0)
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        one_corpus(1).ids(-1, 1)
    with pytest.raises(ValueError, match="each of 0 corpora, got"):
        Stream((), (1.0,), 0)
