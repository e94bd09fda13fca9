"""An S3 server that hangs, stalls, is overloaded or sends too little."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mjax.ckpt.__main__ import main
from mjax.ckpt.config import CkptConfig
from mjax.ckpt.manager import Checkpoints
from mjax.ckpt.remote import link, uploader
from mjax.ckpt.remote.steps import RemoteSteps
from mjax.stores import opened
from tests.ckpt.remote.test_remote import state
from tests.ckpt.states import abstract, assert_same, saved
from tests.processes.test_distributed import clean_environment
from tests.stores.faulty_proxy import FaultyProxy, proxy
from tests.stores.servers import s3_server, s3_url

__all__ = ["proxy", "s3_server", "s3_url"]

pytestmark = pytest.mark.stores
FAULTS = ["hang", "half", "503", "short"]
LIMIT_S = 20


@pytest.fixture
def open_(tmp_path, monkeypatch, proxy, s3_url):
    """Open a work dir; a request is given up after 1 s, and repeated for 0.5 s."""
    monkeypatch.setattr(opened, "_REQUEST_S", 1)
    monkeypatch.setattr(link, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(uploader, "_FIRST_PAUSE_S", 0.01)
    made = []

    def open_one(name: str = "run", **config) -> Checkpoints:
        (tmp_path / name).mkdir(exist_ok=True)
        made.append(Checkpoints(tmp_path / name, CkptConfig(remote=s3_url, **config)))
        made[-1].newest()
        return made[-1]

    yield open_one
    proxy.fault = lambda method, path, number: ""
    proxy.is_over.set()
    for manager in made:
        manager.close()


def upload(manager: Checkpoints, step: int) -> None:
    manager.claim("", 0)
    saved(manager, state(step), step)
    manager.attempts()
    assert manager.finish_uploads() == ""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fetch_ends_with_words_and_loses_nothing(
    fault, open_, proxy: FaultyProxy, s3_url, capsys
):
    upload(open_(), 3)
    again = open_("elsewhere")
    proxy.fault = lambda method, path, number: (
        fault if method == "GET" and "/state/" in path else ""
    )
    with pytest.raises(RuntimeError, match=r"step 3 of .* cannot be fetched: cannot "):
        again.restore(abstract(state(3)))
    proxy.fault = lambda method, path, number: ""
    proxy.is_over.set()
    assert again.store.steps() == again.store.unfinished() == []
    restored = again.restore(abstract(state(3)))
    assert restored is not None
    assert_same(restored.state, state(3))
    again.claim("", 0)
    assert RemoteSteps(link.opened(s3_url)).aside() == {}
    assert main(["verify", s3_url]) == 0
    assert capsys.readouterr().out.count("OK, ") == 1


@pytest.mark.parametrize("fault", ["hang", "half", "503"])
def test_an_upload_goes_on_when_the_server_does(
    fault, open_, proxy: FaultyProxy, s3_url, capsys
):
    manager = open_()
    manager.claim("", 0)
    proxy.fault = lambda method, path, number: fault
    saved(manager, state(3), 3)
    manager.attempts()
    while not (told := manager.uploads()):
        time.sleep(0.01)
    assert "training goes on, the upload is tried again" in told[0].describe()
    assert "(--ckpt.remote-stop-wait-s): cannot " in manager.finish_uploads(
        lambda: 100.0
    )
    proxy.fault = lambda method, path, number: ""
    proxy.is_over.set()
    assert manager.finish_uploads() == ""
    assert main(["verify", s3_url]) == 0


def test_a_server_that_is_overloaded_for_a_moment_is_waited_for(
    open_, proxy: FaultyProxy
):
    proxy.fault = lambda method, path, number: "503" if number % 4 == 1 else ""
    upload(open_(), 3)
    restored = open_("elsewhere").restore(abstract(state(3)))
    assert restored is not None
    assert_same(restored.state, state(3))


def test_a_server_that_hangs_at_the_start_leaves_the_work_dir_to_go_on_from(
    open_, proxy: FaultyProxy, capfd
):
    upload(open_(), 3)
    proxy.fault = lambda method, path, number: "hang"
    with pytest.raises(RuntimeError, match=r"is not known\. Start again when"):
        open_("elsewhere")
    manager = open_()
    assert "the run goes on from the work dir" in capfd.readouterr().err
    restored = manager.restore(abstract(state(3)))
    assert restored is not None
    asked = proxy.num_requests
    manager.claim("", 0)
    assert restored.step == 3
    assert proxy.num_requests <= asked + 1  # by the thread: the start does not wait


FETCH = """
import sys
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 8)
from mjax.ckpt.config import CkptConfig
from mjax.ckpt.manager import Checkpoints
from tests.ckpt.remote.test_remote import state
from tests.ckpt.states import abstract, assert_same

manager = Checkpoints(Path(sys.argv[1]), CkptConfig(remote=sys.argv[2]))
manager.newest()
restored = manager.restore(abstract(state(3)))
assert_same(restored.state, state(3))
print("restored", restored.step)
"""


def test_a_fetch_that_is_killed_is_begun_again(
    open_, proxy: FaultyProxy, s3_url, tmp_path: Path
):
    upload(open_(), 3)
    work_dir = tmp_path / "killed"
    work_dir.mkdir()

    def fetch() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", FETCH, str(work_dir), s3_url],
            env=clean_environment()
            | {"AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"]},
            stdout=subprocess.PIPE,
            text=True,
        )

    proxy.fault = lambda method, path, number: "half" if "/state/d" in path else ""
    with fetch() as process:
        while not [*work_dir.glob("checkpoints/3.unfinished-*/state/d/*")]:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert Checkpoints(work_dir, CkptConfig()).store.steps() == []
    proxy.fault = lambda method, path, number: ""
    proxy.is_over.set()
    said, _ = fetch().communicate(timeout=LIMIT_S)
    assert said == "restored 3\n"
