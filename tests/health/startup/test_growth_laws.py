"""Known laws are recovered, and noise is not mistaken for one."""

import collections
import math

import numpy as np
import pytest

from mjax.health.startup import laws as init_laws
from mjax.health.startup.laws import (
    CONSTANT,
    LAWS,
    LINEAR,
    LOGARITHMIC,
    QUADRATIC,
    Growth,
    growth,
)

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32)
GROWN = {
    CONSTANT: lambda n: 1.0,
    LOGARITHMIC: math.log,
    LINEAR: lambda n: float(n),
    QUADRATIC: lambda n: float(n * n),
}
SEEDS = range(40)


def planted(law: str, n: int) -> float:
    """A fixed part, and as much again at two processes that grows."""
    return 0.02 * (1 + GROWN[law](n) / GROWN[law](2))


def found(law: str, seed: int, noise: float) -> Growth:
    random = np.random.default_rng(seed)
    factors = np.exp(noise * random.standard_normal(len(SIZES)))
    seconds = [planted(law, n) * float(f) for n, f in zip(SIZES, factors, strict=True)]
    return growth(SIZES, seconds)


@pytest.mark.parametrize("law", LAWS)
def test_a_planted_law_is_named(law: str):
    """At 3 percent noise, in 36 of 40 cases, and another law in at most one."""
    names = collections.Counter(found(law, seed, 0.03).law for seed in SEEDS)
    assert names[law] >= 36
    assert sum(names.values()) - names[law] - names[None] <= 1


@pytest.mark.parametrize("law", LAWS)
def test_the_range_at_10000_holds_the_planted_duration(law: str):
    """The region promises 95 percent, for all laws together; the test requires 36 of
    40."""
    ranges = [found(law, seed, 0.05).at(10_000) for seed in SEEDS]
    true_s = planted(law, 10_000)
    assert sum(r.low_s <= true_s <= r.high_s for r in ranges) >= 36


@pytest.mark.parametrize("law", LAWS)
def test_a_named_law_predicts_the_planted_duration(law: str):
    """Without noise, to within one step of the share."""
    growth = found(law, 0, 0.0)
    assert growth.law == law
    assert growth.at(10_000).value_s == pytest.approx(planted(law, 10_000), rel=0.02)
    assert growth.at(5).value_s == pytest.approx(planted(law, 5), rel=0.02)


def test_noise_alone_cannot_be_told():
    """In at least 97 of 100 series without a trend."""
    names = collections.Counter()
    for seed in range(100):
        random = np.random.default_rng(seed)
        seconds = [float(s) for s in np.exp(0.5 * random.standard_normal(len(SIZES)))]
        names[growth(SIZES, seconds).law] += 1
    assert names[None] >= 97
    assert names[CONSTANT] == 0


def test_a_constant_with_little_noise_is_no_noise():
    """The null model is an answer where the data exclude growth."""
    names = {found(CONSTANT, seed, 0.02).law for seed in SEEDS}
    assert names == {CONSTANT}


def test_a_constant_says_little_of_10000_unless_the_work_is_bounded():
    """A quadratic term too small to see at 32 is large there; a linear one is not."""
    growth = found(CONSTANT, 1, 0.05)
    assert growth.at(10_000).high_s > 100 * growth.at(10_000, most=LINEAR).high_s
    alone = growth.at(10_000, most=CONSTANT)
    assert alone.high_s < 1.2 * alone.low_s


def test_a_bound_does_not_hide_a_law_that_the_data_name():
    growth = found(QUADRATIC, 1, 0.03)
    assert growth.law == QUADRATIC
    assert growth.at(10_000, most=LINEAR) == growth.at(10_000)


def test_the_order_of_the_sizes_does_not_matter():
    seconds = [planted(LINEAR, n) for n in SIZES]
    there, back = growth(SIZES, seconds), growth(SIZES[::-1], seconds[::-1])
    assert there.law == back.law == LINEAR
    assert there.at(1_000).value_s == pytest.approx(back.at(1_000).value_s)


def test_durations_in_the_wrong_order_are_not_that_law():
    """The right numbers at the wrong sizes: no law grows downwards."""
    seconds = [planted(LINEAR, n) for n in SIZES]
    assert growth(SIZES, seconds[::-1]).law is None


def test_few_sizes_cannot_be_told_and_bound_nothing():
    growth = init_laws.growth([2, 4, 8, 16], [1.0, 2.0, 4.0, 8.0])
    assert growth.law is None
    assert growth.describe() == "undetermined (fewer than 5 sizes)"
    assert growth.at(10_000) == init_laws.Range(
        value_s=None, low_s=0.0, high_s=math.inf
    )


def test_two_laws_that_fit_are_both_named():
    """Two neighbouring sizes cannot distinguish a linear law from a quadratic one."""
    sizes = [30, 31, 32, 33, 34]
    found = growth(sizes, [n / 32 for n in sizes])
    assert found.law is None
    assert {LINEAR, QUADRATIC} <= {*found.candidates}
    assert "undetermined" in found.describe()


def test_a_clock_that_has_not_ticked_is_a_duration():
    assert growth(SIZES, [0.0] * len(SIZES)).law == CONSTANT


def test_a_law_that_explains_nothing_pays_for_its_number():
    """AICc by hand, of 9 falling durations: no share can grow, the sums are equal."""
    logs = np.linspace(1.0, 0.0, 9)
    criteria = growth(SIZES, [float(s) for s in np.exp(logs)]).criteria
    squares = float(((logs - 0.5) ** 2).sum())
    constant = 9 * math.log(squares / 9) + 4 + 2 * 2 * 3 / (9 - 3)
    assert criteria[CONSTANT] == pytest.approx(constant)
    for law in (LOGARITHMIC, LINEAR, QUADRATIC):
        assert criteria[law] == pytest.approx(constant + 2 + 24 / 5 - 2)


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([2, 4], [1.0], "2 sizes and 1 durations"),
        ([1, 2], [1.0, 1.0], r"at least 2, got \[1, 2\]"),
        ([2, 2], [1.0, 1.0], r"distinct"),
        ([2, 4], [1.0, math.nan], "durations must be numbers"),
        ([2, 4], [1.0, -1.0], "durations must be numbers"),
    ],
)
def test_what_is_no_series_is_refused(
    sizes: list[int], seconds: list[float], message: str
):
    with pytest.raises(ValueError, match=message):
        growth(sizes, seconds)
