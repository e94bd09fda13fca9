"""Checkpoints whose object store is in memory."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mjax.ckpt.config import CkptConfig
from mjax.ckpt.manager import Checkpoints
from mjax.ckpt.remote import link, uploader
from tests.stores.memory import MemoryStore

URL = "s3://bucket/run"
Open = Callable[..., Checkpoints]


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """The object store at the URL, as the next run that is opened sees it."""
    store = MemoryStore(URL)
    monkeypatch.setattr(link, "opened", lambda url: store)
    monkeypatch.setattr(uploader, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(uploader, "_LONGEST_PAUSE_S", 0.01)
    return store


@pytest.fixture
def run(tmp_path: Path, objects: MemoryStore) -> Iterator[Open]:
    """Open the checkpoints of a work dir, as a start of the run does."""
    managers: list[Checkpoints] = []

    def open_(
        name: str = "run",
        *,
        generation: int = 0,
        launch: str = "",
        unfit=lambda step, facts: "",
        claims: bool = True,
        **config,
    ) -> Checkpoints:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        settings = CkptConfig(remote=URL, **{"remote_wait_s": 20, **config})
        managers.append(Checkpoints(folder, settings, unfit))
        managers[-1].newest()
        if claims:
            managers[-1].claim(launch, generation)
        return managers[-1]

    yield open_
    for manager in managers:
        manager.close()
