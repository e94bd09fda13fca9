"""`python -m mjax.ckpt` with the URL of an object store."""

import errno
import json
import os
import shutil

import pytest

from mjax.ckpt.__main__ import main
from mjax.ckpt.remote import listing, transfer
from mjax.ckpt.remote.steps import RemoteSteps
from tests.ckpt.remote.conftest import URL, Open
from tests.ckpt.states import make_state, saved, sharding
from tests.stores.memory import MemoryStore


@pytest.fixture
def steps(run: Open, objects: MemoryStore, monkeypatch) -> MemoryStore:
    """Steps 1 and 2 at the URL, and step 3 put aside."""
    manager = run(keep=3)
    for step in (1, 2, 3):
        saved(manager, make_state(sharding(8, 1), step=step), step, seed=step)
        manager.attempts()
        assert manager.finish_uploads() == ""
    remote = RemoteSteps(objects)
    remote.put_aside(remote.commit(3), "its reason")

    def open_store(place, flag, *, patience_s):
        assert flag == "PATH"
        return objects if place.url == URL else MemoryStore(place.url)

    monkeypatch.setattr(listing, "open_store", open_store)
    return objects


def test_steps_are_listed(steps: MemoryStore, capsys):
    assert main(["ls", URL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["1", "2"]
    assert lines[2].endswith("good")
    assert lines[4].endswith("quarantined: its reason")
    assert main(["ls", f"{URL}/2", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["steps"]
    assert (entry["name"], entry["state"]) == ("2", "good")


def test_a_run_whose_name_is_a_number_is_no_step(
    steps: MemoryStore, capsys, monkeypatch
):
    monkeypatch.setattr(
        listing,
        "open_store",
        lambda place, flag, *, patience_s: (
            MemoryStore(place.url, steps.kept)
            if place.url == f"{URL}/4711"
            else MemoryStore(place.url)
        ),
    )
    assert main(["verify", f"{URL}/4711"]) == 0
    assert capsys.readouterr().out.count("OK, ") == 2
    assert main(["show", f"{URL}/4711", "--step", "1"]) == 0


def test_damage_is_found_and_named(steps: MemoryStore, capsys):
    assert main(["verify", URL]) == 0
    assert capsys.readouterr().out.count("OK, ") == 2
    (name,) = (n for n in steps.kept if n.startswith("steps/2/") and "pieces" in n)
    steps.damage(name)
    assert main(["verify", URL]) == 1
    said = capsys.readouterr().out
    assert said.startswith("1: OK, ")
    assert f"2: damaged: {URL}/{name} differs from what was uploaded (SHA-256)" in said
    steps.damage("commits/1.json")
    assert main(["ls", URL]) == 1
    assert "damaged: " in capsys.readouterr().out


def test_a_step_is_shown(steps: MemoryStore, capsys):
    assert main(["show", URL]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"path {URL}/2\nstep 2\n")
    assert "\nseed 2\n" in said
    assert "checkpoint.json" in said
    assert main(["show", URL, "--step", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == {"seed": 1}


def test_a_step_is_fetched_into_a_folder(steps: MemoryStore, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["fetch", URL, str(out), "--step", "1"]) == 0
    assert "all SHA-256 as uploaded" in capsys.readouterr().out
    assert main(["verify", str(out)]) == 0
    assert main(["fetch", f"{URL}/1", str(out)]) == 2
    assert "exists; give another folder" in capsys.readouterr().err
    shutil.rmtree(out)
    (name,) = (n for n in steps.kept if n.startswith("steps/2/") and "pieces" in n)
    steps.damage(name)
    assert main(["fetch", URL, str(out)]) == 1
    assert name in capsys.readouterr().err
    assert [*out.iterdir()] == []


@pytest.mark.parametrize(
    ("out", "why"), [("file", "File exists"), ("file/out", "Not a directory")]
)
def test_an_out_that_cannot_be_created_is_refused_in_one_line(
    steps: MemoryStore, tmp_path, capsys, out: str, why: str
):
    (tmp_path / "file").touch()
    assert main(["fetch", URL, str(tmp_path / out)]) == 2
    assert capsys.readouterr().err == (
        f"error: OUT must be a folder that can be created and read, got "
        f"{tmp_path / out}: {why}; give another OUT\n"
    )


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "No space left on device; make room in {out}"),
        (errno.EROFS, "Read-only file system; make {out} writable"),
        (errno.EIO, "Input/output error; check the disk of {out}"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(
    steps: MemoryStore, tmp_path, capsys, monkeypatch, code: int, remedy: str
):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(transfer, "_copy", fail)
    out = tmp_path / "out"
    assert main(["fetch", URL, str(out)]) == 2
    says = f"{remedy.format(out=out)}, or give another OUT\n"
    assert capsys.readouterr().err.endswith(says)
    assert [*out.iterdir()] == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["verify", URL, "--step", "9"], "there is no step 9 in"),
        (["show", f"{URL}/9"], "there is no step 9 in"),
        (["show", f"{URL}/1", "--step", "2"], "leave out --step 2"),
        (["ls", "s3://bucket/a//b"], "empty part"),
    ],
)
def test_what_is_not_there_is_refused(steps: MemoryStore, capsys, words, reason):
    assert main(words) == 2
    assert reason in capsys.readouterr().err
