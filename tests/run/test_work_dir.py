"""The run folder: another run's is refused, nothing is ever deleted."""

import functools

import pytest

from mjax.ckpt.journal import SAVED, Journal
from mjax.ckpt.places import is_without_steps
from mjax.run import work_dir


def nothing_differs(found):
    return []


def seed_differs(found):
    return [("seed", found["seed"], 7)]


def has_steps(found):
    return False


def test_a_folder_that_was_asked_for_is_taken(tmp_path):
    assert work_dir.choose(str(tmp_path), "demo") == tmp_path


def test_a_new_folder_is_named_after_recipe_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = work_dir.choose(None, "demo")
    assert first.parent.name == "runs"
    assert first.name.startswith("demo-20")


def test_two_runs_of_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "now")
    work_dir.make(work_dir.choose(None, "demo"))
    assert str(work_dir.choose(None, "demo")) == "runs/demo-now.1"


def test_an_absent_folder_and_one_of_the_same_run_pass(tmp_path):
    work_dir.check(tmp_path / "absent", seed_differs, has_steps)
    work_dir.write_config(tmp_path, {"seed": 3})
    work_dir.check(tmp_path, nothing_differs, has_steps)


def test_a_folder_of_another_run_is_refused_with_the_fields(tmp_path):
    work_dir.write_config(tmp_path, {"seed": 3})
    with pytest.raises(ValueError, match="seed: 3 there, 7 in this run") as caught:
        work_dir.check(tmp_path, seed_differs, has_steps)
    assert "--restart-from-scratch" in str(caught.value)
    assert work_dir.read_config(tmp_path) == {"seed": 3}


def test_a_run_that_saved_no_step_is_told_that_a_restart_loses_none(tmp_path):
    ckpt = {"dir": None, "local_dir": None, "remote": None}
    work_dir.make(tmp_path)
    work_dir.write_config(tmp_path, {"seed": 3, "ckpt": ckpt})

    def refused():
        with pytest.raises(ValueError, match="holds another run") as caught:
            work_dir.check(
                tmp_path, seed_differs, functools.partial(is_without_steps, tmp_path)
            )
        return str(caught.value)

    says = "No step was saved there, so --restart-from-scratch loses none"
    assert says in refused()
    (tmp_path / "checkpoints" / "10").mkdir()
    assert "No step" not in refused()
    assert "--restart-from-scratch" in refused()
    (tmp_path / "checkpoints" / "10").rmdir()
    Journal(tmp_path / "checkpoints.jsonl").write(SAVED, 10)  # the folder was lost
    assert "No step" not in refused()


@pytest.mark.parametrize("name", ["dir", "local_dir", "remote"])
def test_steps_outside_of_the_work_dir_are_not_denied(tmp_path, name):
    assert is_without_steps(tmp_path, {"ckpt": {"dir": None}})
    assert not is_without_steps(tmp_path, {"ckpt": {name: "elsewhere"}})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"seed"', "not JSON"),
        (b"[]", r"must be an object, got \[\]; choose another"),
        (b"null", "must be an object, got None"),
        (b"\xff", "not JSON: 'utf-8'"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 6000, "not JSON: Exceeds the limit"),
    ],
)
def test_a_damaged_config_is_named(tmp_path, text, says):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ValueError, match=rf"cannot read .*config\.json: .*{says}"):
        work_dir.check(tmp_path, nothing_differs, has_steps)


def test_a_file_is_no_work_dir(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; choose another --work-dir"):
        work_dir.check(tmp_path / "file", nothing_differs, has_steps)


def test_a_folder_in_the_place_of_a_file_is_refused_and_the_reverse(tmp_path):
    for name in ("metrics.jsonl", "checkpoints.jsonl", "data_files.json"):
        (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match=rf"{name} is a folder, .*move it away"):
            work_dir.check(tmp_path, nothing_differs, has_steps)
        (tmp_path / name).rmdir()
    (tmp_path / "starts").write_text("")
    with pytest.raises(ValueError, match=r"starts is a file, .*; move it away"):
        work_dir.check(tmp_path, nothing_differs, has_steps)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write the work dir .*: Not a dir"):
        work_dir.make(tmp_path / "file" / "run")


def test_a_config_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot write the work dir"):
        work_dir.write_config(tmp_path / "absent", {})


def test_an_old_run_moves_aside_each_time_to_a_new_name(tmp_path):
    path = tmp_path / "run"
    assert work_dir.move_aside(path) is None
    for number in (1, 2):
        path.mkdir()
        (path / "file").write_text(str(number))
        assert work_dir.move_aside(path) == tmp_path / f"run.{number}"
    assert not path.exists()
    assert [(tmp_path / f"run.{n}" / "file").read_text() for n in (1, 2)] == ["1", "2"]


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        ([], "resume with: python -m mjax.train --work-dir runs/x"),
        (
            ["--work-dir", "old", "--data.path", "my corpus", "--restart-from-scratch"],
            "resume with: python -m mjax.train --work-dir runs/x",
        ),
        (
            ["--distributed.process_id=1", "--distributed.num-processes", "2"],
            "resume with (add the --distributed.process-id of each process): "
            "python -m mjax.train --work-dir runs/x --distributed.num-processes 2",
        ),
        (
            ["--distributed.process-id", "0", "--steps", "5"],
            "resume with (add the --distributed.process-id of each process): "
            "python -m mjax.train --work-dir runs/x",
        ),
    ],
)
def test_the_work_dir_alone_resumes_a_run_of_one_process(argv, command):
    path = work_dir.Path("runs/x")
    assert work_dir.resume_command(argv, path, is_launched=False) == command


@pytest.mark.parametrize(
    ("typed", "program"),
    [
        (["python", "/usr/bin/mjax", "train"], "mjax train"),
        (["python", "-m", "mjax.train"], "python -m mjax.train"),
    ],
)
def test_the_resume_command_begins_as_the_program_was_typed(
    monkeypatch, typed, program
):
    monkeypatch.setattr(work_dir.sys, "orig_argv", typed)
    said = work_dir.resume_command([], work_dir.Path("a b"), is_launched=False)
    assert said == f"resume with: {program} --work-dir 'a b'"


def test_a_launched_run_is_resumed_by_its_launch():
    path = work_dir.Path("runs/x")
    command = work_dir.resume_command(["--steps", "5"], path, is_launched=True)
    assert command == (
        "resumed by the launch; after its end, repeat the command of the launch "
        "(python -m mjax.launch)"
    )


TOKENIZER = {"tokenizer.json": b"{}", "tokenizer_config.json": b'{"a": 1}'}


def test_the_tokenizer_is_written_once_and_then_left_alone(tmp_path):
    work_dir.keep_tokenizer(tmp_path, TOKENIZER)
    folder = tmp_path / "tokenizer"
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == TOKENIZER
    (folder / "tokenizer_config.json").write_text("changed by its owner")
    (folder / "chat_template.jinja").write_text("added by its owner")
    work_dir.keep_tokenizer(tmp_path, TOKENIZER)
    assert (folder / "tokenizer_config.json").read_text() == "changed by its owner"
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer"]


@pytest.mark.parametrize("found", ["another", "absent"])
def test_another_tokenizer_in_the_work_dir_is_refused(tmp_path, found):
    (tmp_path / "tokenizer").mkdir()
    if found == "another":
        (tmp_path / "tokenizer" / "tokenizer.json").write_text("{ }")
    with pytest.raises(ValueError, match="is not the tokenizer of this run; move"):
        work_dir.keep_tokenizer(tmp_path, TOKENIZER)


def test_a_tokenizer_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="cannot write the work dir"):
        work_dir.keep_tokenizer(tmp_path, TOKENIZER | {"absent/x": b""})
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_of_a_tokenizer_is_removed(tmp_path):
    (tmp_path / ".tokenizer.writing-1234").mkdir()
    work_dir.keep_tokenizer(tmp_path, TOKENIZER)
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer"]
