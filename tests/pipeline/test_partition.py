"""The cut of the layers: every layer once, the rule for uneven chunks, refusals."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.pipeline.partition import EMPTY, Partition, split

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))


@given(sizes=SIZES, units=st.integers(1, 60))
def test_every_layer_has_one_slot_on_the_stage_of_its_chunk(sizes, units):
    num_stages, num_chunks, period = sizes
    num_layers = max(units, num_stages * num_chunks) * period
    cut = split(
        num_layers,
        num_stages=num_stages,
        num_chunks=num_chunks,
        period=period,
        uneven=True,
    )
    assert cut.num_layers == num_layers
    layers = cut.layer_of_slot
    np.testing.assert_array_equal(
        np.sort(layers[layers != EMPTY]), np.arange(num_layers)
    )
    np.testing.assert_array_equal(layers[cut.slot_of_layer], np.arange(num_layers))
    by_place = layers.reshape(num_stages, num_chunks, cut.chunk_size)
    for stage, chunk in np.ndindex(num_stages, num_chunks):
        part = chunk * num_stages + stage
        count = cut.layers_per_chunk[part]
        held = by_place[stage, chunk]
        np.testing.assert_array_equal(
            held[:count], cut.first_layer[part] + np.arange(count)
        )
        assert (held[count:] == EMPTY).all()
        assert cut.first_layer[part] % period == 0


@given(sizes=SIZES, units=st.integers(1, 60))
def test_even_and_uneven_cuts_agree_where_the_layers_divide(sizes, units):
    num_stages, num_chunks, period = sizes
    num_layers = units * num_stages * num_chunks * period
    even, uneven = (
        split(
            num_layers,
            num_stages=num_stages,
            num_chunks=num_chunks,
            period=period,
            uneven=uneven,
        )
        for uneven in (False, True)
    )
    assert even == uneven
    assert set(even.layers_per_chunk) == {units * period}
    assert even.num_slots == num_layers
    assert even.is_canonical == (num_chunks == 1 or num_stages == 1)


@pytest.mark.parametrize(
    ("num_layers", "period", "counts"),
    [
        (11, 1, (3, 3, 3, 2)),
        (10, 1, (2, 3, 3, 2)),
        (9, 1, (2, 3, 2, 2)),
        (8, 1, (2, 2, 2, 2)),
        (21, 3, (6, 6, 6, 3)),
        (18, 3, (3, 6, 6, 3)),
    ],
)
def test_the_chunk_of_the_head_is_short_first_then_that_of_the_embedding(
    num_layers, period, counts
):
    cut = split(num_layers, num_stages=2, num_chunks=2, period=period, uneven=True)
    assert cut.layers_per_chunk == counts


def test_the_slots_of_a_stage_are_neighbours_and_empty_ones_are_last_in_a_chunk():
    cut = split(6, num_stages=2, num_chunks=2, uneven=True)
    assert cut.layers_per_chunk == (1, 2, 2, 1)
    np.testing.assert_array_equal(cut.layer_of_slot, [0, -1, 3, 4, 1, 2, 5, -1])
    assert cut.layer_of_slot.dtype == cut.slot_of_layer.dtype == np.int32
    assert not cut.is_canonical


def test_one_chunk_takes_any_number_of_layers_and_any_pattern():
    cut = split(7, num_stages=1, num_chunks=1, period=5)
    assert cut.layers_per_chunk == (7,)
    assert cut.is_canonical


@pytest.mark.parametrize(
    ("num_layers", "options", "message"),
    [
        (
            10,
            {"num_stages": 4, "num_chunks": 1},
            "without --pipeline.uneven-layers, --model.layers must be a multiple of "
            "--mesh.pp 4 x --pipeline.chunks 1 = 4, got 10",
        ),
        (
            18,
            {"num_stages": 2, "num_chunks": 2, "period": 3},
            "without --pipeline.uneven-layers, --model.layers must be a multiple of "
            "--mesh.pp 2 x --pipeline.chunks 2 x 3, the pattern of --model.window and "
            "--model.rope, = 12, got 18",
        ),
        (
            7,
            {"num_stages": 2, "num_chunks": 1, "period": 5, "uneven": True},
            "the virtual stages of --mesh.pp 2 x --pipeline.chunks 1 hold whole "
            "patterns: --model.layers must be a multiple of 5, the pattern of "
            "--model.window and --model.rope, got 7",
        ),
        (
            6,
            {"num_stages": 4, "num_chunks": 2, "uneven": True},
            "--model.layers must be at least --mesh.pp 4 x --pipeline.chunks 2 = 8, "
            "got 6",
        ),
        (
            4,
            {"num_stages": 4, "num_chunks": 1, "period": 4, "uneven": True},
            "--model.layers must be at least --mesh.pp 4 x --pipeline.chunks 1 x 4, "
            "the pattern of --model.window and --model.rope, = 16, got 4",
        ),
    ],
)
def test_a_cut_that_does_not_fit_is_refused_with_the_rule(num_layers, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        split(num_layers, **options)


def test_a_list_of_counts_must_fit_the_stages_and_leave_no_chunk_empty():
    with pytest.raises(ValueError, match="2 stages of 2 virtual stages need 4 counts"):
        Partition(num_stages=2, num_chunks=2, layers_per_chunk=(1, 2))
    with pytest.raises(
        ValueError, match=r"every virtual stage must have a layer.*\(1, 0\)"
    ):
        Partition(num_stages=2, num_chunks=1, layers_per_chunk=(1, 0))
