import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.data.sampler import held_out_indices, train_indices


def stream(
    num_samples: int, batch_size: int, num_steps: int, seed: int = 0
) -> list[int]:
    parts = [
        train_indices(num_samples, seed=seed, step=step, batch_size=batch_size)
        for step in range(num_steps)
    ]
    return np.concatenate(parts).tolist()


@given(st.integers(1, 20), st.integers(1, 12), st.integers(-3, 2**40))
def test_every_epoch_reads_every_sample_exactly_once(num_samples, batch_size, seed):
    num_steps = -(-3 * num_samples // batch_size)
    indices = stream(num_samples, batch_size, num_steps, seed)
    for epoch in range(3):
        part = indices[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(part) == list(range(num_samples))


def test_epochs_and_seeds_have_different_orders():
    indices = stream(100, 10, 20)
    assert indices[:100] != indices[100:]
    assert indices != stream(100, 10, 20, seed=1)
    assert indices[:100] != list(range(100))


@given(st.integers(0, 1000), st.integers(0, 7), st.integers(1, 8))
def test_part_of_the_rows_is_part_of_the_batch(step, start, size):
    rows = slice(start, start + size)
    whole = train_indices(37, seed=5, step=step, batch_size=8)
    part = train_indices(37, seed=5, step=step, batch_size=8, rows=rows)
    assert part.tolist() == whole[rows].tolist()


def test_the_order_of_samples_does_not_depend_on_the_batch_size():
    assert stream(30, 4, 15) == stream(30, 12, 5)


def test_a_large_epoch_is_a_permutation_too():
    order = stream(5000, 500, 10)
    assert sorted(order) == list(range(5000))
    assert order != list(range(5000))


@pytest.mark.parametrize(
    ("num_samples", "expected"),
    [(1000, [490, 457, 797, 984]), (1000000, [817082, 615467, 257463, 423466])],
)
def test_the_order_stays_the_same_from_version_to_version(num_samples, expected):
    # Fixed numbers on purpose: a run resumed after an update of Grain or numpy must go
    # on with the data that it would have read.
    got = train_indices(num_samples, seed=0, step=100, batch_size=4)
    assert got.tolist() == expected


def test_held_out_samples_come_in_one_order_and_end():
    order = held_out_indices(20, 0, 100)
    assert sorted(order.tolist()) == list(range(20))
    assert held_out_indices(20, 5, 9).tolist() == order[5:9].tolist()
    assert len(held_out_indices(20, 25, 30)) == 0


def test_impossible_requests_are_refused():
    with pytest.raises(ValueError, match="num_samples=0"):
        train_indices(0, seed=0, step=0, batch_size=1)
    with pytest.raises(ValueError, match="step=-1"):
        train_indices(1, seed=0, step=-1, batch_size=1)
