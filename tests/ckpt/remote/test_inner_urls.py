"""URLs among the objects of another run."""

from pathlib import Path

import pytest

from mjax.ckpt.config import CkptConfig
from mjax.ckpt.manager import Checkpoints
from mjax.ckpt.remote import link
from mjax.ckpt.remote.source import outer_urls
from tests.ckpt.remote.conftest import URL, Open
from tests.ckpt.remote.test_remote import save
from tests.stores.memory import MemoryStore


def test_a_url_inside_that_of_another_run_is_refused(
    run: Open, objects: MemoryStore, tmp_path: Path, monkeypatch
):
    save(run(), 1)
    places = {URL: objects}
    monkeypatch.setattr(
        link, "opened", lambda url: places.setdefault(url, MemoryStore(url))
    )
    (tmp_path / "other").mkdir()
    for inner in ("steps/7", "7", "steps", "aside/x", "commits/7/run"):
        url = f"{URL}/{inner}"
        manager = Checkpoints(tmp_path / "other", CkptConfig(remote=url))
        with pytest.raises(
            ValueError, match=rf"--ckpt\.remote {url} is inside {URL}, which.*outside"
        ):
            manager.newest()
        manager.close()
        assert places[url].kept == {}


def test_only_urls_among_the_objects_of_a_run_are_inside_it():
    assert outer_urls("s3://bucket/runs/a", "") == []
    assert outer_urls("s3://bucket/steps", "") == []
    assert outer_urls("s3://bucket/7/run", "") == []
    assert outer_urls("s3://bucket/a/steps/b/commits/7", "") == [
        "s3://bucket/a",
        "s3://bucket/a/steps/b",
        "s3://bucket/a/steps/b/commits",
    ]
