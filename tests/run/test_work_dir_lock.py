"""A second start in a running work dir is refused, with the process to stop."""

import os

import msgspec
import pytest

from mjax import train
from mjax.cli import exit_codes
from mjax.processes import lock
from mjax.processes.lock import Lock, holder_of, this_process
from mjax.processes.progress import Phase, Writer
from mjax.run.beats import Beats
from mjax.run.spans import Spans
from mjax.run.work_dir_lock import WorkDirLock
from tests.run.test_span_writer import HEADER


@pytest.fixture
def work_dir(tmp_path):
    path = tmp_path / "run"
    (path / "launch").mkdir(parents=True)
    return path


@pytest.fixture
def held(work_dir):
    """Hold a lock of the work dir until the test ends."""
    locks = []

    def hold(name, ours):
        locks.append(Lock(work_dir / name))
        assert locks[-1].take(ours) is None

    yield hold
    for one in locks:
        one.release()


def take(work_dir, launch="", generation=0):
    with WorkDirLock(launch, generation) as one:
        one.check(work_dir)
        one.take(work_dir)
        one.take(work_dir)  # as after the deletion of a file of the work dir
        return holder_of(work_dir / lock.TRAINING)


def test_a_second_start_ends_with_2_and_names_process_step_and_remedy(
    work_dir, held, capsys
):
    ours = this_process()
    held(lock.TRAINING, ours)
    header = msgspec.structs.replace(
        HEADER, host=ours.host, pid=ours.pid, boot=ours.boot
    )
    marks = Writer(None)
    marks.mark(Phase.STEP, 1320)
    Beats(work_dir, header, marks, Spans(), 3600).close(0)
    before = sorted(work_dir.rglob("*"))
    words = ["--recipe", "debug", "--data.path", "synthetic"]
    code = train.main([*words, "--work-dir", str(work_dir)])
    assert code == exit_codes.BAD_INPUT
    assert capsys.readouterr().err == (
        f"error: process {os.getpid()} on {ours.host} is training in {work_dir} (step "
        f"1320); stop it (kill -INT {os.getpid()}) or use another --work-dir\n"
    )
    assert sorted(work_dir.rglob("*")) == before


def test_a_start_holds_the_work_dir_until_its_end(work_dir):
    found = take(work_dir)
    assert found is not None
    assert found.pid == os.getpid()
    assert holder_of(work_dir / lock.TRAINING) is None
    assert take(work_dir) is not None


def test_a_look_at_a_folder_that_no_run_has_held_creates_nothing(work_dir):
    with WorkDirLock("", 0) as one:
        one.check(work_dir)
        one.check(work_dir / "absent")
    assert [*work_dir.iterdir()] == [work_dir / "launch"]


def test_a_start_by_hand_is_refused_while_a_launch_trains(work_dir, held):
    held(lock.TRAINING, this_process("launch", 3))
    stop = rf"stop the launch \(python -m mjax.launch stop --work-dir {work_dir}\)"
    with pytest.raises(ValueError, match=rf"process {os.getpid()} on .*{stop}"):
        take(work_dir)
    with pytest.raises(ValueError, match="which a launch has started"):
        take(work_dir, "another launch", 1)


def test_a_newer_generation_takes_over_and_an_older_one_holds_nothing(work_dir, held):
    held(lock.TRAINING, this_process("launch", 3))
    found = take(work_dir, "launch", 2)
    assert found is not None
    assert found.generation == 3
    found = take(work_dir, "launch", 4)
    assert found is not None
    assert found.generation == 4


def test_a_start_by_hand_is_refused_while_a_driver_runs_also_between_two_generations(
    work_dir,
):
    with lock.driving(work_dir):
        (work_dir / lock.ADDRESS).write_text('["127.0.0.1", 4321]')
        who = rf"its driver is process {os.getpid()} on \S+, at 127.0.0.1:4321; stop it"
        with pytest.raises(ValueError, match=who):
            take(work_dir)
        assert take(work_dir, "launch", 1) is not None
    assert take(work_dir) is not None


def test_a_process_that_is_not_named_is_refused_too(work_dir, held, monkeypatch):
    monkeypatch.setattr(lock, "_SETTLE_S", 0.02)
    held(lock.TRAINING, this_process())
    (work_dir / lock.TRAINING).write_text("")
    with pytest.raises(ValueError, match="another process is training in"):
        take(work_dir)


def test_a_command_that_changes_nothing_is_not_refused(work_dir, held, capsys):
    held(lock.TRAINING, this_process())
    words = ["--recipe", "debug", "--data.path", "synthetic", "--print-mesh"]
    assert train.main([*words, "--work-dir", str(work_dir)]) == exit_codes.DONE
    assert capsys.readouterr().out.startswith("mesh ")
