"""The forecast of the attention kernels, on loops made by hand."""

import dataclasses

import pytest

from scripts.kernels import (
    attention_loops,
    forecast,
    forecast_changes,
    forecast_schedules,
    kernel_speed,
    published,
    schedule,
    sm_model,
)
from scripts.kernels.attention_shapes import KERNELS, SHAPES
from scripts.kernels.kernel_speed import Constants, Kernel
from scripts.kernels.sm_model import Product, Turn, Wait, Work

ALL = Wait(most_unfinished=0)


def product(head_dim: int, block: int) -> Product:
    flops = 2.0 * 64 * block * head_dim
    return Product(flops=flops, shared_bytes=2.0 * block * head_dim)


def kernel(head_dim: int, block: int, plain: sm_model.Program) -> Kernel:
    return Kernel(
        head_dim=head_dim,
        tile=128,
        block=block,
        warpgroups=2,
        plain=plain,
        masked=plain,
        loaded_bytes=4.0 * block * head_dim,
    )


def kernels(head_dim: int) -> dict[str, Kernel]:
    """Return kernels with about the work that the compiled ones have."""
    long, short = product(head_dim, 128), product(head_dim, 64)
    softmax = [
        Work(clocks={"issue": 100, "alu": 150}),
        Work(clocks={"issue": 270, "mufu": 528, "fma": 130}),
    ]
    scores = Work(clocks={"issue": 180, "mufu": 256, "fma": 80})
    gradients = Work(clocks={"issue": 100, "fma": 64, "alu": 64})
    one = Wait(most_unfinished=1)
    turns = Turn(taken=True), Turn(taken=False)
    forward = [turns[0], long, long, turns[1], one, *softmax, ALL]
    dq = [short, short, one, scores, ALL, gradients, short]
    dkv = [short, ALL, scores, short, short, one, gradients, short]
    return {
        "forward": kernel(head_dim, 128, forward),
        "dq": kernel(head_dim, 64, dq),
        "dkv": kernel(head_dim, 64, dkv),
    }


CASES = {case: kernels(int(case.partition(":")[0])) for case in forecast.CASES}
CONSTANTS = Constants(slowness=1.5, sustained=0.7)


def test_clocks_become_time_at_the_sustained_clock():
    assert Constants(slowness=1, sustained=1).us(1830) == pytest.approx(1.0)
    assert Constants(slowness=1, sustained=0.5).us(1830) == pytest.approx(2.0)


def test_the_peak_is_that_of_the_data_sheet():
    assert kernel_speed.peak_tflops() == pytest.approx(989.4, rel=1e-3)


def test_model_flops_are_counted_as_in_the_source():
    sizes = {"batch": 2, "seq_len": 1024, "heads": 3, "head_dim": 64}
    full = published.model_flops(**sizes, causal=False, backward=False)
    assert full == 4 * 2 * 3 * 1024 * 1024 * 64
    assert published.model_flops(**sizes, causal=True, backward=False) == full / 2
    assert published.model_flops(**sizes, causal=True, backward=True) == full * 1.25


def test_the_two_constants_give_the_two_speeds_they_were_fitted_on():
    own = kernels(128)
    constants = kernel_speed.fitted(own["forward"], own["dkv"])
    assert constants.slowness > 1
    assert 0.5 < constants.sustained < 1
    series = dataclasses.replace(published.SERIES[2], flash3=())
    assert (series.head_dim, series.causal, series.backward) == (128, False, False)
    # T 8192 of the figure and T 8448 of the ablation hardly differ.
    speed = forecast.model_tflops(CASES, series, constants)[4]
    assert speed == pytest.approx(published.ABLATION_FULL, rel=0.05)


def test_slower_constants_give_slower_kernels():
    step = kernels(64)["forward"].step_clocks
    clocks = [step(dataclasses.replace(CONSTANTS, slowness=k)) for k in (1, 1.5, 2, 3)]
    assert clocks == sorted(clocks)
    assert clocks[0] < clocks[-1]
    assert CONSTANTS.us(100) > dataclasses.replace(CONSTANTS, sustained=0.8).us(100)


def test_a_step_is_never_faster_than_its_resources():
    for own in CASES.values():
        for one in own.values():
            assert one.step_clocks(CONSTANTS) >= one.counts(one.plain).most


def test_a_round_of_two_blocks_counts_for_two():
    one = kernels(128)["dq"]
    two = dataclasses.replace(one, plain=[*one.plain, *one.plain], blocks=2.0)
    expected = dataclasses.astuple(one.counts(one.plain))
    assert dataclasses.astuple(two.counts(two.plain)) == pytest.approx(expected)


def test_a_forecast_stays_below_the_sustained_peak():
    own, most = kernels(128), CONSTANTS.sustained * kernel_speed.peak_tflops()
    for T in (512, 4096):
        shape = kernel_speed.causal_shape(128, T)
        for order in ("by head", "shipped"):
            for names in (("forward",), ("dq", "dkv")):
                speed = forecast_schedules.tflops(
                    own, names, shape, CONSTANTS, order=order
                )
                assert 0 < speed < most


def test_less_work_in_a_kernel_is_never_a_loss():
    own, shape = kernels(64), kernel_speed.causal_shape(64, 2048)
    found = list(forecast_changes.changes(own, own, "before"))
    assert {change.kernel for change in found} == set(KERNELS)
    for change in found:
        before, after = (
            kernel_speed.call_us(one, change.kernel, shape, CONSTANTS)
            for one in (change.before, change.after)
        )
        assert after <= before * 1.02


def test_the_fused_kernel_is_charged_for_its_sums():
    shape = kernel_speed.causal_shape(128, 8192)
    one = forecast_changes.by_hand(kernels(128))
    assert one.block == 64
    assert one.added_bytes == 4.0 * 64 * 128
    assert one.loaded_bytes == 2 * 2.0 * 64 * 128
    free = dataclasses.replace(one, added_bytes=0.0)
    costs = [k.counts(k.plain) for k in (one, free)]
    assert costs[0].l2 == pytest.approx(3 * costs[1].l2)
    assert costs[0].shared > costs[1].shared
    # Clearing, reading and rounding: 10 bytes an entry.
    entries = 16384 * 2048
    memory = kernel_speed.memory_us(10.0 * entries)
    assert forecast_changes.around_us(shape) == memory + schedule.LAUNCH_US


def test_the_fused_table_has_every_length_and_shape(monkeypatch):
    monkeypatch.setattr(published, "LENGTHS", (512, 1024))
    monkeypatch.setattr(forecast_changes, "SHAPES", SHAPES[-1:])
    table = forecast_changes.fused_table(CASES, CONSTANTS)
    assert len(table.rows) == 2 * 2 + 1
    for row in table.rows:
        assert len(row) == len(table.header)
        kernel, around, whole = (int(row[i]) for i in (4, 5, 6))
        assert kernel + around <= whole + 1


def test_tables_have_a_cell_for_each_column():
    for table in (
        forecast.error_table(CASES, CONSTANTS),
        forecast.counts_table(CASES, CONSTANTS),
    ):
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.header)}


def test_the_published_series_are_complete():
    for series in published.SERIES:
        assert len(series.flash3) == len(series.cudnn) == len(published.LENGTHS)


def test_the_error_is_the_mean_of_relative_ones():
    assert kernel_speed.mean_error([110, 95], [100, 100]) == pytest.approx(0.075)


def test_kernels_are_told_apart_by_their_names():
    begin, code = attention_loops._BEGIN, attention_loops._CODE
    parts = [
        f"{begin}\n.visible .entry attention_{name}_mosaic_gpu_kernel\n{code}{name}\n"
        for name in ("forward", "dq")
    ]
    found = attention_loops.kernels("".join(parts))
    assert sorted(found) == ["dq", "forward"]
    assert found["dq"].strip().endswith("dq")
    with pytest.raises(RuntimeError, match="jax printed no attention kernel"):
        attention_loops.kernels("nothing")
