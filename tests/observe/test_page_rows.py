"""Rows of metrics keep their steps, however they are thinned."""

import math

import numpy as np

from mjax.observe.page.rows import Rows, as_json, thin


def series(num: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    columns = {name: rng.normal(size=num) for name in ("loss", "mfu")}
    columns["loss"][num // 3] = 100.0
    columns["mfu"][num // 2] = -100.0
    columns["mfu"][: num // 10] = np.nan
    return np.arange(1, num + 1), columns


def test_rows_that_are_few_stay_as_they_are():
    steps, columns = series(50)
    kept, values = thin(steps, columns, 50)
    assert np.array_equal(kept, steps)
    np.testing.assert_array_equal(values["mfu"], columns["mfu"])


def test_each_row_that_stays_is_a_row_of_the_run():
    steps, columns = series(10_000)
    kept, values = thin(steps, columns, 200)
    assert len(kept) <= 200
    assert (np.diff(kept) > 0).all()
    for name, own in values.items():
        np.testing.assert_array_equal(own, columns[name][kept - 1])


def test_the_extremes_of_each_column_and_both_ends_stay():
    steps, columns = series(10_000)
    kept, values = thin(steps, columns, 200)
    assert (kept[0], kept[-1]) == (1, 10_000)
    for name, own in values.items():
        assert np.nanmax(own) == np.nanmax(columns[name])
        assert np.nanmin(own) == np.nanmin(columns[name])


def test_the_extremes_of_each_part_stay():
    steps, columns = series(1_000)
    kept, values = thin(steps, columns, 46)
    width = 100  # 40 points, two for each of two columns: ten parts; and the last 4
    for name, own in values.items():
        for begin in range(0, 1_000, width):
            inside = columns[name][begin : begin + width]
            if np.isfinite(inside).any():
                of_part = own[(kept > begin) & (kept <= begin + width)]
                assert np.nanmax(of_part) == np.nanmax(inside)
                assert np.nanmin(of_part) == np.nanmin(inside)


def test_the_last_rows_stay_so_that_their_mean_is_that_of_the_run():
    steps, columns = series(10_000)
    kept, values = thin(steps, columns, 200)
    assert kept[-20:].tolist() == list(range(9_981, 10_001))
    np.testing.assert_array_equal(values["loss"][-20:], columns["loss"][-20:])


def test_a_row_that_comes_again_replaces_the_earlier_one():
    rows = Rows()
    for step in (1, 2, 3, 2):
        rows.add({"step": step, "loss": float(len(rows) + step)})
    steps, columns = rows.copy()
    assert steps.tolist() == [1, 2, 3]
    assert columns["loss"].tolist() == [1.0, 5.0, 5.0]
    assert rows.revision == 1


def test_a_row_that_comes_late_has_its_place():
    rows = Rows()
    for step in (1, 3, 2):
        rows.add({"step": step, "loss": float(step)})
    assert rows.copy()[0].tolist() == [1, 2, 3]
    assert rows.copy()[1]["loss"].tolist() == [1.0, 2.0, 3.0]


def test_a_column_that_begins_late_is_empty_before():
    rows = Rows()
    rows.add({"step": 1, "loss": 2.0})
    rows.add({"step": 2, "loss": 1.0, "eval_loss": 3})
    assert as_json(*rows.copy())["columns"]["eval_loss"] == [None, 3.0]


def test_what_is_no_number_is_absent():
    rows = Rows()
    rows.add({"step": 1, "loss": math.inf, "text": "x", "flag": True, "big": 10**400})
    assert as_json(*rows.copy()) == {
        "steps": [1],
        "columns": {"loss": [None], "big": [None]},
    }


def test_rows_without_a_step_are_passed_over():
    rows = Rows()
    for step in (None, "1", True, -1, 2**60):
        rows.add({"step": step, "loss": 1.0})
    assert len(rows) == 0
