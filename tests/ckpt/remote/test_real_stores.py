"""Checkpoints in an S3 server and in a small GCS, through the library that runs use."""

import pytest

from mjax.ckpt.__main__ import main
from mjax.ckpt.config import CkptConfig
from mjax.ckpt.manager import Answer, Checkpoints
from mjax.ckpt.remote import link, uploader
from tests.ckpt.states import abstract, assert_same, make_state, saved, sharding
from tests.stores.servers import gcs_server, gs_url, s3_server, s3_url

__all__ = ["gcs_server", "gs_url", "s3_server", "s3_url"]

pytestmark = pytest.mark.stores
URLS = ["s3_url", "gs_url"]


@pytest.fixture
def open_(tmp_path, monkeypatch):
    monkeypatch.setattr(link, "_PATIENCE_S", 1)
    monkeypatch.setattr(uploader, "_FIRST_PAUSE_S", 0.01)
    made = []

    def open_one(url: str, name: str = "run") -> Checkpoints:
        (tmp_path / name).mkdir()
        config = CkptConfig(remote=url, remote_wait_s=60, remote_keep=2)
        made.append(Checkpoints(tmp_path / name, config))
        made[-1].newest()
        return made[-1]

    yield open_one
    for manager in made:
        manager.close()


def large(step: int):
    """Return a state whose file is uploaded in parts: more than 8 MiB."""
    return make_state(sharding(8, 1), width=1 << 16, step=step)


@pytest.mark.parametrize("name", URLS)
def test_a_step_comes_back_with_the_same_bits(name, open_, request, capsys):
    url = request.getfixturevalue(name)
    manager = open_(url)
    manager.claim("", 0)
    for step in (1, 2, 3):
        saved(manager, large(step), step)
        manager.attempts()
        assert manager.finish_uploads() == ""
        assert [upload.error for upload in manager.uploads()] == [None]
    again = open_(url, "elsewhere")
    restored = again.restore(abstract(large(3)))
    assert restored.step == 3
    assert_same(restored.state, large(3))
    again.claim("", 0)
    assert main(["verify", url]) == 0
    assert capsys.readouterr().out.count("OK, ") == 2
    saved(manager, large(4), 4)
    manager.attempts()
    assert "has taken over" in manager.finish_uploads()
    assert manager.ask(5) is Answer.HOPELESS


@pytest.mark.parametrize("name", URLS)
def test_a_bucket_that_is_absent_is_refused(name, open_, request):
    url = request.getfixturevalue(name).replace("bucket", "absent-bucket")
    with pytest.raises(ValueError, match=r"--ckpt\.remote .* no bucket absent-bucket"):
        open_(url)


def test_a_bucket_that_denies_is_refused(open_, gcs_server, gs_url):
    gcs_server.denied.add("bucket")
    with pytest.raises(ValueError, match="AccessDenied"):
        open_(gs_url)


def test_a_server_that_is_away_is_caught_up_with(open_, s3_server, s3_url, capsys):
    manager = open_(s3_url)
    manager.claim("", 0)
    s3_server.stop()
    saved(manager, large(1), 1)
    manager.attempts()
    while not (told := manager.uploads()):
        pass
    assert "training goes on" in told[0].describe()
    s3_server.start()
    assert manager.finish_uploads() == ""
    assert [upload.error for upload in manager.uploads()] == [None]
    assert main(["verify", s3_url]) == 0
