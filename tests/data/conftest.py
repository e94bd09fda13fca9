import dataclasses
import pathlib
from collections.abc import Iterator

import pytest

from mjax.data import remote
from mjax.data.config import DataConfig
from mjax.data.dataset import Dataset, open_dataset
from mjax.data.mirror import mirror
from tests.data.hub_server import Hub, serving

WORDS = ["alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel"]
WORDS += ["india", "juliett", "kilo", "lima"]


@pytest.fixture
def corpus(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder of 60 small documents."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(60):
        words = [WORDS[(index + k * (index % 7 + 1)) % 12] for k in range(5 + index)]
        (folder / f"{index:02}.txt").write_text(" ".join(words) + "\n")
    return folder


@pytest.fixture
def dataset(corpus: pathlib.Path, tmp_path: pathlib.Path) -> Dataset:
    config = DataConfig(
        path=(str(corpus),),
        seq_len=32,
        held_out_fraction=0.2,
        cache_dir=str(tmp_path / "cache"),
    )
    return open_dataset(config, seed=0)


@pytest.fixture
def hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on this machine, with an empty cache."""
    with serving(tmp_path / "hub", monkeypatch) as server:
        yield server


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of several blocks, and no waits between attempts."""
    original = remote.mirror_config
    monkeypatch.setattr(
        remote,
        "mirror_config",
        lambda *args: dataclasses.replace(original(*args), block_bytes=400),
    )
    monkeypatch.setattr(mirror, "_RETRY_S", (0.0, 0.0, 0.0))
