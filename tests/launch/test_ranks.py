"""The state of a rank by its files, whatever happens to them."""

import json
import os
import shutil
import time
from typing import Any

import pytest

from mjax.launch.messages import RankSpec
from mjax.launch.ranks import Rank, handles
from mjax.processes import progress
from mjax.processes.progress import Phase

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


class Watched:
    """A rank without a process, as its agent sees it."""

    def __init__(self, folder, clock, log_bytes=1000):
        spec = RankSpec(rank=0, argv=[], environment={}, folder=str(folder))
        self.clock, self.lost_s = clock, 0.0
        times: dict[str, Any] = {"asked_s": self.now_s(), "asked_ns": clock.now_ns}
        self.rank = Rank(spec=spec, generation=1, oom_kills=0, **times)
        self.rank.open(log_bytes)
        self.names = self.rank.files.environment

    def now_s(self):
        return self.clock.now_ns / SECOND_NS - self.lost_s

    def writer(self):
        return progress.from_environment(
            self.names | {progress.GENERATION_VARIABLE: "1"}
        )

    def look(self, *, is_over=False):
        reading = self.rank.read(is_over=is_over)
        if reading is not None:
            self.rank.take(reading, self.now_s())
        return self.rank.state()


@pytest.fixture
def watched(tmp_path, clock):
    made = []

    def make(**more):
        made.append(Watched(tmp_path / "run", clock, **more))
        return made[-1]

    yield make
    for one in made:
        one.rank.close()


def test_the_time_of_a_step_is_without_evaluations_and_saves(watched, clock):
    rank = watched()
    word = rank.writer()
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


def test_a_long_log_is_put_aside_and_written_further(watched, tmp_path):
    rank = watched(log_bytes=10)
    log = tmp_path / "run" / "rank-0.log"
    before = log.with_name("rank-0.log.1")
    with open(rank.rank.files.log, "ab", buffering=0) as writer:
        for text, kept, aside in [
            (b"short", b"short", None),
            (b" and too long", b"", b"short and too long"),
            (b"new", b"new", b"short and too long"),
            (b" and again too long", b"", b"new and again too long"),
        ]:
            writer.write(text)
            rank.look()
            assert log.read_bytes() == kept
            assert (before.read_bytes() if before.exists() else None) == aside


def test_the_time_in_which_the_agent_stood_still_is_no_hang(watched, clock):
    rank = watched()
    word = rank.writer()
    word.mark(Phase.STEP, 1)
    clock.go(0.5)
    assert rank.look().age_s == 0.5
    clock.go(0.5)
    word.mark(Phase.STEP, 2)  # then all processes stand still
    clock.go(60.5)
    rank.lost_s += 60.0
    assert rank.look().age_s == 1.0  # not before the last look
    clock.go(1)
    assert rank.look().age_s == 2.0
    clock.go(60)
    rank.lost_s += 60.0
    assert rank.look().age_s == 2.0
    clock.go(2)
    state = rank.look()
    assert state.age_s == 4.0
    assert sum(state.spent_s) == 124.5  # for the ledger, that time has passed


@pytest.mark.parametrize("how", ["deleted", "noise", "cut", "folder"])
def test_a_word_that_somebody_spoils_is_whole_after_the_next_mark(
    watched, clock, tmp_path, how
):
    rank = watched()
    path, word = tmp_path / "run" / "progress-0", rank.writer()
    word.mark(Phase.STEP, 1)
    assert rank.look().step == 1
    if how == "noise":
        path.write_bytes(b"\xff" * 300)
    elif how == "cut":
        path.write_bytes(b"")
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
    clock.go(2)
    state = rank.look()
    assert (state.step, state.age_s) == (1, 2.0)
    word.mark(Phase.SAVE, 4)
    state = rank.look()
    assert (state.step, state.phase, state.age_s) == (4, Phase.SAVE, 0.0)


def test_a_rank_has_its_files_also_where_none_can_be_created(watched, tmp_path, capsys):
    (tmp_path / "run").write_text("this is no folder")
    rank = watched()
    said = capsys.readouterr().err
    assert "progress-0 is kept in memory: File exists" in said
    word = rank.writer()
    word.mark(Phase.STEP, 3)
    assert rank.look().step == 3
    with open(rank.rank.files.log, "a") as log:
        log.write("its last line")
    word.diverged(9, {6: ["6:3"]})
    rank.look(is_over=True)
    rank.rank.finish(93)
    state = rank.rank.state()
    assert (state.code, state.last_lines) == (93, "its last line")
    assert state.last_words is not None
    assert state.last_words.diverged is not None
    assert state.last_words.diverged.ways == {"6": ["6:3"]}


def test_the_end_of_a_rank_is_told_although_its_log_is_deleted(watched, tmp_path):
    rank = watched()
    with open(rank.rank.files.log, "a") as log:
        log.write("Xid 79\nits last line\n")
    shutil.rmtree(tmp_path / "run")
    rank.look(is_over=True)
    rank.rank.finish(-9)
    assert rank.rank.state().last_lines == "Xid 79\nits last line"


ABORTED = """\
F1128 22:48:01 client.h:80] Terminating process because the JAX distributed service \
detected fatal errors. This most likely indicates that another task died
The tasks have crashed. Check the task logs for an earlier error

RPC: /xla.coordination.CoordinationService/PollForError
=== Source Location Trace: ===
external/xla/coordination_service_error_util.cc:64

*** Check failure stack trace: ***
"""


def test_the_message_of_an_abort_is_told_without_the_stack_that_follows(watched):
    rank = watched()
    frame = "    @     0x7f5e85f3d7d4  absl::lts_20260526::log_internal::SendToLog()\n"
    with open(rank.rank.files.log, "a") as log:
        log.write(ABORTED + 60 * frame)
    rank.look(is_over=True)
    rank.rank.finish(-6)
    assert rank.rank.state().last_lines == ABORTED.strip()


def test_a_handler_of_a_signal_is_seen_from_outside():
    assert handles(os.getpid(), 2)
    assert not handles(os.getpid(), progress.STACKS_SIGNAL)
    assert not handles(2**22, 2)


def test_what_a_rank_gave_up_for_fits_beside_its_word(watched, tmp_path, monkeypatch):
    """Also if nothing new can be written."""
    rank = watched()
    word = rank.writer()
    monkeypatch.setattr("pathlib.Path.write_text", fail)
    word.corrupted(7, [1], is_sure=True)
    text = (tmp_path / "run" / "progress-0").read_bytes()[progress.WORD_BYTES :]
    assert json.loads(text)["corrupted"]["processes"] == [1]
    word.mark(Phase.EXIT)
    assert rank.look().phase == Phase.EXIT


def fail(*_):
    raise OSError(28, "No space left on device")
