"""The shape of a matmul limits its speed: tiles, waves, short sums, and tp."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.estimate.formulas.case import Case, Constants, Device
from mjax.estimate.formulas.matmul import (
    LARGE,
    START_K,
    layer_matmuls,
    layer_speed,
    relative_speed,
)
from mjax.estimate.formulas.step_time import simulate
from mjax.hardware.gpus import GPUS
from mjax.mesh.axes import AxisSizes
from mjax.plan import closed_form
from mjax.plan.search import HIDDEN, HIDDEN_WITHOUT_PIPELINE

NUM_SMS = 132
EXACT = 1e-12  # a few products of float64 numbers
size = st.integers(1, 20_000)


def layer(d_model: int, tp: int, *, in_chunks: bool) -> Case:
    """Return a GPT with parallel blocks and microbatches of 2,048 tokens."""
    heads = d_model // 128
    return Case(
        layers=1,
        d_model=d_model,
        d_ff=4 * d_model,
        heads=heads,
        head_width=128,
        kv_heads=heads,
        gated=False,
        parallel=True,
        vocab_size=32_768,
        seq_len=2048,
        sizes=AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=tp),
        microbatches=1,
        tp_chunks=tp if in_chunks else 1,
    )


@given(size, size, size)
def test_no_matmul_is_faster_than_a_large_one(m: int, n: int, k: int):
    assert 0 < relative_speed(m, n, k, NUM_SMS) <= 1


def test_a_large_matmul_keeps_its_efficiency():
    for times in (1, 2, 3):
        assert relative_speed(*(times * LARGE,) * 3, NUM_SMS) == 1.0


def test_one_tile_too_many_takes_another_wave():
    """33 x 4 tiles of 256 x 128 fill 132 multiprocessors once, and 33 x 8 twice."""
    full = relative_speed(33 * 256, 4 * 128, 512, NUM_SMS)
    assert relative_speed(33 * 256, 8 * 128, 512, NUM_SMS) == pytest.approx(full)
    assert relative_speed(33 * 256, 4 * 128 + 1, 512, NUM_SMS) < full


def test_a_short_sum_waits_for_its_first_operands():
    long, short = (relative_speed(33 * 256, 4 * 128, k, NUM_SMS) for k in (2048, 512))
    ratio = (512 / (512 + START_K)) / (2048 / (2048 + START_K))
    assert short / long == pytest.approx(ratio, rel=EXACT)


def test_a_matmul_with_few_rows_uses_small_tiles():
    """One multiprocessor computes 64 x 64 at 3/8 of the speed of 256 x 128."""
    one = relative_speed(64, 64, 512, NUM_SMS)
    of_large = relative_speed(33 * 256, 4 * 128, 512, NUM_SMS) / NUM_SMS
    assert one / of_large == pytest.approx(3 / 8, rel=EXACT)


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("d_model", [2048, 4096, 8192, 12_288])
def test_tensor_parallelism_makes_no_layer_faster(d_model: int, in_chunks: bool):
    cases = [layer(d_model, tp, in_chunks=in_chunks) for tp in (1, 2, 4, 8)]
    speeds = [layer_speed(case, NUM_SMS) for case in cases]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[-1] < speeds[0] <= 1


@pytest.mark.parametrize("tp_chunks", [1, 4])
@pytest.mark.parametrize("parallel", [True, False])
def test_the_shapes_are_those_of_the_layer(parallel: bool, tp_chunks: int):
    case = dataclasses.replace(
        layer(4096, 4, in_chunks=False),
        parallel=parallel,
        gated=True,
        kv_heads=8,
        tp_chunks=tp_chunks,
    )
    products = sum(m * n * k for m, n, k in layer_matmuls(case)) * tp_chunks
    assert products == case.tokens * case.layer_weights // case.sizes.tp


def test_small_matmuls_slow_the_matmuls_of_a_step_and_nothing_else():
    device = Device.of(GPUS["h100"])
    case = layer(2048, 8, in_chunks=True)
    constant = simulate(case, device, Constants())
    found = simulate(case, device, Constants(by_shape=True))
    speed = layer_speed(case, device.num_sms)
    assert found.products_s == pytest.approx(constant.products_s / speed, rel=EXACT)
    assert dataclasses.replace(found, products_s=constant.products_s) == constant


def test_only_the_search_counts_shapes():
    assert HIDDEN.by_shape
    assert HIDDEN_WITHOUT_PIPELINE.by_shape
    assert not closed_form.ASSUMED.by_shape


def test_the_number_of_multiprocessors_is_that_of_the_gpu():
    assert Device.of(GPUS["a100-80g"]).num_sms == 108
