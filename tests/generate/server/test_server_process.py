"""The server as users start it: a process, a real model, a real chat template."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from mjax.generate.__main__ import main
from mjax.generate.chat import encoder
from mjax.generate.engine import Answer, Engine, answer_all
from mjax.generate.opened import open_model
from mjax.generate.requests import Request, Sampling
from tests.generate.server.process import (
    MAX_LEN,
    ROOT,
    SLOTS,
    TEMPLATE,
    Server,
    make_run,
)
from tests.training import make_mesh

LONG = 1500
"""Tokens of an answer that is still running when a test acts on it."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_run(tmp_path_factory.mktemp("served") / "work")


@pytest.fixture(scope="module")
def shared(run: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(run, tmp_path_factory.mktemp("tokens"))
    yield server
    server.close()


@pytest.fixture
def server(shared: Server) -> Server:
    """Give the process of this file, started again if a test has stopped it."""
    shared.start()
    return shared


type Offline = Callable[..., Answer]


@pytest.fixture(scope="module")
def offline(run: str) -> Offline:
    """Answer prompts with the engine alone; messages use the model's template."""
    opened = open_model(run, make_mesh((1, 1, 1, 1)), dtype="float32")
    engine, encode = Engine(opened, slots=SLOTS, max_len=MAX_LEN), encoder(opened)
    assert encode is not None

    def answer(prompt, **sampling) -> Answer:
        is_text = isinstance(prompt, str)
        ids = opened.prompt_ids(prompt) if is_text else encode(prompt)
        request = Request(prompt=tuple(ids), sampling=Sampling(**sampling))
        return answer_all(engine, [request])[0]

    return answer


@pytest.fixture(scope="module")
def endless(offline: Offline) -> str:
    """Return a prompt whose likeliest continuation is long."""
    for letter in "abcdefghijklmnop":
        answer = offline(letter, max_tokens=LONG, temperature=0.0)
        if answer.finished == "length":
            return letter
    raise AssertionError("the model ends all texts")


def test_answers_over_http_are_those_of_the_engine_alone(server, offline):
    for seed, stream in enumerate((False, True)):
        given = {"max_tokens": 30, "temperature": 0.9, "seed": seed}
        want = offline("def f(", **given)
        answer = server.complete(prompt="def f(", stream=stream, **given)
        assert answer.status == 200
        if stream:
            assert answer.streamed == want.text
        else:
            (choice,) = answer.json["choices"]
            assert choice["text"] == want.text
            assert choice["finish_reason"] == want.finished
            assert answer.json["usage"]["completion_tokens"] == len(want.tokens)


def test_a_chat_goes_through_the_template_of_the_model(server, offline):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    given = {"max_tokens": 20, "temperature": 0.0}
    answer = server.ask("/v1/chat/completions", {"messages": messages, **given})
    assert answer.status == 200
    assert answer.json["usage"]["prompt_tokens"] == len(
        "[system]be brief\n[user]hi\n[assistant]"
    )
    (choice,) = answer.json["choices"]
    assert choice["message"]["content"] == offline(messages, **given).text
    messages[0]["role"] = "tool"
    answer = server.ask("/v1/chat/completions", {"messages": messages})
    assert answer.status in (400, 422)
    messages[0]["role"] = "developer"  # known to OpenAI's API, not to this template
    answer = server.ask("/v1/chat/completions", {"messages": messages})
    assert (answer.status, answer.error["code"]) == (400, "chat_template")
    assert answer.error["message"].count("chat template") == 1
    assert "role developer" in answer.error["message"]


def test_only_those_with_a_token_of_the_file_may_ask(server):
    body = {"prompt": "ab", "max_tokens": 1}
    for token in (None, "another-token-0123456789", ""):
        answer = server.ask("/v1/completions", body, token=token)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert server.ask("/metrics", token=token).status == 401
    assert server.ask("/health", token=None).status == 200
    assert server.ask("/v1/completions", body).status == 200


@pytest.mark.parametrize(
    ("body", "status", "param", "said"),
    [
        ({"prompt": "a" * MAX_LEN}, 400, "prompt", "--max-len of this server"),
        ({"max_tokens": 3001}, 400, "max_tokens", "at most 3000"),
        ({"prompt": "a" * 4000, "max_tokens": 97}, 400, "max_tokens", "at most 95"),
        ({"prompt": [257]}, 400, "prompt", "must be below 257, .*got 257"),
        ({"n": 5}, 400, "n", "at most 4"),
        ({"n": "two"}, 400, "n", "'two'"),
        ({"model": "gpt-4"}, 404, "model", "'gpt-4' is not served here.*'tiny'"),
        ({"temperatur": 1}, 400, "temperatur", "did you mean temperature"),
        ({"logprobs": 21}, 400, "logprobs", "from 0 to"),
        ({"echo": True, "logprobs": 1}, 422, "echo", "remove one of the two"),
        ({"logit_bias": {"5": 1}}, 422, "logit_bias", "not supported"),
        ({"stop": ["a"] * 5}, 400, "stop", "4"),
        ({"stop": ""}, 400, "stop", "empty"),
        (b'{"prompt": "ab",}', 400, None, "must be JSON"),
        (b"[]", 400, None, "JSON object"),
        (b"\xff{}", 400, None, "UTF-8, got byte 0xff"),
        (b" " * (1 << 20) + b"{}", 413, None, "--max-body-bytes"),
    ],
)
def test_bad_input_is_a_clients_error(server, body, status, param, said):
    if isinstance(body, dict):
        body = {"prompt": "ab"} | body
    answer = server.ask("/v1/completions", body)
    assert answer.status == status, answer.body
    assert answer.error["param"] == param
    assert answer.error["type"] == "invalid_request_error"
    assert re.search(said, answer.error["message"])


@pytest.mark.parametrize(
    "head",
    [
        "GET /health HTTP/1.1\r\nhost: localhost\r\nx: a\nb\r\n\r\n",
        "GET /health\r\nset-cookie: x HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n"
        "transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "\x00\x01\x02\r\n\r\n",
        "GET / HTTP/1.1\r\nx: " + "a" * 100_000,
    ],
)
def test_what_is_no_http_ends_its_connection_alone(server, head):
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sent:
        sent.sendall(head.encode("latin-1"))
        answer = http.client.HTTPResponse(sent)
        try:
            answer.begin()
            assert answer.status in (400, 401)
            assert answer.getheader("set-cookie") is None
        except (http.client.HTTPException, ConnectionError):
            pass  # closed without an answer
    assert server.ask("/health").status == 200


@pytest.mark.parametrize("path", ["/v1/models/x%0d%0aset-cookie:%20a", "/%0d%0ax:%20y"])
def test_line_ends_in_a_path_make_no_header(server, path):
    answer = server.ask(path)
    assert answer.status == 404
    assert "\n" not in answer.error["message"].replace("\\n", "")


def test_a_client_that_goes_away_frees_its_slot(server, endless, offline):
    before = server.counters()
    given = {"prompt": endless, "max_tokens": LONG, "temperature": 0.0}
    gone = [server.begin(**given) for _ in range(SLOTS)]
    for sent in gone:
        assert sent.recv(12) == b"HTTP/1.1 200"
    assert server.counters()["running_answers"] == SLOTS
    for sent in gone:
        sent.close()
    after = server.until(lambda found: found["open_answers"] == 0)
    after = server.until(lambda found: found["running_answers"] == 0)
    name = "requests_cancelled_running_total"
    assert after[name] - before[name] == SLOTS
    want = offline("ab", max_tokens=9, temperature=0.0)
    answer = server.complete(max_tokens=9, temperature=0.0)
    assert answer.json["choices"][0]["text"] == want.text


def test_sigterm_lets_running_answers_end_and_exits_with_0(server, endless, offline):
    given = {"prompt": endless, "max_tokens": LONG, "temperature": 0.0}
    streams = [server.begin(**given) for _ in range(SLOTS + 1)]  # one waits
    server.until(lambda found: found["waiting_answers"] == 1)
    server.process.send_signal(signal.SIGTERM)
    assert server_says_stopping(server)
    want = offline(**given).text
    for sent in streams:
        answer = http.client.HTTPResponse(sent)
        answer.begin()
        lines = answer.read().decode().split("\n\n")
        assert lines[-2] == "data: [DONE]"
        chunks = [json.loads(x.removeprefix("data: ")) for x in lines[:-2]]
        assert "".join(c["choices"][0]["text"] for c in chunks) == want
        sent.close()
    code, said = server.ended()
    assert code == 0, said
    assert f"stopping: {SLOTS + 1} open answers have 30 s" in said
    assert "Traceback" not in said


def server_says_stopping(server: Server) -> bool:
    """Wait until the server has noticed the signal, by polling /health."""
    for _ in range(1000):
        health = server.ask("/health")
        if health.status == 503:
            return health.json["status"] == "stopping"
        assert health.status == 200
        time.sleep(0.01)
    return False


# ------------------------------------------------------- what is refused at the start


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words, "--dtype", "float32"]) == 2
    out, said = capsys.readouterr()
    assert out == ""
    return said.splitlines()[-1]


def test_a_taken_port_is_refused_before_the_model_is_read(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = refusal(capsys, "/no/such/model", "--serve", str(port))
    assert said == (
        f"error: --serve {port}: the port is in use; stop the program that uses it, or "
        f"write --serve {port + 1}"
    )


def test_other_machines_may_not_ask_without_tokens(capsys, tmp_path):
    words = ["/no/such/model", "--serve", "0", "--host", "0.0.0.0"]
    said = refusal(capsys, *words)
    assert "--host 0.0.0.0 can be reached from other machines" in said
    assert "needs --token-file PATH" in said
    said = refusal(capsys, *words, "--token-file", str(tmp_path / "none"))
    assert "cannot be read" in said
    (tmp_path / "open").write_text("0123456789abcdef\n")
    (tmp_path / "open").chmod(0o644)
    said = refusal(capsys, *words, "--token-file", str(tmp_path / "open"))
    assert "has mode 0644, others may read it; chmod 600" in said


def test_a_broken_template_is_refused_when_the_server_starts(tmp_path):
    broken = make_run(tmp_path / "work", TEMPLATE + "\n{% endfor %}")
    done = subprocess.run(
        [sys.executable, "-m", "mjax.generate", broken, "--serve", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (2, "")
    said = done.stderr.splitlines()[-1]
    assert said.startswith("error: the chat template is broken: ")
    assert "line 3: Encountered unknown tag" in said


def test_a_checkpoint_of_another_tokenizer_is_refused(capsys, tmp_path):
    run = make_run(tmp_path / "work", None, tokenizer_digest="0123456789abcdef")
    said = refusal(capsys, run, "--serve", "0")
    assert "the tokenizer is not that of" in said
    assert "give that one as --tokenizer" in said
