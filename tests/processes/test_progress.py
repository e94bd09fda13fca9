"""The progress word, as it is written and as others read it."""

import faulthandler
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time

import pytest

from mjax import train
from mjax.processes import progress
from mjax.processes.progress import Phase, Writer, read


def test_what_is_marked_is_read_with_its_time(tmp_path):
    path = tmp_path / "word"
    before_ns = time.monotonic_ns()
    writer = Writer(path, generation=3)
    first = read(path)
    assert first is not None
    assert (first.generation, first.phase, first.saved_step) == (3, Phase.IMPORT, -1)
    writer.mark(Phase.STEP, 7)
    writer.saved(5)
    writer.mark(Phase.EVAL, microstep=2)
    last = read(path)
    assert last is not None
    assert (last.phase, last.step, last.microstep) == (Phase.EVAL, 7, 2)
    assert (last.saved_step, last.sequence) == (5, first.sequence + 6)
    assert (first.start_step, last.start_step, last.first_step_ns) == (-1, 7, 0)
    writer.mark(Phase.STEP, 7)
    writer.mark(Phase.STEP, 8)
    writer.ended_first_step()
    writer.mark(Phase.STEP, 9)
    stepped = read(path)
    assert stepped is not None
    assert last.monotonic_ns < stepped.first_step_ns < stepped.monotonic_ns
    assert sum(stepped.spent_ns) == stepped.monotonic_ns - stepped.began_ns
    assert {Phase(i) for i, spent in enumerate(stepped.spent_ns) if spent} == {
        *(Phase.IMPORT, Phase.STEP, Phase.EVAL)
    }
    assert before_ns <= first.monotonic_ns <= last.monotonic_ns <= time.monotonic_ns()


def test_ways_back_from_a_divergence_are_a_file_beside_the_word(tmp_path):
    path = tmp_path / "word"
    Writer(None).diverged(9, {6: ["6:3"]})
    Writer(path).diverged(9, {3: ["3:6"], 6: ["4:1", "6:3"]})
    said = json.loads(progress.last_words_path(path).read_text())
    ways = {"3": ["3:6"], "6": ["4:1", "6:3"]}
    assert said == {"diverged": {"step": 9, "ways": ways}}
    Writer(path).corrupted(8, (1,), is_sure=True)
    said = json.loads(progress.last_words_path(path).read_text())
    assert said == {"corrupted": {"step": 8, "processes": [1], "is_sure": True}}


def test_a_file_that_nobody_has_written_says_nothing(tmp_path):
    assert read(tmp_path / "absent") is None
    (tmp_path / "new").write_bytes(b"")
    assert read(tmp_path / "new") is None


@pytest.mark.parametrize("content", [b"x" * 168, b"short"])
def test_another_file_is_no_word(tmp_path, content):
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"other (is not a progress word|holds 5 bytes)"
    ):
        read(tmp_path / "other")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read(tmp_path)


def test_a_process_whose_stacks_have_no_file_runs_on(tmp_path, capsys):
    names = {progress.STACKS_VARIABLE: str(tmp_path / "absent" / "stacks")}
    progress.show_stacks_on_signal(names)
    assert "a hang of this process will show no stacks" in capsys.readouterr().out


def test_a_disk_that_blocks_holds_no_mark(tmp_path, monkeypatch):
    path, release, began = tmp_path / "word", threading.Event(), threading.Event()
    writer, pwrite = Writer(path), os.pwrite

    def block(*args):
        began.set()
        assert release.wait(60)
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", block)

    def train():
        for step in range(1, 1000):
            writer.mark(Phase.STEP, step)

    loop = threading.Thread(target=train, daemon=True)
    loop.start()
    loop.join(30)
    is_held = loop.is_alive()
    word = read(path)
    release.set()
    loop.join()
    assert began.is_set()
    assert not is_held
    assert (word and word.phase, writer.word().step) == (Phase.IMPORT, 999)
    monkeypatch.setattr(os, "pwrite", pwrite)
    writer.mark(Phase.SAVE)  # the disk works again: the word is there at once
    until_s = time.monotonic() + 30
    while (last := read(path)) is None or last.phase is not Phase.SAVE:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert (last.step, last.sequence) == (999, writer.word().sequence)
    for step in range(1000, 1100):
        writer.mark(Phase.STEP, step)
        found = read(path)
        assert found is not None
        assert found.step == step


def test_a_word_that_is_being_written_is_not_read(tmp_path):
    path = tmp_path / "word"
    Writer(path).mark(Phase.STEP, 7)
    word = bytearray(path.read_bytes())
    word[56:64] = struct.pack("<q", 5)  # odd: an older writer was in the middle
    path.write_bytes(word)
    assert read(path) is None


def test_without_the_variable_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = progress.from_environment({})
    writer.mark(Phase.STEP, 1)
    writer.saved(1)
    assert list(tmp_path.iterdir()) == []


def test_the_environment_says_where_and_which_generation(tmp_path):
    path = tmp_path / "word"
    names = {progress.FILE_VARIABLE: str(path), progress.GENERATION_VARIABLE: "4"}
    progress.from_environment(names)
    word = read(path)
    assert word is not None
    assert word.generation == 4
    with pytest.raises(ValueError, match="MJAX_GENERATION must be a whole number"):
        progress.from_environment(names | {progress.GENERATION_VARIABLE: "-4"})
    absent = {progress.FILE_VARIABLE: str(path / "absent")}
    with pytest.raises(ValueError, match="MJAX_PROGRESS_FILE must name a file that"):
        progress.from_environment(absent)


def test_the_trainer_refuses_what_is_no_generation(monkeypatch, capsys):
    monkeypatch.setenv(progress.GENERATION_VARIABLE, "one")
    assert train.main(["--print-config"]) == 2
    assert "must be a whole number, got 'one'" in capsys.readouterr().err


HANGS = """
import ctypes, os, sys, threading
from mjax.processes import progress
progress.show_stacks_on_signal()
writer = progress.from_environment()
writer.mark(progress.Phase.STEP, 9)
def hold_the_lock():
    (ctypes.PyDLL if sys.argv[1] == "held" else ctypes.CDLL)(None).sleep(60)
thread = threading.Thread(target=hold_the_lock)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("lock", ["held", "free"])
def test_a_process_that_hangs_shows_its_stacks_and_whether_its_lock_is_free(
    tmp_path, lock
):
    word, stacks, pipe = (tmp_path / name for name in ("word", "stacks", "pipe"))
    os.mkfifo(pipe)
    names = {progress.FILE_VARIABLE: str(word), progress.STACKS_VARIABLE: str(stacks)}
    names[progress.LOCK_VARIABLE] = str(pipe)
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS, lock], env={**os.environ, **names}
    )
    try:
        until_s = time.monotonic() + 30
        found = None
        while time.monotonic() < until_s and (found is None or found.step != 9):
            time.sleep(0.01)
            found = read(word)
        assert found is not None
        assert found.step == 9
        time.sleep(0.1)
        process.send_signal(progress.STACKS_SIGNAL)
        while time.monotonic() < until_s and "hold_the_lock" not in stacks.read_text():
            time.sleep(0.01)
        assert "hold_the_lock" in stacks.read_text()
        pipe.write_bytes(b"?")
        until_s = time.monotonic() + (1 if lock == "held" else 30)
        while (
            time.monotonic() < until_s
            and progress.LOCK_ANSWER not in stacks.read_text()
        ):
            time.sleep(0.01)
        assert (progress.LOCK_ANSWER in stacks.read_text()) == (lock == "free")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_stacks_are_not_registered_without_the_variable(monkeypatch):
    monkeypatch.setattr(faulthandler, "register", pytest.fail)
    progress.show_stacks_on_signal({})
    assert signal.getsignal(progress.STACKS_SIGNAL) is signal.SIG_DFL
