"""The state of a rank by its progress word."""

import time

import pytest

from mjax.launch.messages import RankSpec
from mjax.launch.ranks import Rank, rotate
from mjax.processes.progress import Phase, Writer

SECOND_NS = 10**9


@pytest.fixture
def clock(monkeypatch):
    """Let time pass on request."""

    class Clock:
        now_ns = 10**12

        def go(self, seconds):
            self.now_ns += int(seconds * SECOND_NS)

    clock = Clock()
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock.now_ns)
    return clock


def test_the_time_of_a_step_is_without_evaluations_and_saves(tmp_path, clock):
    spec = RankSpec(rank=0, argv=[], environment={}, folder=str(tmp_path))
    rank = Rank(spec=spec, generation=1, oom_kills=0)
    word = Writer(rank.progress_path, 1)
    for phase in (Phase.INIT, Phase.BUILD, Phase.COMPILE, Phase.RESTORE):
        clock.go(1)
        word.mark(phase)
    word.mark(Phase.STEP, 20)
    for step in (21, 22):  # dispatched, then it waits for the end of the first
        word.mark(Phase.STEP, step)
        assert rank.look().step_s is None
    clock.go(300)
    word.ended_first_step()
    assert rank.look().step_s is None
    assert rank.look().first_step_s is not None
    word.mark(Phase.STEP, 23)
    assert rank.look().step_s == 0.0
    clock.go(1)
    word.mark(Phase.STEP, 24)
    assert rank.look().step_s == 1.0
    word.mark(Phase.EVAL, 24)
    clock.go(60)
    word.mark(Phase.SAVE, 24)
    assert rank.look().step_s == 1.0
    clock.go(30)
    for step in (25, 26):
        word.mark(Phase.STEP, step - 1)
        clock.go(2)
        word.mark(Phase.STEP, step)
    assert rank.look().step_s == 2.0
    assert rank.look().spent_s[Phase.EVAL] == 60.0


def test_a_long_log_is_put_aside_and_written_further(tmp_path):
    log, before = tmp_path / "rank-0.log", tmp_path / "rank-0.log.1"
    with log.open("ab", buffering=0) as writer:
        for text, kept, aside in [
            (b"short", b"short", None),
            (b" and too long", b"", b"short and too long"),
            (b"new", b"new", b"short and too long"),
            (b" and again too long", b"", b"new and again too long"),
        ]:
            writer.write(text)
            rotate(log, 10)
            assert log.read_bytes() == kept
            assert (before.read_bytes() if before.exists() else None) == aside
    rotate(tmp_path / "absent", 10)
