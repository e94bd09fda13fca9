"""How a run waits at its end: within its limits, and all processes together."""

import collections
import concurrent.futures
import itertools
import threading
from collections.abc import Callable

import pytest

from mjax.ckpt.remote import waiting
from mjax.ckpt.remote.uploader import Uploader
from mjax.processes import agreement, distributed
from mjax.processes.agreement import Agreement
from tests.ckpt.remote.conftest import URL, Open
from tests.ckpt.remote.test_remote import away, commits, save, state
from tests.ckpt.remote.test_two_uploaders import start, stores
from tests.ckpt.states import saved
from tests.ckpt.test_saving import writers
from tests.stores.memory import MemoryStore

__all__ = ["start", "stores", "writers"]

Wait = Callable[..., str]


@pytest.fixture
def both(monkeypatch, request) -> list[Agreement]:
    """The agreements of the training threads of two processes."""
    monkeypatch.setattr(waiting, "_ROUND_S", 0.01)
    made = []
    for rank in (0, 1):
        with monkeypatch.context() as patched:
            patched.setattr(distributed, "rank", lambda rank=rank: rank)
            patched.setattr(distributed, "num_processes", lambda: 2)
            patched.setattr(agreement, "_opened", collections.Counter())
            made.append(Agreement(f"{request.node.name}-ends", timeout_s=60))
    return made


def wait(
    uploader: Uploader,
    one: Agreement,
    *,
    stopped_s=lambda: None,
    wait_s=300,
    stop_wait_s=20,
) -> str:
    return waiting.wait_for_uploads(
        uploader,
        one,
        wait_s=wait_s,
        stop_wait_s=stop_wait_s,
        stopped_s=stopped_s,
        missing=lambda why: f"missing {why}" if why else "",
    )


def wait_on_both(uploaders, both, **limits) -> list[str]:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pairs = zip(uploaders, both, strict=True)
        return [*pool.map(lambda pair: wait(*pair, **limits), pairs)]


def hang(stores: list[MemoryStore]) -> threading.Event:
    goes_on = threading.Event()

    def hold(method: str, name: str) -> None:
        assert method != "upload" or goes_on.wait(60)

    stores[1].before = hold
    return goes_on


def test_no_process_leaves_before_the_upload_of_all_has_ended(start, stores, both):
    goes_on = hang(stores)
    rounds = itertools.count()

    def stopped_s() -> None:
        if next(rounds) == 8:  # several rounds of both processes
            goes_on.set()

    assert wait_on_both(start(), both, stopped_s=stopped_s) == ["", ""]
    assert [name for name in stores[0].kept if name.startswith("commits")] != []


def test_all_processes_stop_to_wait_at_the_limit_of_process_0(start, stores, both):
    goes_on = hang(stores)
    uploaders = start()
    found = wait_on_both(uploaders, both, wait_s=0)
    assert found == ["missing after 0 s (--ckpt.remote-wait-s)"] * 2
    goes_on.set()


def test_a_stop_during_the_wait_shortens_it_for_all(start, stores, both):
    goes_on = hang(stores)
    rounds = itertools.count()
    found = wait_on_both(
        start(), both, stopped_s=lambda: 20.0 if next(rounds) > 4 else None
    )
    assert found == ["missing 20 s after the stop (--ckpt.remote-stop-wait-s)"] * 2
    goes_on.set()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_does_not_come_is_named_and_not_waited_for(
    start, both, monkeypatch, rank: int
):
    monkeypatch.setattr(waiting, "_ANSWER_S", 0.05)
    monkeypatch.setattr(agreement, "_MARGIN_S", 0.05)
    found = wait(start()[rank], both[rank])
    assert f"missing process {1 - rank} did not answer" in found


def test_a_thread_that_has_died_on_another_process_is_named(start, stores, both):
    def die(method: str, name: str) -> None:
        if method == "upload":
            raise SystemExit("a bug")

    stores[1].before = die
    first, second = start()
    found = wait_on_both((first, second), both)
    assert (
        found
        == ["missing the upload thread of process 1 has died: SystemExit('a bug')"] * 2
    )
    second._failure = None  # which the fixture would raise


def test_what_a_stop_leaves_behind_is_told_and_uploaded_by_the_next_start(
    run: Open, objects: MemoryStore
):
    manager = run()
    save(manager, 1)
    objects.before = away
    for step in (2, 3):
        saved(manager, state(step), step)
        manager.attempts()
    told = manager.finish_uploads(lambda: 25.0)
    assert told.startswith(
        f"checkpoints 2, 3 are not in {URL}, 20 s after the stop "
        "(--ckpt.remote-stop-wait-s): cannot "
    )
    assert told.endswith(
        f"They are in {manager.store.directory}; the same command uploads them"
    )
    manager.close()
    objects.before = lambda method, name: None
    assert run().finish_uploads() == ""
    assert commits(objects) == [1, 2, 3]
