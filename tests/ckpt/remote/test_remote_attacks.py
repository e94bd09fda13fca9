"""Disks and stores that fail while a step is fetched."""

import errno
import os
from pathlib import Path

import pytest

from mjax.ckpt.manager import Checkpoints
from mjax.ckpt.remote import transfer
from mjax.ckpt.remote.steps import RemoteSteps
from tests.ckpt.remote.conftest import URL, Open
from tests.ckpt.remote.test_remote import commits, save, state, without_work_dir
from tests.ckpt.states import abstract, assert_same
from tests.stores.memory import MemoryStore


def restore(manager: Checkpoints) -> None:
    restored = manager.restore(abstract(state(2)))
    assert restored is not None
    assert restored.step == 2
    assert_same(restored.state, state(2))


def test_a_disk_that_fills_up_during_a_fetch_is_named(
    run: Open, objects: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save(run(), 1, 2)
    without_work_dir(tmp_path)
    manager = run(claims=False)
    copy = transfer._copy

    def fill(remote, name: str, target: Path | None):
        if "/state/" in name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return copy(remote, name, target)

    with monkeypatch.context() as patched:
        patched.setattr(transfer, "_copy", fill)
        with pytest.raises(
            RuntimeError,
            match=rf"step 2 of {URL} cannot be fetched: cannot write {tmp_path}/run/"
            r"checkpoints/.*: No space left on device; make room in .*, "
            r"or give another --ckpt\.dir$",
        ):
            manager.restore(abstract(state(2)))
    assert [*(tmp_path / "run" / "checkpoints").iterdir()] == []
    restore(manager)


def test_a_fetch_that_is_killed_leaves_no_step(run: Open, tmp_path: Path, monkeypatch):
    save(run(), 1, 2)
    without_work_dir(tmp_path)
    manager = run(claims=False)
    with monkeypatch.context() as patched:
        patched.setattr(transfer, "check", interrupt)
        with pytest.raises(KeyboardInterrupt):
            manager.restore(abstract(state(2)))
    assert manager.store.steps() == []
    assert manager.store.unfinished() != []
    again = run(claims=False)
    restore(again)
    assert again.store.unfinished() == []


def interrupt(*args) -> None:
    raise KeyboardInterrupt


def test_too_few_bytes_of_a_whole_object_are_not_damage(
    run: Open, objects: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save(run(), 1, 2)
    without_work_dir(tmp_path)
    manager = run(claims=False)
    read = MemoryStore.read

    def cut(self, name, start=0, stop=None, **version) -> bytes:
        return read(self, name, start, stop, **version)[: -1 if stop else None]

    with monkeypatch.context() as patched:
        patched.setattr(MemoryStore, "read", cut)
        with pytest.raises(RuntimeError, match=r"the store sent \d+ bytes for bytes 0"):
            manager.restore(abstract(state(2)))
    restore(manager)
    manager.claim("", 0)
    assert commits(objects) == [1, 2]
    assert RemoteSteps(objects).aside() == {}
