"""The heat map's cells are the times of the spans, by rank and step."""

import itertools

import numpy as np
import pytest

from mjax.observe.page import grids, heat
from mjax.observe.page.grids import Grids, Matrix
from mjax.observe.spans import Header, Line, Span


def header(rank: int = 0, generation: int = 1, devices=(0,)) -> Header:
    return Header(
        run="a",
        host=f"node{rank}-{generation}",
        rank=rank,
        generation=generation,
        pid=1,
        wall_ns=0,
        monotonic_ns=0,
        devices=devices,
        mesh={"dp_shard": 64},
    )


def line(step: int, *, name="step", stream="step", ns=1000, times=1) -> Line:
    span = Span(name, "compute", stream, 0, ns)
    return Line(n=step, step=step, spans=(span,) * times)


def lines(steps, ns=lambda step: 1000 * step) -> list[Line]:
    return [line(step, ns=ns(step)) for step in steps]


def test_a_cell_has_the_seconds_of_its_rank_and_step():
    found = Grids()
    for rank in (3, 1):
        took = lines(range(1, 6), lambda step, rank=rank: 1000 * step + rank)
        found.add(header(rank), took)
    matrix = found.matrix("step", None, None)
    assert matrix.ranks == (1, 3)
    assert matrix.hosts == ("node1-1", "node3-1")
    assert matrix.steps == (1, 2, 3, 4, 5)
    expected = [[1000 * s + rank for s in range(1, 6)] for rank in (1, 3)]
    np.testing.assert_allclose(matrix.mean_s, np.array(expected) * 1e-9, rtol=1e-6)


def test_spans_of_one_name_add_up_and_devices_count_in_the_mean():
    found = Grids()
    found.add(header(devices=(0, 1)), [line(1, name="data", stream="host", times=3)])
    two = (
        Span("forward", "compute", "device:0", 0, 1000),
        Span("forward", "compute", "device:1", 0, 3000),
    )
    found.add(header(devices=(0, 1)), [Line(n=1, step=1, spans=two)])
    assert found.matrix("data", None, None).mean_s[0, 0] == pytest.approx(3e-6)
    assert found.matrix("forward", None, None).mean_s[0, 0] == pytest.approx(2e-6)


def test_what_was_not_measured_is_absent_and_not_zero():
    found = Grids()
    found.add(header(0), [*lines([1, 2, 3]), line(2, name="save")])
    found.add(header(1), lines([2, 3]))
    assert np.isnan(found.matrix("step", None, None).mean_s[1, 0])
    saves = found.matrix("save", None, None).mean_s
    assert np.isnan(saves).tolist() == [[True, False, True], [True, True, True]]


def test_steps_are_chosen_with_both_ends():
    found = Grids()
    found.add(header(), lines(range(5, 20)))
    assert found.matrix("step", 7, 9).steps == (7, 8, 9)
    assert found.matrix("step", 0, 6).steps == (5, 6)
    assert found.matrix("step", 19, 99).steps == (19,)
    assert found.matrix("step", 50, 60).steps == ()


def test_steps_that_a_later_start_takes_again_replace_the_older_ones():
    found = Grids()
    found.add(header(generation=1), lines(range(1, 11)))
    found.add(header(generation=2), lines([6, 7], lambda step: 500))
    matrix = found.matrix("step", None, None)
    expected = [1e-6 * step for step in range(1, 6)] + [5e-7, 5e-7]
    np.testing.assert_allclose(matrix.mean_s[0, :7], expected, rtol=1e-6)
    assert np.isnan(matrix.mean_s[0, 7:]).all()
    assert matrix.hosts == ("node0-2",)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_the_order_in_which_starts_are_read_does_not_matter(order):
    of_start = [
        (header(generation=1), lines(range(1, 11))),
        (header(generation=2), lines(range(6, 9), lambda step: 500)),
        (header(generation=3), lines(range(8, 10), lambda step: 250)),
    ]
    found = Grids()
    for at in order:
        found.add(*of_start[at])
    ns = np.round(found.matrix("step", None, None).mean_s[0, :9] * 1e9)
    assert ns.tolist() == [1000, 2000, 3000, 4000, 5000, 500, 500, 250, 250]


def test_a_long_run_has_wider_columns_and_the_same_mean():
    found = Grids(most_cells=64)  # 64 columns for a rank
    steps = np.arange(1, 1001)
    for part in np.array_split(steps, 13):
        found.add(header(), lines(part.tolist()))
    matrix = found.matrix("step", None, None)
    width = matrix.steps[1] - matrix.steps[0]
    assert len(matrix.steps) <= 64
    assert width == 16
    for first, value in zip(matrix.steps, matrix.mean_s[0], strict=True):
        inside = steps[(steps >= first) & (steps < first + width)]
        assert value == pytest.approx(1e-6 * inside.mean(), rel=1e-5)


def test_a_rare_phase_keeps_its_mean_in_wide_columns():
    found = Grids(most_cells=64)
    for step in range(1, 301):
        own = [line(step)] + [line(step, name="save", ns=7000)] * (step % 50 == 0)
        found.add(header(), own)
    saves = found.matrix("save", None, None).mean_s[0]
    assert np.nansum(~np.isnan(saves)) == 6
    np.testing.assert_allclose(saves[~np.isnan(saves)], 7e-6, rtol=1e-6)


def test_an_earlier_step_that_is_read_later_has_its_column():
    found = Grids()
    found.add(header(0), lines(range(100, 110)))
    found.add(header(1), lines(range(90, 110)))
    matrix = found.matrix("step", None, None)
    assert matrix.steps[0] == 90
    assert matrix.mean_s[0, 10] == pytest.approx(1e-4)
    assert matrix.mean_s[1, 10] == pytest.approx(1e-4)


def test_one_wrong_step_does_not_make_all_columns_wide():
    found = Grids()
    found.add(header(), lines(range(1, 10)))
    found.add(header(), [line(2**31 - 1)])
    assert found.matrix("step", None, None).steps == tuple(range(1, 10))


def test_names_without_end_are_left_out_and_told():
    found = Grids()
    for number in range(grids.MOST_PHASES + 5):
        found.add(header(), [line(1, name=f"name{number}")])
    assert len(found.phases) == grids.MOST_PHASES
    assert len(found.left_out) == 5


def decoded(data: bytes):
    size = int.from_bytes(data[:4], "little")
    told = heat.json.loads(data[4 : 4 + size])
    cells = np.frombuffer(data[4 + size :], np.uint8)
    return told, cells.reshape(len(told["ranks"]), len(told["steps"]))


def matrix_of(values) -> Matrix:
    mean_s = np.array(values, np.float32)
    rows, columns = mean_s.shape
    return Matrix(
        ranks=tuple(range(rows)),
        hosts=("node",) * rows,
        steps=tuple(range(1, columns + 1)),
        mean_s=mean_s,
    )


def test_the_bytes_are_the_times_row_by_row():
    values = np.arange(12).reshape(3, 4) / 1e3
    values[1, 2] = np.nan
    told, cells = decoded(heat.encode(matrix_of(values), "step", ["step", "data"]))
    assert (told["phase"], told["phases"]) == ("step", ["step", "data"])
    assert cells[1, 2] == 255
    width = told["hi"] - told["lo"]
    shown = told["lo"] + cells / 254 * width
    known = ~np.isnan(values)
    inside = np.clip(values * 1e3, told["lo"], told["hi"])
    np.testing.assert_allclose(shown[known], inside[known], atol=width / 254)


def test_one_very_slow_cell_leaves_colours_for_the_others():
    rng = np.random.default_rng(0)
    values = 0.1 + 0.01 * rng.random((50, 40))
    values[3, 3] = 60.0
    told, cells = decoded(heat.encode(matrix_of(values), "step", ["step"]))
    assert told["hi"] < 250
    assert told["most"] == pytest.approx(60e3)
    assert cells[3, 3] == 254
    assert len(np.unique(cells)) > 20


def test_one_slow_rank_of_thousands_is_not_clipped_to_the_noise_of_its_peers():
    rng = np.random.default_rng(0)
    values = 0.1 + 0.01 * rng.random((2000, 40))
    values[1234] *= 1.5
    told, cells = decoded(heat.encode(matrix_of(values), "step", ["step"]))
    width = told["hi"] - told["lo"]
    shown = told["lo"] + cells[1234] / 254 * width
    np.testing.assert_allclose(shown, values[1234] * 1e3, atol=width / 254)


@pytest.mark.parametrize("value", [0.0, 0.25, np.nan])
def test_a_phase_whose_cells_are_all_alike_can_be_drawn(value):
    told, cells = decoded(heat.encode(matrix_of([[value] * 3]), "step", ["step"]))
    assert cells.tolist() == [[255 if np.isnan(value) else 0] * 3]
    assert told["lo"] == told["hi"]
