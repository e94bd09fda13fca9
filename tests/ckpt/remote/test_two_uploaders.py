"""Uploads of two processes, as two threads with one key-value store."""

import collections
import time
from pathlib import Path

import pytest

from mjax.ckpt.config import Retention
from mjax.ckpt.manifest import DamagedError
from mjax.ckpt.remote import local_check, uploader
from mjax.ckpt.remote.fence import RemoteFence
from mjax.ckpt.remote.steps import RemoteSteps
from mjax.ckpt.remote.uploader import Uploader
from mjax.ckpt.store import Store
from mjax.processes import agreement, distributed
from mjax.stores.objects import UnavailableError
from tests.ckpt.test_saving import job, writers
from tests.stores.memory import MemoryStore

__all__ = ["writers"]


@pytest.fixture
def stores(writers, monkeypatch) -> list[MemoryStore]:
    """The object store as both processes see it, and a step of both in the folder."""
    monkeypatch.setattr(uploader, "_FIRST_PAUSE_S", 0.01)
    for rank in (0, 1):
        writers[rank].submit(job(rank))
    assert all(writer.wait(60.0) for writer in writers)
    first = MemoryStore()
    return [first, first.other()]


@pytest.fixture
def start(stores, tmp_path: Path, monkeypatch, request):
    """Start the uploaders of both processes."""
    made: list[Uploader] = []

    def start_() -> list[Uploader]:
        for rank in (0, 1):
            with monkeypatch.context() as patched:
                patched.setattr(distributed, "rank", lambda rank=rank: rank)
                patched.setattr(distributed, "num_processes", lambda: 2)
                patched.setattr(agreement, "_opened", collections.Counter())
                one = agreement.Agreement(f"{request.node.name}-uploads", timeout_s=60)
            fence = RemoteFence(stores[rank])

            def claim(fence=fence) -> None:
                fence.claim("", 0)

            made.append(
                Uploader(
                    Store(tmp_path),
                    RemoteSteps(stores[rank]),
                    fence,
                    Retention(),
                    one,
                    refused=set,
                    claim=claim,
                )
            )
        return made

    yield start_
    for one in made:
        one.close()
        one.check()


def uploaded(store: MemoryStore) -> set[str]:
    return {name.split("/", 3)[3] for how, name in store.calls if how == "upload"}


def test_each_process_uploads_its_own_files(start, stores, tmp_path):
    first, second = start()
    assert first.wait(60)
    own = uploaded(stores[1])
    assert "pieces.1.json" in own
    assert all("process_1/" in name for name in own - {"pieces.1.json"})
    assert len(own) > 1
    assert {"checkpoint.json", "pieces.0.json"} <= uploaded(stores[0])
    assert not own & uploaded(stores[0])
    commit = RemoteSteps(stores[0]).commit(7)
    folder = Path(Store(tmp_path).path(7))
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert {*commit.files} == files == own | uploaded(stores[0])
    assert second.uploads.empty()


def test_a_step_whose_part_one_process_finds_damaged_is_not_committed(
    start, stores, tmp_path, monkeypatch
):
    checked: list[int] = []
    check = local_check.check

    def find_damage(path, save_id, rank, num) -> None:
        checked.append(rank)
        check(path, save_id, rank, num)
        if rank == 1:
            raise DamagedError("7/state differs")

    monkeypatch.setattr(local_check, "check", find_damage)
    first, _ = start()
    assert first.wait(60)
    assert sorted(checked) == [0, 1]
    told = first.uploads.get_nowait()
    assert told.error == f"{tmp_path}/7 is damaged: process 1: 7/state differs"
    assert not told.is_tried_again
    assert first.uploads.empty()
    assert uploaded(stores[1]) == set()
    assert RemoteSteps(stores[0]).steps() == []


def test_a_process_that_cannot_upload_is_named_and_waited_for(start, stores):
    def fail(method: str, name: str) -> None:
        if method == "upload":
            raise UnavailableError("no route to host")

    stores[1].before = fail
    first, _ = start()
    while first.uploads.empty():
        time.sleep(0.001)
    assert first.uploads.get_nowait().error == "process 1: no route to host"
    assert RemoteSteps(stores[0]).steps() == []
    stores[1].before = lambda method, name: None
    assert first.wait(60)
    done = first.uploads.get_nowait()
    assert (done.error, done.tries > 1) == (None, True)
    assert RemoteSteps(stores[0]).steps() == [7]
