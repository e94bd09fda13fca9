"""A folder that is not the step that its name says, or not of this run."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from mjax.ckpt import manifest, places
from mjax.ckpt.__main__ import main
from mjax.ckpt.config import CkptConfig
from mjax.ckpt.journal import Journal, age_of, new_save_id, origin_of, start_of
from mjax.ckpt.manager import Checkpoints
from mjax.ckpt.recovery import LostError
from mjax.ckpt.reshard import copy_step
from mjax.ckpt.saved_step import SavedStep
from mjax.ckpt.store import Store
from tests.ckpt.states import abstract, assert_same, make_state, saved, sharding


@pytest.fixture(scope="module")
def states():
    where = sharding(8, 1)
    return {step: make_state(where, step=step) for step in (4, 8, 12)}


def two_steps(work_dir, states, **config):
    """Save steps 4 and 8 of a new run."""
    manager = Checkpoints(work_dir, CkptConfig(**config))
    for step in (4, 8):
        saved(manager, states[step], step)
    manager.attempts()
    manager.close()
    return work_dir / "checkpoints"


def restored_step(manager, state):
    restored = manager.restore(abstract(state))
    assert restored is not None
    return restored.step


def copy_to_host(manager, state, step):
    """Copy, and wait until it is written."""
    manager.copy(step, lambda: state, {"next_step": step})
    assert manager._copies is not None
    manager._copies.wait()


def save_as_before(work_dir, step, save_id):
    """Give a step an id as it was before ids began with that of the run."""
    path = work_dir / "checkpoints" / str(step) / manifest.MAIN_FILE
    found = manifest.read_manifest(path.read_text(), "")
    changed = dataclasses.replace(found, save_id=save_id)
    path.write_text(manifest.write_manifest(changed))


def test_a_step_of_a_newer_branch_is_newer_than_a_higher_step_of_an_older_one():
    ids = {start: new_save_id("run", start) for start in (0, 1, 2)}
    ages = [
        age_of(step, ids[start]) for start, step in ((0, 9), (1, 8), (2, 4), (2, 6))
    ]
    assert ages == sorted(ages)


MOVES = {
    "copied": lambda old, new: shutil.copytree(old, new),
    "linked": lambda old, new: os.symlink(old.name, new),
    "renamed": lambda old, new: old.rename(new),
}


@pytest.mark.parametrize("how", MOVES)
def test_a_folder_that_holds_another_step_is_put_aside(
    tmp_path, opened, states, how, capsys
):
    steps = two_steps(tmp_path, states)
    MOVES[how](steps / "8", steps / "16")
    says = "16 holds step 8 (it was copied, renamed or linked); its right name is 8"
    assert main(["verify", str(tmp_path)]) == 1
    assert f"16: damaged: {says}" in capsys.readouterr().out
    assert main(["ls", str(tmp_path)]) == 1
    assert f"damaged: {says}" in capsys.readouterr().out
    for command in (["show"], ["verify", "--step", "16"]):
        assert main([command[0], str(tmp_path), *command[1:]]) == 1
        assert says in "".join(capsys.readouterr())
    assert main(["reshard", str(tmp_path), str(tmp_path / "out")]) == 1
    manager = opened()
    right = 4 if how == "renamed" else 8
    assert manager.newest().step == right
    restored = manager.restore(abstract(states[8]))
    assert restored.step == right
    assert_same(restored.state, states[right])
    [line] = restored.put_aside
    assert line == f"{steps / '16.damaged'}: {says}"
    # A link is only renamed: what it points to is not written into.
    assert not (steps / "8" / "damaged.json").exists()
    reason = "it was a link to 8" if how == "linked" else says
    assert manager.store.quarantined() == {"16.damaged": reason}
    # Nor is it taken for the step once more, or in the way of the real one.
    assert opened().restore(abstract(states[8])).put_aside == ()
    saved(opened(), states[8], 16)
    assert main(["verify", str(tmp_path)]) == 0


def test_a_run_whose_only_step_was_renamed_says_its_right_name(
    tmp_path, opened, states
):
    steps = two_steps(tmp_path, states)
    shutil.rmtree(steps / "4")
    (steps / "8").rename(steps / "20")
    with pytest.raises(LostError, match="its right name is 8"):
        opened().restore(abstract(states[8]))
    (steps / "20.damaged").rename(steps / "8")
    assert restored_step(opened(), states[8]) == 8


def test_a_folder_that_holds_another_step_counts_for_no_rule(tmp_path, states):
    steps = two_steps(tmp_path, states)
    shutil.copytree(steps / "4", steps / "9")
    os.symlink("8", steps / "10")
    os.symlink("nowhere", steps / "11")
    (steps / "7.unfinished-0a").symlink_to("8")
    manager = Checkpoints(tmp_path, CkptConfig(keep=2))
    saved(manager, states[12], 12)
    [attempt] = manager.attempts()
    manager.close()
    assert (attempt.removed, attempt.warning) == ((4,), None)
    assert manager.store.steps() == [8, 9, 10, 11, 12]
    assert (steps / "8" / "checkpoint.json").exists()


def test_a_linked_step_is_deleted_without_what_it_points_to(tmp_path, states):
    """Steps may be moved to another disk, with a link in their place."""
    steps = two_steps(tmp_path, states)
    archive = tmp_path / "archive"
    (steps / "4").rename(archive)
    (steps / "4").symlink_to(archive)
    manager = Checkpoints(tmp_path, CkptConfig(keep=2))
    assert SavedStep(manager.store.path(4)).manifest.step == 4
    saved(manager, states[12], 12)
    [attempt] = manager.attempts()
    manager.close()
    assert (attempt.removed, attempt.warning) == ((4,), None)
    assert (archive / "checkpoint.json").exists()


def test_a_broken_link_is_put_aside(tmp_path, opened, states):
    steps = two_steps(tmp_path, states)
    for _ in range(2):
        os.symlink("nowhere", steps / "16")
        [line] = opened().restore(abstract(states[8])).put_aside
        assert line.endswith("16/checkpoint.json is missing")
    assert {*opened().store.quarantined()} == {"16.damaged", "16.damaged-2"}


# ----------------------------------------------------------------------- another run's


@pytest.fixture
def two_runs(tmp_path, states):
    """Work dirs of two runs with the same steps."""
    runs = tmp_path / "a", tmp_path / "b"
    for run in runs:
        run.mkdir()
        two_steps(run, states)
    return runs


@pytest.mark.parametrize("step", [8, 12])
def test_a_step_of_another_run_is_refused_and_stays(two_runs, states, step, capsys):
    """Whether this run has saved that step or not."""
    run, other = two_runs
    if step == 12:
        manager = Checkpoints(other, CkptConfig())
        manager.restore(abstract(states[8]))
        saved(manager, states[12], 12)
        manager.close()
    target = run / "checkpoints" / str(step)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(other / "checkpoints" / str(step), target)
    manager = Checkpoints(run, CkptConfig(keep=1))
    for ask in (manager.newest, lambda: manager.restore(abstract(states[8]))):
        with pytest.raises(ValueError, match="is not of this run: another") as caught:
            ask()
        assert f"--init-from {target} begins" in str(caught.value)
    assert main(["ls", str(run)]) == 1
    assert "foreign: another run saved it" in capsys.readouterr().out
    assert main(["verify", str(run)]) == 1
    assert f"{step}: not of this run" in capsys.readouterr().out
    assert main(["show", str(run)]) == 2
    assert "Give that folder itself" in capsys.readouterr().err
    # By itself it is a checkpoint as any other.
    assert main(["verify", str(target)]) == 0
    # No rule counts or deletes it.
    saved(manager, states[12], 16)
    [attempt] = manager.attempts()
    manager.close()
    assert attempt.removed == ((4,) if step == 8 else (4, 8))
    assert target.exists()


def test_a_step_without_its_record_is_still_of_its_run(two_runs, states):
    """A run may be killed between a save and its record."""
    run, other = two_runs
    journal = run / "checkpoints.jsonl"
    lines = [x for x in journal.read_text().splitlines() if x]
    journal.write_text("\n".join(x for x in lines if '"step": 8' not in x) + "\n")
    manager = Checkpoints(run, CkptConfig())
    assert restored_step(manager, states[8]) == 8
    manager.close()
    shutil.rmtree(run / "checkpoints" / "8")
    shutil.copytree(other / "checkpoints" / "8", run / "checkpoints" / "8")
    manager = Checkpoints(run, CkptConfig())
    with pytest.raises(ValueError, match="is not of this run"):
        manager.newest()
    manager.close()


def test_a_run_that_lost_its_journal_takes_its_name_from_its_steps(two_runs, states):
    run, _ = two_runs
    store = Store(run / "checkpoints")
    name = origin_of(store.manifest(8).save_id)
    (run / "checkpoints.jsonl").unlink()
    manager = Checkpoints(run, CkptConfig())
    assert restored_step(manager, states[8]) == 8
    saved(manager, states[12], 12)
    manager.attempts()
    manager.close()
    assert origin_of(store.manifest(12).save_id) == name
    assert Journal(run / "checkpoints.jsonl").records().run_id == name


def test_a_run_whose_journal_becomes_a_folder_saves(two_runs, states):
    run, _ = two_runs
    manager = Checkpoints(run, CkptConfig())
    name = origin_of(manager.store.manifest(8).save_id)
    assert restored_step(manager, states[8]) == 8
    (run / "checkpoints.jsonl").unlink()
    (run / "checkpoints.jsonl").mkdir()
    saved(manager, states[12], 12)
    [attempt] = manager.attempts()
    assert attempt.error is None
    assert attempt.warning is not None
    assert "Is a directory" in attempt.warning
    manager.close()
    save_id = manager.store.manifest(12).save_id
    assert (origin_of(save_id), start_of(save_id)) == (name, 2)


def test_a_run_whose_journal_cannot_be_written_saves(two_runs, states, monkeypatch):
    run, _ = two_runs
    (run / "checkpoints.jsonl").unlink()

    def full(*_, **__):
        raise OSError("No space left on device")

    manager = Checkpoints(run, CkptConfig())
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "write", full)
        saved(manager, states[12], 12)
        [attempt] = manager.attempts()
    assert (attempt.error, attempt.warning) == (None, "No space left on device")
    manager.close()
    manager = Checkpoints(run, CkptConfig())
    assert restored_step(manager, states[12]) == 12
    manager.close()


def test_steps_saved_before_ids_named_the_run(tmp_path, states):
    """Those ids are compared with the records of the same step."""
    two_steps(tmp_path, states)
    for step, save_id in ((4, "c30eee07"), (8, "f149253e")):
        save_as_before(tmp_path, step, save_id)
    journal = Journal(tmp_path / "checkpoints.jsonl")
    (tmp_path / "checkpoints.jsonl").unlink()
    journal.write("saved", 4, save_id="c30eee07")
    manager = Checkpoints(tmp_path, CkptConfig())
    assert restored_step(manager, states[8]) == 8  # without its record
    saved(manager, states[12], 12)
    manager.attempts()
    manager.close()
    journal.write("saved", 8, save_id="f149253e")
    assert main(["verify", str(tmp_path)]) == 0
    copy_step(SavedStep(Store(tmp_path / "checkpoints").path(4)), Store(tmp_path / "c"))
    copied = Checkpoints(tmp_path, CkptConfig(dir=str(tmp_path / "c")))
    assert restored_step(copied, states[4]) == 4
    copied.close()
    save_as_before(tmp_path, 8, "0000")
    assert main(["verify", str(tmp_path)]) == 1


def test_resharded_steps_are_of_their_run(two_runs, states):
    run, other = two_runs
    copies = run.parent / "copies"
    copy_step(SavedStep(Store(run / "checkpoints").path(8)), Store(copies))
    own = Checkpoints(run, CkptConfig(dir=str(copies)))
    assert restored_step(own, states[8]) == 8
    own.close()
    foreign = Checkpoints(other, CkptConfig(dir=str(copies)))
    with pytest.raises(ValueError, match=r"give the --ckpt\.dir of this run"):
        foreign.newest()
    foreign.close()


# -------------------------------------------------------------------- copies on hosts


@pytest.mark.parametrize("how", MOVES)
def test_a_copy_that_is_another_step_is_passed_over(tmp_path, opened, states, how):
    local = tmp_path / "host"
    manager = opened(local_dir=str(local))
    assert manager.restore(abstract(states[4])) is None
    saved(manager, states[4], 4)
    copy_to_host(manager, states[8], 8)
    [copy] = local.glob("*/process-0/8")
    MOVES[how](copy, copy.with_name("16"))
    manager = opened(local_dir=str(local))
    restored = manager.restore(abstract(states[4]))
    assert restored.step == (4 if how == "renamed" else 8)
    assert_same(restored.state, states[restored.step])
    copy_to_host(manager, states[12], 12)
    assert restored_step(opened(local_dir=str(local)), states[4]) == 12


def test_a_copy_of_another_run_is_passed_over(tmp_path, states):
    local = tmp_path / "host"
    managers = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        manager = Checkpoints(tmp_path / name, CkptConfig(local_dir=str(local)))
        assert manager.restore(abstract(states[4])) is None
        saved(manager, states[4], 4)
        managers.append(manager)
    copy_to_host(managers[0], states[8], 8)
    [copy] = local.glob("*/process-0/8")
    shutil.copytree(copy, local / managers[1]._run_name() / "process-0" / "8")
    for manager in managers:
        manager.close()
    manager = Checkpoints(tmp_path / "b", CkptConfig(local_dir=str(local)))
    assert restored_step(manager, states[4]) == 4
    manager.close()


# ------------------------------------------------------------------- unreadable files


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "quarantined", "step": 8}',
        '{"event": "quarantined", "step": 8, "save_id": 5, "reason": null}',
        '{"event": "saved", "step": 8}',
        '{"event": "saved", "step": "8", "save_id": "x"}',
        '{"event": ["saved"], "step": 8}',
        '{"event": "started", "step": 0, "run_id": []}',
        "[" * 100_000,
        '{"event": "saved", "step": ' + "1" * 6000 + "}",
        "[]",
        "\xff",
    ],
)
def test_a_line_that_is_no_record_does_no_harm(tmp_path, opened, states, line, capsys):
    two_steps(tmp_path, states)
    with (tmp_path / "checkpoints.jsonl").open("a") as file:
        file.write(f"\n{line}\n")
    assert restored_step(opened(), states[8]) == 8
    for command in ("ls", "verify", "show"):
        assert main([command, str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["checkpoint.json", "pieces.0.json"])
def test_a_folder_in_the_place_of_a_file_is_damage(
    tmp_path, opened, states, name, capsys
):
    steps = two_steps(tmp_path, states)
    (steps / "8" / name).unlink()
    (steps / "8" / name).mkdir()
    assert main(["ls", str(tmp_path)]) == 1
    assert f"damaged: 8/{name} is a folder" in capsys.readouterr().out
    restored = opened().restore(abstract(states[8]))
    assert restored.step == 4
    assert restored.put_aside[0].endswith(f": 8/{name} is a folder")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", r"must be an object, got \[\]"),
        ('{"ckpt": []}', r"ckpt must be an object, got \[\]"),
        ('{"ckpt": {"dir": 5}}', "ckpt.dir must be text or null, got 5"),
        ("[" * 100_000, "nested too deeply"),
        ("{}", "ckpt must be an object, got None"),
    ],
)
def test_a_config_of_no_run_is_refused(tmp_path, states, text, says):
    two_steps(tmp_path, states)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=f"is not the config of a run .*{says}"):
        places.find(str(tmp_path))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("gs://bucket/run", "PATH gs://bucket/run needs obstore; pip install"),
        ("s3://bucket/run", "PATH s3://bucket/run needs obstore; pip install"),
        ("what://bucket", "what://bucket cannot be opened here (unknown kind of URL)"),
        ("hf://org/model@main", "hf://org/model@main is on a hub, where mjax reads"),
    ],
)
@pytest.mark.parametrize("command", ["ls", "show", "verify", "export", "reshard"])
def test_a_url_that_nothing_opens_is_refused_in_one_line(url, says, command, capsys):
    has_out = command in ("export", "reshard")
    if has_out and url[:2] in ("gs", "s3"):
        says = f"{url} cannot be opened here"
    assert main([command, url, *(["out"] if has_out else [])]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {says}")
    assert err.count("\n") == 1


def test_a_copy_is_not_written_to_a_url(tmp_path, states, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    two_steps(tmp_path / "run", states)
    before = sorted(tmp_path.iterdir())
    assert main(["reshard", "run", "hf://org/model"]) == 2
    assert "error: hf://org/model is on a hub" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_in_place_of_a_folder_is_named(tmp_path, states, capsys):
    """And a folder in place of a file."""
    two_steps(tmp_path, states)
    (tmp_path / "checkpoints").rename(tmp_path / "aside")
    (tmp_path / "checkpoints").write_text("x")
    says = f"{tmp_path}/checkpoints is a file, not a folder of checkpoints; move it"
    with pytest.raises(ValueError, match=says):
        Checkpoints(tmp_path, CkptConfig())
    with pytest.raises(ValueError, match=says):
        places.is_without_steps(tmp_path, {"ckpt": {}})
    for command in ("ls", "show", "verify"):
        assert main([command, str(tmp_path)]) == 2
        assert says in capsys.readouterr().err
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "aside").rename(tmp_path / "checkpoints")
    (tmp_path / "checkpoints.jsonl").unlink(missing_ok=True)
    (tmp_path / "checkpoints.jsonl").mkdir()
    assert main(["ls", str(tmp_path)]) == 2
    assert "checkpoints.jsonl is a folder, not the record" in capsys.readouterr().err


def test_a_folder_of_checkpoints_that_nothing_opens_is_refused(tmp_path):
    with pytest.raises(ValueError, match="s3://bucket/run cannot be opened here"):
        Checkpoints(tmp_path, CkptConfig(dir="s3://bucket/run"))
    with pytest.raises(ValueError, match="hf://org/model is on a hub"):
        Checkpoints(tmp_path, CkptConfig(dir="hf://org/model"))
    with pytest.raises(
        ValueError, match=r"--ckpt\.local-dir must be a folder .* URL s3://x"
    ):
        CkptConfig(local_dir="s3://x")


def test_a_step_that_was_saved_without_its_config_is_not_exported(
    tmp_path, states, capsys
):
    two_steps(tmp_path, states)
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "does not record its config" in capsys.readouterr().err
    assert not Path(tmp_path / "out").exists()


def test_what_is_sealed_is_checked_too():
    for body in ([], {"step": "8"}, {"step": 8, "leaves": {"x": {"shape": 3}}}):
        with pytest.raises(
            manifest.DamagedError, match=r"^f: .*must be an object|^f: "
        ):
            manifest.read_manifest(manifest.seal(body), "f")
    leaf = {"shape": [2], "dtype": "nonsense"}
    body = {"step": 8, "save_id": "", "leaves": {"x": leaf}, "part_sums": [], "run": {}}
    with pytest.raises(manifest.DamagedError, match="f: x has dtype nonsense"):
        manifest.read_manifest(manifest.seal(body), "f")
    with pytest.raises(manifest.DamagedError, match=r"x\[0\] must be a list of 2"):
        manifest.read_pieces(manifest.seal(json.loads('{"x": [[1]]}')), "f")
