"""Starts and ends at which the object store and the work dir disagree."""

from pathlib import Path

import pytest

from mjax.ckpt.recovery import LostError
from tests.ckpt.remote.conftest import URL, Open
from tests.ckpt.remote.test_remote import save, state, without_work_dir
from tests.ckpt.states import abstract
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
