"""Steps that are damaged in the work dir before they are uploaded."""

from pathlib import Path

import pytest

from mjax.ckpt.manager import Checkpoints
from mjax.ckpt.manifest import MAIN_FILE
from mjax.ckpt.remote.uploader import Upload
from tests.ckpt.remote.conftest import URL, Open
from tests.ckpt.remote.test_remote import (
    away,
    commits,
    damage_largest_file,
    save,
    state,
)
from tests.ckpt.states import saved
from tests.stores.memory import MemoryStore


def save_damaged(manager: Checkpoints, objects: MemoryStore, step: int, part: str):
    """Save a step while the store is away, and damage it before the store is back."""
    objects.before = away
    saved(manager, state(step), step)
    manager.attempts()
    while not manager.uploads():
        pass
    folder = Path(manager.store.path(step))
    if part == MAIN_FILE:
        (folder / part).write_text("x" + (folder / part).read_text())
    else:
        damage_largest_file(folder / part)
    objects.before = lambda method, name: None


@pytest.mark.parametrize("part", ["state", MAIN_FILE])
def test_a_damaged_step_is_not_uploaded_and_replaces_no_good_one(
    run: Open, objects: MemoryStore, part: str
):
    manager = run(remote_keep=1)
    save(manager, 1)
    before = {name: kept.data for name, kept in objects.kept.items()}
    save_damaged(manager, objects, 2, part)
    missing = manager.finish_uploads()
    assert missing.startswith(f"checkpoint 2 is not in {URL}, it is damaged: ")
    assert "the same command restores the newest intact step" in missing
    (told,) = manager.uploads()
    assert f"{manager.store.path(2)} is damaged: " in told.describe()
    assert told.describe().endswith("training goes on, the steps there stay")
    assert told.metrics == {}
    assert {name: kept.data for name, kept in objects.kept.items()} == before
    (next_,) = save(manager, 3)
    assert (next_.step, next_.error) == (3, None)
    assert commits(objects) == [3]


def test_an_older_step_that_is_damaged_is_left_out(run: Open, objects: MemoryStore):
    manager = run()
    save(manager, 1)
    save_damaged(manager, objects, 2, "state")
    saved(manager, state(3), 3)
    manager.attempts()
    assert manager.finish_uploads() == ""
    told: list[Upload] = manager.uploads()
    assert {upload.step: upload.error is None for upload in told} == {2: False, 3: True}
    assert commits(objects) == [1, 3]
