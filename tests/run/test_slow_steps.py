"""Stacks of steps that take too long."""

import threading
import time

import pytest

from mjax.run import slow_steps
from mjax.run.slow_steps import SlowSteps


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(slow_steps, "_LEAST_S", 0.05)
    monkeypatch.setattr(slow_steps, "_NUM_BEFORE", 5)


def take(steps: SlowSteps, num: int, wait=lambda: None):
    events = []
    for step in range(1, num + 1):
        steps.begin()
        wait()
        events.append(steps.end(step))
    return [event for event in events if event is not None]


def test_a_slow_step_writes_its_stacks_while_it_runs(tmp_path):
    path = tmp_path / "stacks" / "a.txt"
    steps = SlowSteps(path, 3)
    assert take(steps, 10) == []
    seen = threading.Event()

    def slow_function():
        until_s = time.monotonic() + 10
        while time.monotonic() < until_s:
            if path.exists() and "slow_function" in path.read_text():
                seen.set()
                return
            time.sleep(0.01)

    (event,) = take(steps, 1, slow_function)
    steps.close()
    assert seen.is_set()
    assert event.kind == "slow_step"
    assert f"stacks after 0.1 s are in {path}" in event.text
    assert event.data["step_s"] > event.data["limit_s"]


def test_usual_steps_evaluations_and_saves_write_nothing(tmp_path):
    path = tmp_path / "a.txt"
    steps = SlowSteps(path, 3)
    assert take(steps, 30) == []
    steps.begin()
    steps.skip()
    time.sleep(0.15)
    assert steps.end(31) is None
    steps.close()
    assert path.read_text() == ""


def test_the_first_steps_are_never_slow(tmp_path):
    steps = SlowSteps(tmp_path / "a.txt", 3)
    assert take(steps, 1, lambda: time.sleep(0.1)) == []
    steps.close()


def test_the_number_of_dumps_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(slow_steps, "_MOST_DUMPS", 2)
    monkeypatch.setattr(slow_steps, "_LEAST_S", 0.01)
    steps = SlowSteps(tmp_path / "a.txt", 1.01)
    take(steps, 10)
    lengths = iter(range(1, 20))
    events = take(steps, 6, lambda: time.sleep(0.02 * next(lengths)))
    steps.close()
    assert len(events) == 2


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "stacks").write_text("in the way")
    steps = SlowSteps(tmp_path / "stacks" / "a.txt", 3)
    assert take(steps, 10) == []
    (event,) = take(steps, 1, lambda: time.sleep(0.1))
    assert event.text.endswith("times the 99th percentile; no stacks were written")


def test_without_a_file_no_step_is_watched():
    steps = SlowSteps()
    assert take(steps, 10) == []
    assert take(steps, 1, lambda: time.sleep(0.1)) == []
    steps.close()


def test_a_factor_may_be_far_too_large(tmp_path):
    steps = SlowSteps(tmp_path / "a.txt", 1e300)
    assert take(steps, 20, lambda: time.sleep(0.001)) == []
    steps.close()
