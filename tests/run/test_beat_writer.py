"""Heartbeats: their content, and when they stop."""

import ctypes
import time

import pytest

from mjax.observe.beats import FOLDER, file_name, read
from mjax.processes.progress import Phase, Writer
from mjax.run import beats
from mjax.run.beats import Beats
from mjax.run.spans import Spans
from tests.run.test_span_writer import HEADER

LIMIT_S = 20.0


def wait_for(condition):
    until_s = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < until_s
        time.sleep(0.002)
    return found


def beating(tmp_path, marks, spans, every_s=0.005, warn=print):
    path = tmp_path / FOLDER / file_name(HEADER)
    return path, Beats(tmp_path, HEADER, marks, spans, every_s, warn)


def test_a_beat_says_what_the_process_does_and_how_far_it_has_come(tmp_path):
    marks, spans = Writer(None), Spans()
    marks.mark(Phase.EVAL, 8, 2)
    spans.enter("metrics", "host", 8)
    began_ns = spans.enter("eval", "eval", 8)
    path, writer = beating(tmp_path, marks, spans, 3600)
    beat = wait_for(lambda: read(path))
    assert (beat.n, beat.phase, beat.step, beat.microstep) == (0, Phase.EVAL, 8, 2)
    assert (beat.entered, beat.doing, beat.since_ns) == (2, "eval", began_ns)
    assert (beat.whose, beat.has_stepped, beat.stack) == (HEADER, False, "")
    writer.close(42)
    last = read(path)
    assert last is not None
    assert (last.n, last.end) == (1, 42)


def test_a_main_thread_that_stands_still_shows_its_stack_and_one_that_goes_on_not(
    tmp_path,
):
    marks, spans = Writer(None), Spans()
    path, writer = beating(tmp_path, marks, spans)

    def stands_here():
        return wait_for(lambda: (beat := read(path)) is not None and beat.stack)

    assert "test_beat_writer.py" in stands_here()
    assert " in stands_here\n" in stands_here()
    writer.close(0)
    quiet = Beats(tmp_path / "b", HEADER, marks, spans, 3600)
    wait_for((tmp_path / "b" / FOLDER).exists)
    marks.mark(Phase.STEP, 1)
    quiet.close(0)
    last = read(tmp_path / "b" / FOLDER / file_name(HEADER))
    assert last is not None
    assert last.stack == ""


@pytest.mark.parametrize("is_held", [True, False])
def test_a_process_in_which_the_interpreter_lock_is_held_falls_silent(
    tmp_path, monkeypatch, is_held
):
    times_ns: list[int] = []
    monkeypatch.setattr(
        Beats, "_write", lambda *_: times_ns.append(time.monotonic_ns())
    )
    _, writer = beating(tmp_path, Writer(None), Spans())
    wait_for(lambda: times_ns)
    usleep = (ctypes.PyDLL if is_held else ctypes.CDLL)(None).usleep
    within = 0
    for _ in range(1 if is_held else 100):  # a busy machine delays threads
        began_ns = time.monotonic_ns()
        usleep(100_000)
        ended_ns = time.monotonic_ns()
        within += sum(began_ns < each < ended_ns for each in times_ns)
        if within > 1:
            break
    writer.close(0)
    # One heartbeat may come between reading the clock and the call.
    assert (within > 1) != is_held


def test_a_folder_that_cannot_be_written_is_reported_once(tmp_path):
    (tmp_path / FOLDER).write_text("in the way")
    said = []
    _, writer = beating(tmp_path, Writer(None), Spans(), 0.001, said.append)
    wait_for(lambda: writer._n > 3)
    writer.close(0)
    assert len(said) == 1
    assert "cannot be written, training continues" in said[0]


def test_a_process_whose_word_is_deleted_beats_on(tmp_path):
    marks = Writer(tmp_path / "word")
    marks.mark(Phase.STEP, 5)
    path, writer = beating(tmp_path, marks, Spans())
    wait_for(lambda: read(path))
    (tmp_path / "word").unlink()
    marks.mark(Phase.STEP, 6)
    beat = wait_for(lambda: (b := read(path)) and b.step == 6 and b)
    wait_for(lambda: (b := read(path)) and b.n > beat.n + 2)
    writer.close(0)


def test_the_stack_has_the_frames_that_the_launcher_compares():
    lines = beats._main_stack().splitlines()
    assert 1 < len(lines) <= 12
    assert lines[0].endswith(" in _main_stack")
    name = "test_the_stack_has_the_frames_that_the_launcher_compares"
    assert any(line.endswith(f" in {name}") for line in lines[1:3])
