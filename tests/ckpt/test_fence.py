"""Of two starts of a run that live at once the one that came last may save."""

import errno
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest
from etils import epath

from mjax.ckpt.config import CkptConfig
from mjax.ckpt.fence import TakenOverError
from mjax.ckpt.manager import Answer, Checkpoints
from mjax.ckpt.store import Store
from mjax.processes import progress


def save(checkpoints, step, *, is_last=False):
    def state():
        return {"w": jnp.full(4, step, jnp.float32)}

    checkpoints.save(step, state, {}, is_last=is_last)
    checkpoints.wait()
    return checkpoints.attempts()


def test_the_older_start_can_neither_save_nor_delete(tmp_path):
    older = Checkpoints(tmp_path, CkptConfig(keep=1))
    older.claim("", 0)
    assert [attempt.error for attempt in save(older, 1)] == [None]
    newer = Checkpoints(tmp_path, CkptConfig(keep=1))
    newer.claim("", 0)
    unfinished = newer.store.begin(3, 100)  # which the older one would have deleted
    (attempt,) = save(older, 2, is_last=True)  # a further try would wait for a second
    assert attempt.describe().endswith("; it is given up")
    older.close()
    assert newer.store.steps() == [1]
    assert unfinished.exists()
    assert older.is_taken_over
    assert older.ask(3) is older.ask(3, is_last=True) is Answer.HOPELESS
    assert "another start of this run has taken over" in older.why_unsaved(3)
    assert [attempt.error for attempt in save(newer, 4)] == [None]
    newer.close()
    assert newer.store.steps() == [4]


def test_a_commit_that_was_begun_before_is_refused_after(tmp_path):
    older, newer = Store(tmp_path), Store(tmp_path)
    older.fence.claim("", 0)
    folder = older.begin(1, 100)
    newer.fence.claim("", 0)
    with pytest.raises(TakenOverError, match=rf"process {os.getpid()} on "):
        older.commit(folder, 1)
    assert older.steps() == []


def test_an_order_that_came_late_starts_nothing(tmp_path):
    newer, late, other = Store(tmp_path), Store(tmp_path), Store(tmp_path)
    newer.fence.claim("launch", 4)
    with pytest.raises(TakenOverError):
        late.fence.claim("launch", 3)
    newer.fence.check()
    other.fence.claim("another launch", 1)  # the journal was moved away
    with pytest.raises(TakenOverError):
        newer.fence.check()


def test_a_store_that_cannot_be_written_is_refused_and_stays_as_it_is(
    tmp_path, monkeypatch
):
    """A quota may let a file begin and refuse its bytes."""
    Store(tmp_path / "checkpoints").fence.claim("", 0)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}

    def full(path, text):
        pathlib.Path(path).touch()
        raise OSError(errno.EDQUOT, "Disk quota exceeded", str(path))

    checkpoints = Checkpoints(tmp_path, CkptConfig())
    monkeypatch.setattr(type(epath.Path(tmp_path)), "write_text", full)
    with pytest.raises(RuntimeError, match=r"cannot write to .*or give another --ckpt"):
        checkpoints.claim("", 0)
    checkpoints.close()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json*")} == before


@pytest.mark.parametrize("content", [None, "", "[]", '{"owner": 3}'])
def test_a_folder_without_an_owner_is_anyones(tmp_path, content):
    store = Store(tmp_path)
    store.fence.check()
    store.fence.claim("", 0)
    (tmp_path / "owner.json").unlink()
    if content is not None:
        (tmp_path / "owner.json").write_text(content)
    store.fence.check()
    Store(tmp_path).fence.claim("", 0)


def test_the_trainer_claims_its_store_at_the_start(tmp_path):
    Store(tmp_path / "checkpoints").fence.claim("launch", 4)
    words = ["--recipe", "debug", "--data.path", "synthetic", "--steps", "4"]
    names = {progress.LAUNCH_VARIABLE: "launch", progress.GENERATION_VARIABLE: "3"}
    late = subprocess.run(
        [sys.executable, "-m", "mjax.train", *words, "--work-dir", str(tmp_path)],
        env={**os.environ, **names},
        capture_output=True,
        text=True,
    )
    assert late.returncode == 1, late.stdout + late.stderr
    assert "error: another start of this run has taken over" in late.stderr
    assert "Traceback" not in late.stderr
