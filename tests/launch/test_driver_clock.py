"""A process that stood still does not hold that time against others."""

import time

import pytest

from mjax.launch.liveness import Clock


@pytest.fixture
def monotonic(monkeypatch):
    """Let time pass on request."""
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def go(seconds):
        now_s[0] += seconds

    return go


def test_a_clock_stands_still_while_its_process_does(monotonic):
    clock = Clock(0.5)
    read_s = []
    for seconds in (0.0, 0.25, 0.5, 60.0, 0.25):
        monotonic(seconds)
        read_s.append(clock.now_s())
    assert read_s == [100.0, 100.25, 100.75, 101.25, 101.5]
    assert clock.lost_s == 59.5
    assert clock.real_s(101.0) == 160.5


def test_a_clock_that_is_held_does_not_move(monotonic):
    clock = Clock(0.5)
    clock.is_held = True
    for _ in range(3):
        monotonic(0.25)
        assert clock.now_s() == 100.0
    clock.is_held = False
    monotonic(0.25)
    assert clock.now_s() == 100.25
