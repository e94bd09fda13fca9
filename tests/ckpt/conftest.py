"""Fixtures: open checkpoints, and writes that a test can block."""

import threading

import pytest

from mjax.ckpt import arrays, saving
from mjax.ckpt.config import CkptConfig
from mjax.ckpt.manager import Checkpoints


@pytest.fixture
def opened(tmp_path):
    managers = []

    def open_(unfit=lambda step, run: "", **config):
        for manager in managers:
            manager.wait()
        managers.append(Checkpoints(tmp_path, CkptConfig(**config), unfit))
        return managers[-1]

    yield open_
    for manager in managers:
        manager.close()


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(saving, "_FIRST_PAUSE_S", 0.002)


@pytest.fixture
def blocked(monkeypatch):
    """Block writes until the event is set."""
    go = threading.Event()
    write_part = arrays.write_part

    def wait_and_write(*args):
        assert go.wait(60)
        write_part(*args)

    monkeypatch.setattr(arrays, "write_part", wait_and_write)
    yield go
    go.set()
