import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.data import sampler
from mjax.data.permutation import permuted
from mjax.data.sampler import epoch_indices, held_out_indices


def order(
    num_samples: int, num: int, seed: int = 0, corpus: int = 0, first: int = 0
) -> list[int]:
    numbers = range(first, first + num)
    return epoch_indices(numbers, num_samples, seed=seed, corpus=corpus).tolist()


@given(st.integers(1, 20), st.integers(-3, 2**40), st.integers(0, 3))
def test_every_epoch_reads_every_sample_exactly_once(num_samples, seed, corpus):
    indices = order(num_samples, 3 * num_samples, seed, corpus)
    for epoch in range(3):
        part = indices[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(part) == list(range(num_samples))


def test_epochs_seeds_and_corpora_have_different_orders():
    indices = order(100, 200)
    assert indices[:100] != indices[100:]
    assert indices != order(100, 200, seed=1)
    assert indices != order(100, 200, corpus=1) != order(100, 200, corpus=2)
    assert indices[:100] != list(range(100))


def test_a_large_epoch_is_a_permutation_too():
    indices = order(5000, 5000)
    assert sorted(indices) == list(range(5000))
    assert indices != list(range(5000))


@pytest.mark.parametrize(
    ("num_samples", "expected"),
    [(1000, [490, 457, 797, 984]), (1000000, [817082, 615467, 257463, 423466])],
)
def test_the_order_stays_the_same_from_version_to_version(num_samples, expected):
    # Fixed numbers on purpose: a run resumed after an update of numpy must go
    # on with the data that it would have read.
    got = epoch_indices(range(400, 404), num_samples, seed=0)
    assert got.tolist() == expected


def test_held_out_samples_come_in_one_order():
    indices = held_out_indices(range(20), 20)
    assert sorted(indices.tolist()) == list(range(20))
    assert held_out_indices(range(5, 9), 20).tolist() == indices[5:9].tolist()


def test_the_steps_of_a_block_share_one_permutation(monkeypatch: pytest.MonkeyPatch):
    calls = []

    def counted(places, size, *, seed):
        calls.append(len(places))
        return permuted(places, size, seed=seed)

    monkeypatch.setattr(sampler, "permuted", counted)
    sampler._block_of_order.cache_clear()
    steps = [order(10_000, 8, first=8 * step) for step in range(1250)]
    assert calls == [4096, 4096, 10_000 - 2 * 4096]
    assert sorted(itertools.chain(*steps)) == list(range(10_000))
