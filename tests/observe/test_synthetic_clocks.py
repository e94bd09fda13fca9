"""The generated barriers are causal, and the true offsets are inside their bounds."""

import functools

import numpy as np
import pytest

from tests.observe import synthetic_severity as severity
from tests.observe.synthetic_clocks import KINDS, UNKNOWN, Barriers, Kind, make

SEEDS = severity.TUNING_SEEDS[:30]


@functools.cache
def made(kind: Kind) -> tuple[Barriers, ...]:
    return tuple(make(kind, seed) for seed in SEEDS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_kind_and_seed_give_the_same_barriers(kind):
    first, again = make(kind, 5), make(kind, 5)
    np.testing.assert_array_equal(first.enter_ns, again.enter_ns)
    np.testing.assert_array_equal(first.leave_ns, again.leave_ns)
    np.testing.assert_array_equal(first.truth.offset_ns, again.truth.offset_ns)


def test_another_seed_or_kind_gives_other_barriers():
    first = {int(each.leave_ns[0, 0]) for kind in KINDS for each in made(kind)}
    assert len(first) == len(KINDS) * len(SEEDS)


def test_an_unknown_kind_or_seed_is_refused():
    with pytest.raises(ValueError, match="one of steady, drift, slew, jump, got 'bad'"):
        make("bad", 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        make("drift", -1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_leaves_after_the_last_has_entered(kind):
    missing = 0
    for each in made(kind):
        assert each.enter_ns.dtype == each.leave_ns.dtype == np.int64
        known = each.enter_ns != UNKNOWN
        np.testing.assert_array_equal(known, each.leave_ns != UNKNOWN)
        missing += int((~known).sum())
        # On the clock of rank 0. A clock that drifts moves by less than 1 us between
        # the entering and the leaving, but a slewed or an early one by up to 10 ms.
        slack_ns = {"steady": 2, "drift": 500_000}.get(kind, 20_000_000)
        enter = np.where(known, each.enter_ns - each.truth.offset_ns, -(2**62))
        leave = np.where(known, each.leave_ns - each.truth.offset_ns, 2**62)
        assert (leave.min(axis=0) >= enter.max(axis=0) - slack_ns).all()
        assert (np.abs(each.truth.offset_ns[1:]) > 1e9).mean() > 0.9
    assert missing > 20


def test_steady_clocks_keep_their_offset_and_others_do_not():
    for each in made("steady"):
        assert (np.diff(each.truth.offset_ns, axis=1) == 0).all()
    for each in made("drift"):
        moved_ns = np.abs(each.truth.offset_ns - each.truth.offset_ns[:, :1])
        took_ns = (
            each.leave_ns[:, -1].max() - each.enter_ns[:, 0][each.enter_ns[:, 0] > 0]
        )
        assert (
            0 < moved_ns.max() < 2.1 * severity.DRIFT_PPM * 1e-6 * np.abs(took_ns).max()
        )


def test_a_slewed_clock_moves_faster_than_any_that_drifts():
    fastest = []
    for each in made("slew"):
        known = each.leave_ns[0] != UNKNOWN
        offset_ns = each.truth.offset_ns[:, known]
        moved_ns = np.abs(np.diff(offset_ns, axis=1)).max(axis=0)
        passed_ns = np.diff(each.leave_ns[0, known])
        fastest.append(float((moved_ns / passed_ns).max()))
    assert np.median(fastest) > 4 * severity.DRIFT_PPM * 1e-6
    assert max(fastest) < 2.5 * severity.SLEW_PPM * 1e-6


def test_one_clock_jumps_once():
    for each in made("jump"):
        assert each.truth.jumped is not None
        rank, first = each.truth.jumped
        moved_ns = np.abs(np.diff(each.truth.offset_ns, axis=1))
        assert moved_ns[rank, first - 1] > 0.4e9
        moved_ns[rank, first - 1] = 0
        assert moved_ns.max() < 0.05e9


def test_the_mean_of_the_entering_times_is_no_estimate():
    errors_s = []
    for each in made("steady"):
        known = (each.enter_ns != UNKNOWN).all(axis=0)
        guess = (each.enter_ns - each.enter_ns[:1])[:, known].mean(axis=1)
        errors_s.append(float(np.abs(guess - each.truth.offset_ns[:, 0]).max()) / 1e9)
    assert np.median(errors_s) > 0.01
