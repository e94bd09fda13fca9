"""Starts and ends at which the object store and the work dir disagree."""

import threading
import time
from pathlib import Path

import pytest

from mjax.ckpt.recovery import LostError
from mjax.ckpt.remote.steps import RemoteSteps
from mjax.ckpt.remote.uploader import Uploader
from tests.ckpt.remote.conftest import URL, Open
from tests.ckpt.remote.test_remote import (
    away,
    commits,
    save,
    state,
    without_work_dir,
)
from tests.ckpt.states import abstract, saved
from tests.stores.memory import MemoryStore


@pytest.mark.parametrize("file", ["commits/2.json", "checkpoint.json", "pieces.0.json"])
def test_a_run_does_not_begin_anew_if_all_steps_of_the_store_are_damaged(
    run: Open, objects: MemoryStore, tmp_path: Path, file: str
):
    save(run(remote_keep=1), 1, 2)
    objects.damage(next(name for name in objects.kept if name.endswith(file)))
    without_work_dir(tmp_path)
    with pytest.raises(
        LostError, match=rf"step 2 of {URL}: .*(\n.*)*another --ckpt.rem"
    ):
        run(claims=False).restore(abstract(state(2)))
    assert [name for name in objects.kept if name.startswith("aside")] == []


def test_a_run_does_not_begin_anew_if_all_steps_of_the_store_are_unfit(
    run: Open, tmp_path: Path
):
    save(run(), 1, 2)
    without_work_dir(tmp_path)
    with pytest.raises(LostError, match=r"excludes(.*\n)*.*step 2"):
        run(claims=False, unfit=lambda step, facts: "it has read what --skip excludes")


def test_a_step_that_is_saved_while_the_uploader_looks_is_waited_for(
    run: Open, objects: MemoryStore, monkeypatch: pytest.MonkeyPatch
):
    looks: list[int | None] = []
    is_saved, goes_on = threading.Event(), threading.Event()
    look = Uploader._next

    def slow_look(self: Uploader) -> int | None:
        if looks:
            assert goes_on.wait(60)
        looks.append(look(self))
        assert is_saved.wait(60)
        return looks[-1]

    monkeypatch.setattr(Uploader, "_next", slow_look)
    manager = run()
    while not looks:
        time.sleep(0.001)
    saved(manager, state(1), 1)
    manager.attempts()
    is_saved.set()
    threading.Timer(0.3, goes_on.set).start()
    assert manager.finish_uploads() == ""
    assert commits(objects) == [1]
    assert looks == [None, 1, None]


def test_steps_that_a_run_went_back_behind_while_the_store_was_away_are_put_aside(
    run: Open, objects: MemoryStore
):
    first = run()
    save(first, 1, 2, 3)
    first.close()
    objects.before = away
    second = run(claims=False, unfit=lambda step, facts: "unfit" * (step > 1))
    restored = second.restore(abstract(state(1)))
    assert restored is not None
    assert restored.step == 1
    second.claim("", 0)
    objects.before = lambda method, name: None
    save(second, 2)
    assert commits(objects) == [1, 2]
    assert [*RemoteSteps(objects).aside().values()] == ["unfit", "unfit"]


def test_a_run_does_not_restart_from_scratch_if_the_store_is_away(
    run: Open, objects: MemoryStore
):
    save(run(), 1)
    objects.before = away
    with pytest.raises(RuntimeError, match=r"does not answer, .*another --ckpt.remote"):
        run(claims=False).check_nothing_remote()
