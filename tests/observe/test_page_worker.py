"""A report is computed once, however many viewers ask for it."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mjax.observe.page import worker
from mjax.observe.page.worker import Worker


@pytest.fixture
def one() -> Iterator[Worker]:
    made = Worker("test")
    yield made
    made.close()


class Counted:
    """Counts its calls; waits for a permit if there is one to wait for."""

    def __init__(self, permit: threading.Event | None = None) -> None:
        self.calls, self.permit = 0, permit

    def __call__(self) -> int:
        self.calls += 1
        if self.permit is not None:
            assert self.permit.wait(10)
        return self.calls


def ask(one: Worker, count, version=0, key: Any = "k", wait_s=10.0):
    return one.get(key, version, count, wait_s=wait_s)


def test_viewers_that_ask_at_the_same_time_share_an_answer(one):
    permit = threading.Event()
    count = Counted(permit)

    async def viewers():
        asked = [asyncio.ensure_future(ask(one, count)) for _ in range(20)]
        await asyncio.sleep(0)
        permit.set()
        return await asyncio.gather(*asked)

    assert asyncio.run(viewers()) == [1] * 20
    assert count.calls == 1


def test_an_answer_holds_until_the_run_has_moved_on(one, monkeypatch):
    monkeypatch.setattr(worker, "_LEAST_S", 0.0)
    monkeypatch.setattr(worker, "_SHARE", 0.0)
    count = Counted()

    async def viewer():
        return [await ask(one, count, version) for version in (1, 1, 2, 2)]

    assert asyncio.run(viewer()) == [1, 1, 2, 2]


def test_a_run_that_moves_on_all_the_time_does_not_make_all_the_work(one):
    count = Counted()

    async def viewer():
        return [await ask(one, count, version) for version in range(10)]

    assert asyncio.run(viewer()) == [1] * 10


def test_a_viewer_does_not_wait_for_ever_and_gets_the_older_answer(one, monkeypatch):
    monkeypatch.setattr(worker, "_LEAST_S", 0.0)
    monkeypatch.setattr(worker, "_SHARE", 0.0)
    permit = threading.Event()
    count = Counted(permit)

    async def viewer():
        first = await ask(one, count, 1, wait_s=0.01)
        permit.set()
        second = await ask(one, count, 1)
        permit.clear()
        third = await ask(one, count, 2, wait_s=0.01)
        permit.set()
        return first, second, third

    assert asyncio.run(viewer()) == (None, 1, 1)


def test_an_error_reaches_all_who_wait_and_is_not_made_again_at_once(one):
    calls = []

    def fail():
        calls.append(1)
        raise KeyError("x")

    async def viewers():
        return await asyncio.gather(
            *(ask(one, fail) for _ in range(3)), return_exceptions=True
        )

    found = asyncio.run(viewers())
    assert [type(each) for each in found] == [KeyError] * 3
    assert asyncio.run(viewers())[0] is found[0]
    assert len(calls) == 1


def test_answers_under_other_keys_are_forgotten_in_the_end(one, monkeypatch):
    monkeypatch.setattr(worker, "_MOST_HELD", 4)
    count = Counted()

    async def viewer():
        return [await ask(one, count, 0, key=key) for key in (0, 1, 2, 3, 4, 5, 0)]

    assert asyncio.run(viewer()) == [1, 2, 3, 4, 5, 6, 7]
    assert len(one._held) <= 4
