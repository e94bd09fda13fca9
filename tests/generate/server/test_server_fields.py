"""Valid requests, and refusals of others by name, value and remedy."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.generate.server import fields, protocol
from mjax.generate.server.errors import ApiError
from tests.generate.server.running import CHAT


def completion(**changes: Any) -> protocol.Completion:
    return protocol.read_completion(json.dumps({"prompt": "ab"} | changes).encode())


def chat(**changes: Any) -> protocol.Chat:
    return protocol.read_chat(json.dumps({"messages": CHAT} | changes).encode())


def refusal(read: Any, **changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**changes)
    return caught.value


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body must be JSON: not JSON"),
        (b"{", "the body must be JSON: not JSON"),
        (b'{"prompt": "a"', "the body must be JSON: not JSON"),
        (b"[]", "the body must be a JSON object, got []"),
        (b'"text"', "the body must be a JSON object, got 'text'"),
        (b'{"prompt": "\xff"}', "the body must be UTF-8, got byte 0xff at offset 12"),
        ("{}".encode("utf-16"), "the body must be UTF-8, got byte 0xff at offset 0"),
        (b"[" * 100_000, "the body must be JSON: nested too deeply"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "the body must be JSON: nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "the body must be JSON: not JSON"),
    ],
)
def test_what_is_no_json_object_is_refused(body, said):
    for read in (protocol.read_completion, protocol.read_chat):
        with pytest.raises(ApiError) as caught:
            read(body)
        assert caught.value.status == 400
        assert caught.value.message.startswith(said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokens": 0}, "max_tokens must be a whole number at least 1, got 0"),
        ({"max_tokens": -5}, "max_tokens must be a whole number at least 1, got -5"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number at least 1, got 1.5"),
        ({"max_tokens": "9"}, "max_tokens must be a whole number at least 1, got '9'"),
        ({"max_tokens": True}, "max_tokens must be a whole number at least 1, got tru"),
        ({"n": 0}, "n must be a whole number from 1 to 128, got 0"),
        ({"n": 129}, "n must be a whole number from 1 to 128, got 129"),
        ({"temperature": -0.1}, "temperature must be a number from 0 to 2, got -0.1"),
        ({"temperature": 2.01}, "temperature must be a number from 0 to 2, got 2.01"),
        (
            {"temperature": float("nan")},
            "temperature must be a number from 0 to 2, got nan",
        ),
        (
            {"temperature": float("inf")},
            "temperature must be a number from 0 to 2, got inf",
        ),
        (
            {"temperature": 10**400},
            "temperature must be a number from 0 to 2, got a number of more than 60",
        ),
        ({"temperature": "1"}, "temperature must be a number from 0 to 2, got '1'"),
        ({"temperature": False}, "temperature must be a number from 0 to 2, got false"),
        ({"top_p": 0}, "top_p must be a number above 0, at most 1, got 0"),
        ({"top_p": 1.1}, "top_p must be a number above 0, at most 1, got 1.1"),
        ({"top_p": [1]}, "top_p must be a number above 0, at most 1, got a list of 1"),
        ({"top_k": 0}, "top_k must be a whole number from 1 to 2147483648, got 0"),
        ({"seed": 2**63}, "seed must be a whole number from -9223372036854775808 to"),
        ({"seed": 0.5}, "seed must be a whole number from"),
        ({"stop": ["a"] * 5}, "stop must have at most 4 texts, got 5"),
        ({"stop": ""}, "stop[0] is empty and would end every answer"),
        ({"stop": ["a", ""]}, "stop[1] is empty and would end every answer"),
        ({"stop": ["a", 1]}, "stop[1] must be text, got 1"),
        ({"stop": 7}, "stop must be text or a list of texts, got 7"),
        ({"stop": "x" * 1001}, "stop[0] must have at most 1000 characters, got 1001"),
        ({"stream": "yes"}, "stream must be true or false, got 'yes'"),
        ({"stream": 1}, "stream must be true or false, got 1"),
        ({"stream_options": {}}, "stream_options needs stream: true"),
        (
            {"stream": True, "stream_options": [True]},
            "stream_options must be an object, got a list of 1",
        ),
        (
            {"stream": True, "stream_options": {"usage": True}},
            "unknown field stream_options.'usage'",
        ),
        ({"model": 3}, "model must be text, got 3"),
        ({"temprature": 1}, "unknown field 'temprature'; did you mean temperature?"),
        ({"zzzz": 1}, "unknown field 'zzzz'; remove it"),
        ({"x" * 1000: 1}, f"unknown field '{'x' * 59}..."),
    ],
)
def test_a_value_out_of_range_is_refused_at_both_endpoints(change, said):
    for read in (completion, chat):
        error = refusal(read, **change)
        assert (error.status, error.param) == (400, list(change)[-1])
        assert error.message.startswith(said), error.message


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"functions": [{}]},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"5": -100}},
        {"frequency_penalty": 0.5},
        {"presence_penalty": True},
        {"repetition_penalty": 1.1},
        {"modalities": ["text", "audio"]},
        {"reasoning_effort": "low"},
        {"verbosity": "low"},
        {"suffix": "end"},
        {"web_search_options": {}},
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(change):
    (name,) = change
    for read in (completion, chat):
        error = refusal(read, **change)
        assert (error.status, error.param) == (422, name)
        assert error.code == "unsupported_parameter"
        assert error.message.startswith(f"{name} is not supported by this server, got ")


def test_what_does_not_change_the_answer_is_accepted():
    ignored: dict[str, Any] = dict.fromkeys(fields.IGNORED, "anything")
    neutral = {
        name: values[0] for name, values in fields.NEUTRAL.items() if len(values)
    }
    absent = dict.fromkeys(fields.NEUTRAL)
    for extra in (ignored, neutral, absent):
        assert completion(**extra) == completion()
        assert chat(**extra) == chat()


def test_values_at_their_limits_are_accepted():
    options = completion(
        n=128,
        temperature=2,
        top_p=1e-9,
        top_k=1,
        seed=-(2**63),
        stop=["a", "b", "c", "d"],
        logprobs=5,
    ).options
    assert (options.num_choices, options.temperature) == (128, 2.0)
    assert (options.top_p, options.top_k, options.seed) == (1e-9, 1, -(2**63))
    assert options.stop == ("a", "b", "c", "d")
    assert options.num_alternatives == 5
    assert chat(logprobs=True, top_logprobs=20).options.num_alternatives == 20
    assert chat(logprobs=True).options.num_alternatives == 0
    assert chat(top_logprobs=None).options.num_alternatives is None


def test_null_counts_as_absent():
    names = ["max_tokens", "n", "temperature", "stop", "stream", "seed", "logprobs"]
    assert completion(**dict.fromkeys(names)) == completion()
    assert chat(**dict.fromkeys(names)) == chat()


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("ab", ("ab",)),
        (["ab", "c"], ("ab", "c")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["ab", [1]], ("ab", (1,))),
    ],
)
def test_prompts_are_text_or_tokens_one_or_several(prompt, read):
    assert completion(prompt=prompt).prompts == read


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (None, "prompt must be text, a list of texts, token ids or a list of these"),
        ([], "prompt must be text, a list of texts, token ids or a list of these"),
        (5, "prompt must be text, got 5"),
        ({"a": 1}, "prompt must be text, got {'a': 1}"),
        ([1, -1], "prompt[1] must be a token id, a whole number at least 0, got -1"),
        ([[1, 2.5]], "prompt[0][1] must be a token id, a whole number at least 0, got"),
        ([1, "a"], "prompt[0] must be text, got 1"),
        ([True], "prompt[0] must be text, got true"),
        (
            ["\ud800"],
            "prompt[0] must be text that UTF-8 can encode, got U+D800 at char",
        ),
        (["a"] * 2049, "prompt must have at most 2048 prompts, got 2049"),
    ],
)
def test_a_prompt_that_is_none_is_refused(prompt, said):
    error = refusal(completion, prompt=prompt)
    assert error.status == 400
    assert error.message.startswith(said), error.message


def test_half_a_surrogate_pair_in_a_message_is_refused():
    error = refusal(chat, messages=[{"role": "user", "content": "a\ud800"}])
    assert error.message == (
        "messages[0].content must be text that UTF-8 can encode, got U+D800 at "
        "character 1"
    )


@pytest.mark.parametrize(
    ("messages", "status", "said"),
    [
        (None, 400, "messages must be a list of at least one message, got null"),
        ([], 400, "messages must be a list of at least one message, got []"),
        ("hi", 400, "messages must be a list of at least one message, got 'hi'"),
        (["hi"], 400, "messages[0] must be an object with role and content, got 'hi'"),
        ([{"content": "a"}], 400, "messages[0].role must be one of system, developer"),
        ([{"role": "user"}], 400, "messages[0].content must be text, got null"),
        (
            [{"role": "user", "content": 5}],
            400,
            "messages[0].content must be text, got 5",
        ),
        (
            [*CHAT, {"role": "robot", "content": "a"}],
            400,
            "messages[1].role must be one of system, developer, user, assistant, got",
        ),
        ([{"role": "tool", "content": "a"}], 422, "messages[0].role tool is not supp"),
        (
            [{"role": "user", "content": "a", "tool_calls": [1]}],
            422,
            "messages[0] has 'tool_calls', which is not supported; remove it",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            422,
            "messages[0].content[0] has type 'image_url'; only text is supported",
        ),
        (
            [{"role": "user", "content": ["a"]}],
            400,
            "messages[0].content[0] must be an object with a type, got 'a'",
        ),
    ],
)
def test_a_message_that_is_none_is_refused(messages, status, said):
    error = refusal(chat, messages=messages)
    assert (error.status, error.param) == (status, "messages")
    assert error.message.startswith(said), error.message


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = chat(
        messages=[{"role": "user", "content": parts, "name": "Jo", "audio": None}]
    ).messages
    assert message == {"role": "user", "content": "ab", "name": "Jo"}


def test_the_two_names_of_the_number_of_tokens_must_agree():
    assert chat(max_completion_tokens=7).options.max_tokens == 7
    assert chat(max_tokens=7).options.max_tokens == 7
    assert chat(max_tokens=7, max_completion_tokens=7).options.max_tokens == 7
    error = refusal(chat, max_tokens=7, max_completion_tokens=8)
    assert error.message == (
        "max_completion_tokens is 8 and max_tokens is 7; give one of them"
    )


def test_fields_of_one_endpoint_are_unknown_to_the_other():
    assert refusal(completion, messages=CHAT).message.startswith("unknown field")
    assert refusal(completion, max_completion_tokens=1).status == 400
    assert refusal(chat, prompt="a").message.startswith("unknown field 'prompt'")
    assert refusal(chat, echo=True).status == 400
    assert refusal(completion, logprobs=True).status == 400
    assert refusal(chat, logprobs=3).status == 400
    assert refusal(completion, logprobs=6).status == 400
    assert refusal(chat, top_logprobs=3).message.startswith("top_logprobs needs")
    assert refusal(chat, logprobs=True, top_logprobs=21).status == 400


def test_best_of_is_accepted_where_it_does_nothing():
    assert completion(best_of=3, n=3).options.num_choices == 3
    assert refusal(completion, best_of=3).status == 422


def test_the_log_probabilities_of_an_echoed_prompt_are_refused():
    assert completion(echo=True).echo
    assert refusal(completion, echo=True, logprobs=0).param == "echo"


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
_NAMES = st.sampled_from(
    sorted({"prompt", "messages", "n", "stop", "seed", "top_p", "logprobs", "echo"})
    + sorted(fields.NEUTRAL)
    + ["temperature", "stream", "stream_options", "max_tokens", "top_logprobs"]
)


def said_of(read: Any, changes: dict[str, Any]) -> ApiError | None:
    """Return the refusal of a request; None if it is accepted."""
    try:
        read(**changes)
    except ApiError as error:
        return error
    return None


@given(st.dictionaries(_NAMES, _JSON, max_size=4))
def test_any_object_is_read_or_refused_as_a_client_error(changes):
    for read in (completion, chat):
        error = said_of(read, changes)
        if error is not None:
            assert error.status in (400, 422)
            assert "\n" not in error.message
            assert len(error.message) < 500
            json.loads(error.body())
