"""After its warm-up the engine compiles nothing, whatever a request asks for."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from mjax.generate.engine import Engine, answer_all
from mjax.generate.requests import MAX_LOGPROBS, Request, Sampling
from mjax.generate.server.serving import warm_up
from tests.generate.models import SMALL, opened

MAX_LEN = 40
OPTIONS: dict[str, tuple[Any, ...]] = {
    "max_tokens": (1, 2, 7),
    "temperature": (0.0, 0.5),
    "top_k": (1, 5, 1 << 20),
    "top_p": (0.3,),
    "seed": (7,),
    "stop": (("a",), ("ab", "c")),
    "logprobs": (0, 3, MAX_LOGPROBS),
}
"""Values of each option besides its default."""


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the compilations during the test."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if "compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("mesh", [(1, 1, 1, 1), (1, 2, 1, 2)], ids=["one", "dp2 tp2"])
def test_no_option_of_a_request_compiles_a_program_after_the_warm_up(mesh, compiled):
    assert OPTIONS.keys() == {field.name for field in dataclasses.fields(Sampling)}
    engine = Engine(opened(SMALL, mesh), slots=4, max_len=MAX_LEN)
    warm_up(engine, MAX_LEN)
    assert compiled
    compiled.clear()
    requests = [
        Request(prompt=(1,) * 3, sampling=Sampling(**{"max_tokens": 4, name: value}))
        for name, values in OPTIONS.items()
        for value in values
    ]
    for request in requests:  # alone, then in company
        answer_all(engine, [request])
    answer_all(engine, requests)
    lengths = [1, 15, 16, 17, 31, 32, 33, MAX_LEN - 1]
    for logprobs in (None, 2):
        sampling = Sampling(max_tokens=1, logprobs=logprobs)
        for length in lengths:
            answer_all(engine, [Request(prompt=(1,) * length, sampling=sampling)])
    assert compiled == []
