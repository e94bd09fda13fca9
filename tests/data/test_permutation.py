import grain.experimental
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.data.permutation import permuted

seeds = st.integers(0, 2**32 - 1)
# Grain's own permutation is none where the last place is a power of 4.
sizes = st.integers(4097, 2**40).filter(lambda size: size - 1 not in _POWERS_OF_4)
_POWERS_OF_4 = {4**k for k in range(8, 31)}


@given(size=sizes, seed=seeds, data=st.data())
def test_the_permutation_is_that_of_grain(size, seed, data):
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
    expected = [
        grain.experimental.index_shuffle(p, max_index=size - 1, seed=seed, rounds=4)
        for p in places
    ]
    assert permuted(np.array(places), size, seed=seed).tolist() == expected


@pytest.mark.parametrize(
    "size", [4097, 2**16 - 1, 2**16, 2**16 + 1, 2**16 + 2, 2**18 + 1]
)
@pytest.mark.parametrize("seed", [0, 5, 2**32 - 1])
def test_every_place_has_another_number(size, seed):
    found = permuted(np.arange(size), size, seed=seed)
    np.testing.assert_array_equal(np.sort(found), np.arange(size))


def test_the_largest_places_are_permuted():
    size = 2**62
    places = np.array([0, 1, size - 1])
    found = permuted(places, size, seed=7)
    assert len(set(found.tolist())) == 3
    assert ((found >= 0) & (found < size)).all()
