"""Answers over HTTP: their format, and equality with the engine's."""

import json
from collections.abc import Iterator

import pytest

from mjax.data.tokenizers import BytesTokenizer
from mjax.generate.requests import Event, Request, Sampling
from mjax.generate.server.answers import Writer
from mjax.generate.server.limits import Limits
from mjax.generate.server.prompts import Job
from tests.generate.server.fake_engine import FakeEngine, whole_text
from tests.generate.server.running import NAME, Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeEngine(slots=4, max_len=64), Limits(max_tokens=40)) as found:
        yield found


def expected(
    prompt: str, seed: int, max_tokens: int, stop: tuple[str, ...] = ()
) -> str:
    sampling = Sampling(max_tokens=max_tokens, seed=seed, stop=stop)
    return whole_text(Request(prompt=tuple(prompt.encode()), sampling=sampling))


def test_a_completion_has_the_text_of_the_engine(server):
    answer = server.complete(seed=7, max_tokens=9)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    found = answer.json
    assert found.pop("id").startswith("cmpl-")
    assert found.pop("created") > 1_700_000_000
    assert found == {
        "object": "text_completion",
        "model": NAME,
        "choices": [
            {
                "index": 0,
                "text": expected("ab", 7, 9),
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11},
    }


def test_a_completion_has_sixteen_tokens_if_the_client_names_no_number(server):
    assert server.complete(seed=1).json["usage"]["completion_tokens"] == 16


def test_a_chat_may_be_as_long_as_the_server_allows(server):
    found = server.chat(seed=1).json
    assert found["usage"]["completion_tokens"] == 40
    prompt = "user: " + "x" * 32 + "\n"
    message = {"role": "user", "content": "x" * 32}
    found = server.chat(messages=[message], seed=1).json
    assert found["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 64 - len(prompt),
        "total_tokens": 64,
    }


def test_a_chat_has_the_prompt_of_the_template(server):
    found = server.chat(seed=3, max_tokens=6).json
    assert found["object"] == "chat.completion"
    assert found["id"].startswith("chatcmpl-")
    (choice,) = found["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": expected("user: hi\n", 3, 6)},
        "logprobs": None,
        "finish_reason": "length",
    }


def test_choices_are_in_the_order_of_prompts_and_differ_by_seed(server):
    found = server.complete(prompt=["ab", [99]], n=2, seed=5, max_tokens=8).json
    assert [(c["index"], c["text"]) for c in found["choices"]] == [
        (0, expected("ab", 5, 8)),
        (1, expected("ab", 6, 8)),
        (2, expected("c", 7, 8)),
        (3, expected("c", 8, 8)),
    ]
    assert found["usage"]["prompt_tokens"] == 3
    assert found["usage"]["completion_tokens"] == 32


def test_equal_prompts_of_a_request_have_different_answers(server):
    found = server.complete(prompt=["ab"] * 4, n=2, seed=5, max_tokens=8).json
    assert len({choice["text"] for choice in found["choices"]}) == 8


def test_without_a_seed_two_answers_differ(server):
    texts = {server.complete().json["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 3


def test_a_text_begins_with_the_start_tokens_of_the_model():
    with running(encode_text=lambda text: [256, *text.encode()]) as server:
        found = server.complete(prompt=["ab", ""], echo=True, seed=5, max_tokens=4).json
    texts = [
        before + whole_text(Request(prompt=prompt, sampling=sampling))
        for before, prompt, sampling in (
            ("ab", (256, *b"ab"), Sampling(max_tokens=4, seed=5)),
            ("", (256,), Sampling(max_tokens=4, seed=6)),
        )
    ]
    assert [choice["text"] for choice in found["choices"]] == texts
    assert found["usage"]["prompt_tokens"] == 4


def test_seeds_of_64_bits_are_accepted(server):
    text = server.complete(seed=-1).json["choices"][0]["text"]
    assert text == expected("ab", 2**32 - 1, 16)


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(server):
    stop = expected("ab", 7, 9)[4]
    (choice,) = server.complete(seed=7, max_tokens=9, stop=[stop]).json["choices"]
    assert choice["text"] == expected("ab", 7, 9, (stop,))
    assert choice["finish_reason"] == "stop"
    assert stop not in choice["text"]


def test_echo_puts_the_prompt_in_front(server):
    found = server.complete(prompt=["ab", [99]], echo=True, seed=5, max_tokens=4).json
    texts = [choice["text"] for choice in found["choices"]]
    assert texts == ["ab" + expected("ab", 5, 4), "c" + expected("c", 6, 4)]
    streamed = server.complete(
        prompt=["ab", [99]], echo=True, seed=5, max_tokens=4, stream=True
    )
    assert join(streamed.events) == dict(enumerate(texts))


def join(events: list) -> dict[int, str]:
    """Join the pieces of a stream by choice."""
    assert events.pop() == "[DONE]"
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            piece = choice.get("text")
            piece = choice["delta"].get("content", "") if piece is None else piece
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


def test_a_stream_has_the_same_text_as_the_whole_answer(server):
    asked = {"prompt": ["ab", "xyz"], "n": 2, "seed": 5, "max_tokens": 12}
    whole = server.complete(**asked).json
    answer = server.complete(**asked, stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.events
    assert join(events) == {c["index"]: c["text"] for c in whole["choices"]}
    ends = [c["finish_reason"] for e in events for c in e["choices"]]
    assert sorted(end for end in ends if end) == ["length"] * 4
    assert len({event["id"] for event in events}) == 1
    assert all("usage" not in event for event in events)


def test_a_streamed_chat_begins_with_the_role_of_each_choice(server):
    events = server.chat(n=2, seed=5, max_tokens=3, stream=True).events
    for index in (0, 1):
        assert events[index]["object"] == "chat.completion.chunk"
        (choice,) = events[index]["choices"]
        assert choice["delta"] == {"role": "assistant", "content": ""}
        assert choice["index"] == index
    texts = join(events)
    assert texts == {i: expected("user: hi\n", 5 + i, 3) for i in (0, 1)}
    deltas = [c["delta"] for e in events[2:] for c in e["choices"]]
    assert all("role" not in delta for delta in deltas)


def test_a_stream_counts_its_tokens_if_it_is_asked_to(server):
    events = server.chat(
        seed=5, max_tokens=3, stream=True, stream_options={"include_usage": True}
    ).events
    *chunks, last, end = events
    assert end == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "total_tokens": 12,
    }


def test_tokens_of_a_completion_are_listed_with_their_log_probabilities(server):
    (choice,) = server.complete(seed=7, max_tokens=3, logprobs=2).json["choices"]
    text = choice["text"]
    assert choice["logprobs"] == {
        "tokens": list(text),
        "token_logprobs": [-1.0] * 3,
        "top_logprobs": [{c: -1.0, chr(ord(c) + 1): -2.0} for c in text],
        "text_offset": [0, 1, 2],
    }
    streamed = server.complete(seed=7, max_tokens=3, logprobs=2, stream=True).events
    offsets = [
        offset
        for event in streamed[:-1]
        for offset in event["choices"][0]["logprobs"]["text_offset"]
    ]
    assert offsets == [0, 1, 2]


def test_tokens_of_a_chat_are_listed_with_bytes_and_alternatives(server):
    asked = {"seed": 7, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    (choice,) = server.chat(**asked).json["choices"]
    text = choice["message"]["content"]
    listed = [{"token": c, "logprob": -1.0, "bytes": [ord(c)]} for c in text]
    wanted = [entry | {"top_logprobs": [entry]} for entry in listed]
    assert choice["logprobs"] == {"content": wanted}
    streamed = server.chat(**asked, stream=True).events[:-1]
    found = [c["logprobs"] for e in streamed for c in e["choices"] if c["logprobs"]]
    assert [entry for each in found for entry in each["content"]] == wanted


def test_parts_of_characters_and_impossible_tokens_have_log_probabilities_too():
    event = Event(
        request_id=1,
        token=200,
        text="",
        logprob=float("-inf"),
        top=((200, float("-inf")), (65, -0.5)),
        finished="length",
    )
    request = Request(prompt=(1,), sampling=Sampling(max_tokens=1, logprobs=2))
    job = Job(requests=(request,), echoes=("",), num_prompt_tokens=1)

    def written(kind):
        writer = Writer(
            kind,
            job,
            model=NAME,
            decode=lambda token: "A" if token == 65 else f"token_id:{token}",
            with_logprobs=True,
            include_usage=False,
        )
        writer.add([(0, event)])
        (choice,) = json.loads(writer.whole())["choices"]
        return choice["logprobs"]

    assert written("chat")["content"] == [
        {
            "token": "token_id:200",
            "logprob": -9999.0,
            "bytes": None,
            "top_logprobs": [
                {"token": "token_id:200", "logprob": -9999.0, "bytes": None},
                {"token": "A", "logprob": -0.5, "bytes": [65]},
            ],
        }
    ]
    assert written("completion")["top_logprobs"] == [
        {"token_id:200": -9999.0, "A": -0.5}
    ]


def test_pieces_of_one_read_are_one_chunk_per_choice():
    requests = tuple(
        Request(prompt=(1,), sampling=Sampling(max_tokens=2)) for _ in range(2)
    )
    job = Job(requests=requests, echoes=("", ""), num_prompt_tokens=1)
    writer = Writer(
        "completion",
        job,
        model=NAME,
        decode=str,
        with_logprobs=False,
        include_usage=False,
    )

    def event(index, text, finished=None):
        found = Event(
            request_id=index,
            token=5,
            text=text,
            logprob=None,
            top=(),
            finished=finished,
        )
        return index, found

    events = [event(1, "a"), event(0, ""), event(1, "b", "length")]
    (chunk,) = writer.pieces(events).decode().strip().split("\n\n")
    (choice,) = json.loads(chunk.removeprefix("data: "))["choices"]
    assert (choice["index"], choice["text"]) == (1, "ab")
    assert choice["finish_reason"] == "length"
    assert writer.num_tokens == 3


def test_the_model_is_listed(server):
    found = server.ask("/v1/models").json
    model = {
        "id": NAME,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "mjax",
        "max_model_len": 64,
    }
    assert found == {"object": "list", "data": [model]}
    assert server.ask(f"/v1/models/{NAME}").json == model


def test_another_model_is_not_found(server):
    for answer in (
        server.complete(model="gpt-5"),
        server.chat(model="gpt-5"),
        server.ask("/v1/models/gpt-5"),
    ):
        assert answer.status == 404
        assert answer.error["code"] == "model_not_found"
        assert answer.error["message"] == (
            "the model 'gpt-5' is not served here; this server has 'tiny'"
        )


def test_a_request_that_names_no_model_gets_the_one_that_is_there(server):
    assert server.complete(model=None).json["model"] == NAME


def test_a_path_or_a_method_that_does_not_exist_is_told(server):
    answer = server.ask("/v1/embeddings", {"input": "a"})
    assert (answer.status, answer.error["code"]) == (404, "unknown_url")
    answer = server.ask("/v1/completions")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert "use POST" in answer.error["message"]


def test_a_prompt_longer_than_the_model_is_refused_with_both_lengths(server):
    answer = server.complete(prompt="x" * 64)
    assert answer.status == 400
    assert answer.error == {
        "message": "the prompt has 64 tokens, and prompt and answer together may have "
        "64 (--max-len of this server); shorten the prompt",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "context_length_exceeded",
    }


def test_more_tokens_than_fit_are_refused_with_what_fits(server):
    answer = server.complete(prompt="x" * 60, max_tokens=5)
    assert answer.status == 400
    assert answer.error["message"] == (
        "max_tokens must be at most 4 after a prompt of 60 tokens (--max-len 64 of "
        "this server), got 5"
    )
    assert server.complete(prompt="x" * 60, max_tokens=4).status == 200
    assert server.complete(prompt="x" * 60).json["usage"]["completion_tokens"] == 4


def test_more_tokens_than_the_server_allows_are_refused(server):
    for answer in (server.complete(max_tokens=41), server.chat(max_tokens=41)):
        assert answer.status == 400
        assert answer.error["message"] == (
            "max_tokens must be at most 40 (--max-tokens of this server), got 41"
        )
    answer = server.complete(max_tokens=10**80)
    assert answer.error["message"].endswith("got a number of more than 60 digits")


@pytest.mark.parametrize("token", [257, 2**40, 10**30])
def test_a_token_that_the_model_has_not_is_refused(server, token):
    answer = server.complete(prompt=[1, token])
    assert answer.status == 400
    assert "token ids must be below 257" in answer.error["message"]


@pytest.mark.parametrize("prompt", ["", ["a", ""]])
def test_an_empty_prompt_is_refused(server, prompt):
    answer = server.complete(prompt=prompt)
    assert answer.status == 400
    assert "the prompt must have at least one token" in answer.error["message"]


def test_more_answers_than_ever_fit_are_refused(server):
    answer = server.complete(prompt=["a"] * 23, n=3)
    assert answer.status == 400
    assert answer.error["message"] == (
        "n times the number of prompts must be at most 68 (--slots plus --queue of "
        "this server), got 69; send several requests"
    )


class Small(BytesTokenizer):
    """A tokenizer without capital letters."""

    def encode(self, text):
        return super().encode(text.lower())


def test_a_stop_text_that_the_tokenizer_cannot_write_is_refused():
    with running(tokenizer=Small()) as server:
        answer = server.complete(stop=["end", "END"])
        assert (answer.status, answer.error["param"]) == (400, "stop")
        assert answer.error["message"].startswith("stop: 'END' is a text that the tok")
        assert server.complete(stop=["end"]).status == 200


def test_what_the_template_refuses_is_told(server):
    answer = server.chat(messages=[{"role": "user", "content": "refuse me"}])
    assert answer.status == 400
    assert answer.error["message"].endswith("roles must alternate, line 3")


def test_a_chat_with_a_model_without_a_template_is_refused_with_a_remedy():
    with running(encode_chat=None) as server:
        answer = server.chat()
        assert (answer.status, answer.error["code"]) == (400, "no_chat_template")
        assert "send text to /v1/completions" in answer.error["message"]
        assert server.complete().status == 200


def test_errors_of_fields_have_their_status_over_http(server):
    answer = server.complete(temperature=-1)
    assert (answer.status, answer.error["param"]) == (400, "temperature")
    answer = server.chat(tools=[{}])
    assert (answer.status, answer.error["code"]) == (422, "unsupported_parameter")
    answer = server.ask("/v1/completions", b"\xff\xfe")
    assert answer.status == 400
    assert answer.error["message"].startswith("the body must be UTF-8")


def test_counters_say_what_was_answered():
    with running() as server:
        server.complete(max_tokens=5)
        server.complete(max_tokens=3, stream=True)
        server.complete(max_tokens=0)
        server.ask("/secret/path")
        text = server.ask("/metrics")
    assert text.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = text.body.decode().splitlines()
    for line in (
        'mjax_answers_total{path="/v1/completions",status="200"} 2',
        'mjax_answers_total{path="/v1/completions",status="400"} 1',
        'mjax_answers_total{path="other",status="404"} 1',
        "mjax_prompt_tokens_total 4",
        "mjax_generated_tokens_total 8",
        "mjax_open_answers 0",
        "mjax_request_seconds_count 2",
        "mjax_first_token_seconds_count 2",
        'mjax_request_seconds_bucket{le="+Inf"} 2',
    ):
        assert line in lines, text.body.decode()
