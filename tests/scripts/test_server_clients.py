"""The clients of the load test see what is equal, different, cut off and lost."""

import asyncio
import collections
import random

import pytest

from mjax.generate.requests import Request, Sampling
from mjax.generate.server.limits import Limits
from scripts.generate import server_clients
from scripts.generate.server_clients import Case, Cut, Seen
from scripts.generate.server_load import Sample, growth
from tests.generate.server.fake_engine import FakeEngine, whole_text
from tests.generate.server.running import running


def case(seed: int, max_tokens: int = 60) -> Case:
    sampling = Sampling(max_tokens=max_tokens, seed=seed)
    text = whole_text(Request(prompt=(97, 98), sampling=sampling))
    body: dict[str, object] = {"prompt": "ab", "seed": seed, "max_tokens": max_tokens}
    return Case(body=body, text=text, num_tokens=max_tokens)


def outcome(given: Case, stream: bool, cut: Cut | None = None, **limits) -> Seen:
    seen = Seen()
    with running(FakeEngine(max_len=100), Limits(**limits)) as server:
        asyncio.run(server_clients.ask(server.port, given, stream, cut, seen))
    return seen


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_compared_with_the_offline_one(stream):
    seen = outcome(case(3), stream)
    assert seen.complete == 1
    assert len(seen.first_s) == stream
    assert len(seen.stream_s if stream else seen.whole_s) == 1
    wrong = Case(body=case(3).body, text=case(4).text, num_tokens=60)
    seen = outcome(wrong, stream)
    assert seen.outcomes == {server_clients.DIFFERENT: 1}
    assert "offline" in seen.wrong[0]


def test_a_stream_that_is_cut_has_begun_like_the_offline_answer():
    assert outcome(case(3), True, Cut(pieces=1)).outcomes == {
        server_clients.CUT_IN_STREAM: 1
    }
    # The first piece may be one letter: the texts must differ in it.
    assert case(3).text[0] != case(5).text[0]
    wrong = Case(body=case(3).body, text=case(5).text, num_tokens=60)
    seen = outcome(wrong, True, Cut(pieces=1))
    assert seen.outcomes == {server_clients.DIFFERENT: 1}


def test_an_answer_that_does_not_come_is_lost_and_a_refusal_is_not():
    seen = outcome(case(3), True, max_tokens=10)  # 400: nothing has been answered
    assert seen.outcomes == {server_clients.LOST: 1}
    engine = FakeEngine(slots=1, max_len=100)
    engine.fails_in = 3
    seen = Seen()
    with running(engine, Limits(queue=0)) as server:
        asyncio.run(server_clients.ask(server.port, case(1), True, None, seen))
    assert seen.outcomes == {server_clients.LOST: 1}
    assert "engine_failed" in seen.wrong[0]


def test_clients_end_when_they_are_told_and_wait_after_a_refusal():
    seen, engine = Seen(), FakeEngine(slots=1, max_len=100)
    cases = [case(seed) for seed in range(5)]

    async def some_load(port: int) -> None:
        end = asyncio.Event()
        clients = [
            server_clients.client(random.Random(i), port, cases, seen, end, cuts=i < 2)
            for i in range(6)
        ]
        tasks = [asyncio.create_task(each) for each in clients]
        while len(seen.outcomes) < 4 or seen.complete < 30:
            await asyncio.sleep(0.01)
        end.set()
        await asyncio.gather(*tasks)

    with running(engine, Limits(queue=2)) as server:
        asyncio.run(asyncio.wait_for(some_load(server.port), 30))
    assert seen.wrong == []
    assert seen.refused > 0
    assert seen.sent == sum(seen.outcomes.values())
    assert isinstance(seen.outcomes, collections.Counter)


def test_growth_of_memory_is_that_of_a_line_after_the_first_tenth():
    def grown(mib) -> float:
        return growth([Sample(cpu_s=float(i), mib=mib(i)) for i in range(101)])

    assert grown(lambda i: 500.0 if i >= 10 else 100.0) == pytest.approx(0.0, abs=1e-9)
    assert grown(lambda i: 500.0 + max(i - 10, 0)) == pytest.approx(90 / 500)
