"""Tuning and report never share a seed, and faults are stronger than healthy runs."""

from tests.observe import synthetic_severity as severity


def test_tuning_and_report_never_share_a_seed():
    assert not set(severity.TUNING_SEEDS) & set(severity.REPORT_SEEDS)
    assert len(severity.REPORT_SEEDS) == 50
    for seeds in (
        severity.STRAGGLER_REPORT_SEEDS,
        severity.WHATIF_REPORT_SEEDS,
        severity.CLOCK_REPORT_SEEDS,
    ):
        assert set(seeds) <= set(severity.REPORT_SEEDS)


def test_nothing_is_between_the_healthy_and_the_weak():
    assert severity.STRONGEST_HEALTHY_COST < severity.WEAKEST_COST
    assert severity.STRONGEST_HEALTHY_RAGGED < severity.WEAKEST_RAGGED
    assert severity.THERMAL_LEVEL[0] < severity.BAD_LINK_LEVEL[1]  # these overlap
