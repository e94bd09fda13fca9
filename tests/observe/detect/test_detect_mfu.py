"""The shape of an MFU series is classified by the model that explains it best."""

from typing import Any

import numpy as np
import pytest

from mjax.observe.detect.mfu import classify
from mjax.observe.detect.mfu_series import FEWEST_STEPS, Mark, prepare
from tests.observe.synthetic_mfu import KINDS, Series, make


def marks_of(series: Series) -> list[Mark]:
    return [
        Mark(kind=mark.kind, start_s=mark.start_s, end_s=mark.end_s)
        for mark in series.marks
    ]


def find(series: Series, **changes):
    given: dict[str, Any] = {
        "step_end_s": series.step_end_s,
        "step_s": series.step_s,
        "mfu": series.mfu,
        "marks": marks_of(series),
        "expected_mfu": series.expected_mfu,
    }
    return classify(**(given | changes))


def steady(num: int, *, noise: float = 0.005, seed: int = 0) -> dict[str, Any]:
    """A run of steps of one second."""
    rng = np.random.default_rng(seed)
    step_s = np.exp(noise * rng.standard_normal(num))
    return {"step_end_s": np.cumsum(step_s), "step_s": step_s, "mfu": 0.4 / step_s}


def slowed(run: dict[str, Any], at, factor: float) -> dict[str, Any]:
    """The same run with some steps longer."""
    step_s = run["step_s"].copy()
    step_s[at] *= factor
    return {"step_end_s": np.cumsum(step_s), "step_s": step_s, "mfu": 0.4 / step_s}


def changed(run: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The same run with other series."""
    return run | changes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_generated_series_is_of_its_class(kind, seed):
    found = find(make(kind, seed))
    assert found.kind == ("healthy" if kind == "clean" else kind)
    assert found.also is None
    assert found.scores[found.kind] == 0
    assert found.margin == pytest.approx(-found.scores[found.runner_up])


def test_the_marks_are_what_keeps_a_clean_run_from_dipping():
    series = make("clean", 1)
    assert series.truth.pause_in_step or make("clean", 2).truth.pause_in_step
    series = series if series.truth.pause_in_step else make("clean", 2)
    assert find(series).kind == "healthy"
    assert find(series, marks=()).kind != "healthy"


def test_the_onset_and_the_level_of_a_fault_are_those_that_were_put_in():
    series = next(
        series
        for series in (make("bad_link", seed) for seed in range(20))
        if series.truth.onset_s
    )
    found = find(series)
    assert found.level.onset_s == pytest.approx(series.truth.onset_s, abs=30.0)
    assert found.level.level == pytest.approx(series.truth.level, abs=0.02)


def test_a_level_that_is_low_from_the_start_needs_the_expected_mfu():
    run = steady(600)
    assert classify(**run, expected_mfu=0.4 / 0.7).kind == "bad_link"
    assert classify(**run, expected_mfu=0.4 / 0.3).kind == "no_gpudirect"
    assert classify(**run, expected_mfu=0.4 / 0.05).kind == "dead_link"
    assert classify(**run, expected_mfu=0.4).kind == "healthy"
    assert classify(**run).kind == "healthy"


def test_a_low_level_may_drift_as_a_healthy_one_does():
    run = steady(9000, noise=0.002)
    run["mfu"] = run["mfu"] * (1 - 6e-7 * run["step_end_s"])  # as warm as at noon
    found = classify(**run, expected_mfu=0.4 / 0.68)
    assert found.kind == "bad_link"
    assert found.is_clear


def test_a_period_of_dips_is_measured():
    found = classify(**slowed(steady(1500), np.arange(50, 1500, 97), 10.0))
    assert found.kind == "regular_dips"
    assert found.rhythm is not None
    assert found.rhythm.period == pytest.approx(97, abs=0.5)
    assert found.rhythm.num_hits == found.rhythm.num_expected == 15


def test_the_same_dips_at_irregular_times_are_rare_ones():
    at = np.sort(np.random.default_rng(3).choice(np.arange(20, 4000), 6, replace=False))
    assert classify(**slowed(steady(4000), at, 10.0)).kind == "rare_dips"


def test_one_dip_is_no_fault():
    assert classify(**slowed(steady(3000), [1234], 10.0)).kind == "healthy"


def test_two_faults_at_once_are_both_named():
    slow = slowed(steady(2000), slice(700, None), 1 / 0.7)
    both = slowed(slow, np.arange(50, 2000, 97), 10.0)
    found = classify(**both, expected_mfu=0.4)
    assert {found.kind, found.also} == {"bad_link", "regular_dips"}
    assert found.is_clear


def test_two_classes_that_explain_a_series_alike_are_not_clear():
    found = classify(**steady(40), expected_mfu=0.4)
    assert found.kind == "healthy"
    assert found.runner_up == "rare_dips"
    assert not found.is_clear


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.1])
def test_noise_without_memory_is_healthy_whatever_its_size(noise):
    assert classify(**steady(2000, noise=noise)).kind == "healthy"


def test_the_order_of_the_steps_matters():
    series = make("ragged", 3)
    order = np.random.default_rng(0).permutation(len(series.mfu))
    found = find(series)
    assert found.kind == "ragged"
    mixed = find(series, mfu=series.mfu[order], marks=(), expected_mfu=None)
    assert mixed.kind != "ragged"


def test_unknown_rates_are_left_out_and_counted():
    run = steady(600)
    run["mfu"][[5, 100, 101]] = [np.nan, 0.0, np.inf]
    found = classify(**run, expected_mfu=0.4)
    assert found.kind == "healthy"
    assert found.prepared.num_left_out == 3


def test_too_few_steps_are_refused_with_the_number_that_is_needed():
    run = steady(FEWEST_STEPS - 1)
    with pytest.raises(ValueError, match=r"29 steps have .* at least 30 are needed"):
        classify(**run)
    run = steady(FEWEST_STEPS + 2)  # of which the first three do not count
    with pytest.raises(ValueError, match=r"29 of 32 steps .* at least 30 are needed"):
        classify(**run)
    classify(**steady(FEWEST_STEPS + 3))
    with pytest.raises(ValueError, match="0 steps have a known MFU"):
        classify(**changed(steady(99), mfu=np.full(99, np.nan)))


def test_a_clock_that_was_set_back_is_refused():
    run = steady(100)
    run["step_end_s"][60:] -= 500.0
    with pytest.raises(ValueError, match="step 60 of the series ends 499 s before"):
        classify(**run)


def test_series_that_do_not_fit_together_are_refused():
    run = steady(100)
    with pytest.raises(ValueError, match="one length"):
        classify(**changed(run, mfu=run["mfu"][:-1]))
    with pytest.raises(ValueError, match="above 0, got 0"):
        classify(**run, expected_mfu=0.0)
    with pytest.raises(ValueError, match="finite time"):
        classify(**changed(run, step_end_s=np.full(100, np.nan)))


def test_a_mark_hides_the_step_that_it_is_in_and_no_other():
    run = steady(100, noise=0.0)
    marks = [Mark(kind="save", start_s=50.0, end_s=51.0)]
    prepared = prepare(**run, marks=marks, expected_mfu=0.4)
    assert np.flatnonzero(prepared.dips.masked).tolist() == [0, 1, 2, 50]


def test_a_long_run_takes_longer_blocks_not_more():
    prepared = prepare(**steady(50_000), marks=(), expected_mfu=0.4)
    assert len(prepared.blocks.value) <= 3000
    assert prepared.blocks.weight.sum() == pytest.approx(49_997, abs=60)
