import fractions

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.data import mixture

weights = st.lists(st.integers(1, 300), min_size=1, max_size=7).map(
    lambda parts: tuple(part / 100 for part in parts)
)


@given(weights)
def test_every_prefix_holds_each_corpus_in_its_share_within_one_sample(weights):
    exact = [fractions.Fraction(repr(weight)) for weight in weights]
    period, num = sum(mixture.shares(weights)), len(weights)
    # More than two periods, then everything repeats.
    prefixes = np.arange(1, 2 * period + 10)
    corpus, _ = mixture.places(prefixes - 1, weights)
    for index, weight in enumerate(exact):
        share = weight / sum(exact)
        counts = np.cumsum(corpus == index)
        excess = counts * share.denominator - prefixes * share.numerator
        # Tijdeman's bound; 1 - 1 / (2 C - 2) < 1.
        bound = (1 - fractions.Fraction(1, 2 * num - 2)) if num > 1 else 0
        assert np.abs(excess).max() <= bound * share.denominator


@given(weights, st.integers(0, 2**40))
def test_any_place_is_found_without_the_ones_before(weights, number):
    """Counted from the start of its period, in another way than by the table."""
    shares = mixture.shares(weights)
    period, index = divmod(number, sum(shares))
    before, _ = mixture.places(np.arange(index), weights)
    corpus, place = mixture.places(np.array([number]), weights)
    assert place[0] == period * shares[corpus[0]] + (before == corpus[0]).sum()


@given(weights, st.data())
def test_a_mixture_ends_where_a_corpus_has_no_further_sample(weights, data):
    size = st.integers(1, 400)
    sizes = tuple(data.draw(size) for _ in weights)
    end = mixture.first_without(sizes, weights)
    corpus, place = mixture.places(np.arange(end + 1), weights)
    is_there = place < np.array(sizes)[corpus]
    assert is_there[:end].all()
    assert not is_there[end]


def test_weights_are_the_decimal_numbers_they_are_written_as():
    # As binary numbers, these three have no common unit worth the name.
    assert mixture.shares((0.1, 0.2, 0.7)) == (1, 2, 7)
    assert mixture.shares((30.0, 10.0)) == (3, 1)
    assert mixture.shares((1e-4, 0.9999)) == (1, 9999)


def test_the_mixed_order_stays_the_same_from_version_to_version():
    # Fixed on purpose: a resumed run goes on with the data that it would have read.
    corpus, place = mixture.places(np.arange(10), (0.7, 0.2, 0.1))
    assert corpus.tolist() == [0, 0, 1, 0, 0, 2, 0, 0, 1, 0]
    assert place.tolist() == [0, 1, 0, 2, 3, 0, 4, 5, 1, 6]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((), r"positive and finite, got \(\)"),
        ((0.5, 0.0), r"positive and finite, got \(0.5, 0.0\)"),
        ((1.0, float("inf")), "positive and finite"),
        ((0.123457, 0.876543), "after 1000000 in the ratio 123457:876543; round"),
    ],
)
def test_weights_that_no_table_can_hold_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        mixture.shares(weights)
