"""Correlation of host statistics with step times, and the null model."""

import json
from typing import Any

import numpy as np
import pytest

from mjax.health.history import correlation, samples
from mjax.health.history.correlation import (
    MIN_SAMPLES,
    Association,
    benjamini_hochberg,
    correlate,
)

NUM_SAMPLES = 400
SHAPE = (3, NUM_SAMPLES)


def wandering(generator: np.random.Generator, shape=SHAPE, keep=0.9) -> np.ndarray:
    """Return autocorrelated series, partly the same on all hosts."""
    common = (*shape[:-2], 1, shape[-1])
    noise = generator.standard_normal(shape) + generator.standard_normal(common)
    for index in range(1, shape[-1]):
        noise[..., index] += keep * noise[..., index - 1]
    return noise


def names(found: tuple[Association, ...]) -> list[str]:
    return [one.name for one in found if one.is_discovery]


@pytest.mark.parametrize("keep", [0.0, 0.9, 0.99, 1.0])
def test_where_nothing_is_associated_the_rate_of_false_discoveries_holds(keep: float):
    """White noise, slow series and random walks; the null must fit all of them."""
    generator = np.random.default_rng(17)
    num_runs, num_false, num_small = 60, 0, 0
    for _ in range(num_runs):
        step_s, *tables = wandering(generator, (9, *SHAPE), keep)
        statistics = {f"s{index}": table for index, table in enumerate(tables)}
        found = correlate(statistics, step_s)
        num_false += bool(names(found.associations))
        num_small += sum(one.p <= 0.05 for one in found.associations)
    # At a rate of 0.05 three runs are expected; nine or more in one of a thousand.
    assert num_false <= 8
    # Of 480 p 24 are expected below 0.05; neighbours share the step times.
    assert 5 <= num_small <= 50


def test_what_slows_the_steps_down_is_named_with_its_sign():
    generator = np.random.default_rng(18)
    statistics = {f"s{n}": wandering(generator) for n in range(10)}
    step_s = 2.0 + 0.1 * wandering(generator)
    statistics["temperature"] = step_s + 0.1 * generator.standard_normal(SHAPE)
    statistics["clock"] = -np.exp(step_s) + 0.5 * generator.standard_normal(SHAPE)
    found = correlate(statistics, step_s)
    assert {*names(found.associations)} == {"temperature", "clock"}
    first, second = found.associations[:2]
    by_name = {one.name: one for one in (first, second)}
    assert by_name["temperature"].rho > 0.5 > -0.3 > by_name["clock"].rho
    assert all(one.null_rho < abs(one.rho) for one in (first, second))
    assert found.num_tests == 12
    assert found.num_shifts == NUM_SAMPLES
    assert first.num_samples == 3 * NUM_SAMPLES


def test_a_hot_host_that_is_slow_is_no_association():
    """Differences between hosts must have no effect."""
    generator = np.random.default_rng(19)
    hosts = np.arange(3.0)[:, None]
    step_s = 2.0 + hosts + 0.01 * generator.standard_normal(SHAPE)
    statistics = {"t": 60.0 + 10.0 * hosts + generator.standard_normal(SHAPE)}
    (one,) = correlate(statistics, step_s).associations
    assert abs(one.rho) < 0.1
    assert not one.is_discovery


@pytest.mark.parametrize("power", [1, 2])
def test_two_series_that_both_grow_are_no_association(power: int):
    generator = np.random.default_rng(20)
    growth = (np.arange(NUM_SAMPLES) / NUM_SAMPLES) ** power
    statistics = {"t": 60.0 + 9.0 * growth + generator.standard_normal(SHAPE)}
    step_s = 2.0 + growth + 0.1 * generator.standard_normal(SHAPE)
    plain = np.corrcoef(statistics["t"][0], step_s[0])[0, 1]
    assert plain > 0.8
    (one,) = correlate(statistics, step_s).associations
    assert not one.is_discovery
    assert abs(one.rho) < 0.15


def test_a_p_value_is_the_fraction_of_shifts_that_are_as_large():
    """Recomputed shift by shift, with numpy's corrcoef of ranks."""
    generator = np.random.default_rng(21)
    shape = (1, MIN_SAMPLES)
    one, step_s = generator.standard_normal(shape), generator.standard_normal(shape)
    (found,) = correlate({"s": one}, step_s).associations

    def ranks(values: np.ndarray) -> np.ndarray:
        times = np.arange(MIN_SAMPLES)
        waves = [np.cos(np.pi * (times + 0.5) * k / MIN_SAMPLES) for k in range(11)]
        basis = np.column_stack([*waves, times])
        fit = np.linalg.lstsq(basis, values, rcond=None)[0]
        return np.argsort(np.argsort(values - basis @ fit))

    x, y = ranks(one[0]), ranks(step_s[0])
    sizes = [
        abs(np.corrcoef(x, np.roll(y, -shift))[0, 1]) for shift in range(MIN_SAMPLES)
    ]
    assert abs(found.rho) == pytest.approx(sizes[0], abs=1e-9)  # float64, 100 terms
    assert found.p == np.mean(np.array(sizes) >= sizes[0] - 1e-12)
    assert found.null_rho == pytest.approx(np.percentile(sizes[1:], 95), abs=1e-9)


def test_no_p_is_zero():
    """Even for the step time itself p is not 0: the shift by 0 counts as a shift."""
    step_s = np.random.default_rng(26).standard_normal(SHAPE)
    (one,) = correlate({"s": step_s}, step_s).associations
    assert one.rho == pytest.approx(1.0, abs=1e-9)  # float64, 400 terms
    assert one.p == 1.0 / NUM_SAMPLES
    (one,) = correlate({"s": -step_s}, step_s).associations
    assert one.rho == pytest.approx(-1.0, abs=1e-9)
    assert one.p == 1.0 / NUM_SAMPLES


def test_equal_values_share_their_rank():
    ranks = correlation._average_ranks(np.array([5.0, 1.0, 5.0, 9.0, 5.0, 1.0]))
    assert ranks.tolist() == [3.0, 0.5, 3.0, 5.0, 3.0, 0.5]


def test_samples_that_are_absent_are_left_out():
    generator = np.random.default_rng(22)
    step_s = 2.0 + generator.standard_normal(SHAPE)
    temperature = step_s + 0.3 * generator.standard_normal(SHAPE)
    temperature[:, ::3] = np.nan
    step_s[0, 1::3] = np.nan
    (one,) = correlate({"temperature": temperature}, step_s).associations
    assert one.is_discovery
    pairs = ~np.isnan(temperature) & ~np.isnan(step_s)
    assert one.num_samples == int(pairs.sum())


@pytest.mark.parametrize(
    "values",
    [
        np.full(SHAPE, 61.0),
        np.full(SHAPE, np.nan),
        np.broadcast_to(np.arange(NUM_SAMPLES) * 3.0 + 7.0, SHAPE),
    ],
    ids=["constant", "absent", "a straight line"],
)
def test_a_statistic_that_says_nothing_is_not_tested(values: np.ndarray):
    generator = np.random.default_rng(23)
    found = correlate({"s": values}, generator.standard_normal(SHAPE))
    assert found.associations == ()
    assert found.num_tests == 0
    assert "s" in found.not_tested


def test_too_few_samples_for_the_number_of_statistics_are_told():
    generator = np.random.default_rng(24)
    shape = (2, MIN_SAMPLES)
    statistics = {f"s{n}": generator.standard_normal(shape) for n in range(20)}
    found = correlate(statistics, generator.standard_normal(shape))
    assert "100 samples cannot show one statistic among 20" in found.problem
    assert "take 400 samples" in found.problem
    one = {"s0": statistics["s0"]}
    found = correlate(one, generator.standard_normal(shape), rate=0.001)
    assert found.problem == ("100 samples cannot show a p of 0.001: take at least 1000")
    few = dict([*statistics.items()][:5])
    assert correlate(few, generator.standard_normal(shape)).problem == ""


def test_the_correction_is_that_of_benjamini_and_hochberg():
    """Example of the paper, section 3.2: at a rate of 0.05 the first four are named."""
    p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344]
    p += [0.0459, 0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.0000]
    q = benjamini_hochberg(p)
    assert [value <= 0.05 for value in q] == [True] * 4 + [False] * 11
    assert q == sorted(q)
    turned = benjamini_hochberg(p[::-1])
    assert turned[::-1] == q
    assert benjamini_hochberg([]) == []


@pytest.mark.parametrize(
    ("statistics", "step_s", "rate", "told"),
    [
        ({"s": np.zeros((2, 400))}, np.ones(SHAPE), 0.05, "is the same in all samples"),
        ({}, np.ones((3, 10)), 0.05, "at least 100 samples of each host, got 10"),
        ({}, np.ones(400), 0.05, r"must be \[hosts, samples\]"),
        ({}, np.ones((0, 400)), 0.05, r"must be \[hosts, samples\]"),
        ({}, np.full(SHAPE, np.inf), 0.05, "step_s has an infinite value"),
        ({}, np.ones(SHAPE), 0.0, "--rate must be above 0 and below 1, got 0"),
        ({}, np.ones(SHAPE), float("nan"), "--rate must be above 0"),
    ],
)
def test_tables_that_cannot_be_compared_are_refused(
    statistics: Any, step_s: np.ndarray, rate: float, told: str
):
    with pytest.raises(ValueError, match=told):
        correlate(statistics, step_s, rate=rate)


def test_a_statistic_of_another_shape_is_refused():
    step_s = np.random.default_rng(25).standard_normal(SHAPE)
    with pytest.raises(ValueError, match=r"s must be .* \[3, 400\], got \[2, 400\]"):
        correlate({"s": np.zeros((2, 400))}, step_s)


# ------------------------------------------------------------------------------ samples


def rows(*fields: dict[str, Any]) -> list[bytes]:
    return [json.dumps(one).encode() + b"\n" for one in fields]


def test_lines_become_tables_in_the_order_of_their_samples():
    tables, step_s = samples.read(
        rows(
            {"host": "b", "sample": 20, "step_s": 2.5, "t": 61},
            {"host": "a", "sample": 10, "step_s": 1.0, "t": 60.5},
            {"host": "a", "sample": 20, "step_s": 2, "t": None},
        ),
        "file",
    )
    np.testing.assert_array_equal(step_s, [[1.0, 2.0], [np.nan, 2.5]])
    np.testing.assert_array_equal(tables["t"], [[60.5, np.nan], [np.nan, 61.0]])


GOOD = {"host": "a", "sample": 1, "step_s": 1.0}


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (rows(GOOD)[:0], "has no step_s"),
        ([rows(GOOD)[0][:-1]], "file:1 does not end with a newline"),
        (rows(GOOD, GOOD), "file:2: a second sample 1 of a"),
        (rows({"host": "a", "sample": 1, "t": 1}), "has no step_s"),
        (rows({"host": "a", "step_s": 1.0}), "file:1: sample must be a whole number"),
        (rows(GOOD | {"t": "hot"}), "file:1: t must be a number, got 'hot'"),
        (rows(GOOD | {"t": True}), "t must be a number, got True"),
        ([b'{"host": "a", "sample": 1, "step_s": NaN}\n'], "step_s must be finite"),
        ([b"nothing\n"], "file:1: not JSON"),
    ],
)
def test_lines_that_are_no_samples_are_refused(lines: list[bytes], told: str):
    with pytest.raises(ValueError, match=told):
        samples.read(lines, "file")


def test_samples_far_apart_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(samples, "MAX_VALUES", 100)
    lines = rows(*({"host": f"h{n}", "sample": n, "step_s": 1.0} for n in range(11)))
    with pytest.raises(ValueError, match="more than 100 values; take fewer"):
        samples.read(lines, "file")
