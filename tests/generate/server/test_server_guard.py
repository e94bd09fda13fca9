"""Permitted and refused clients of the model server."""

from pathlib import Path

import pytest

from mjax.generate.server.auth import judge, read_tokens
from mjax.generate.server.errors import ApiError
from tests.generate.server.running import NAME, running

FIRST, SECOND = "first-token-0123456789", "second-token-0123456789"
TOKENS = frozenset({FIRST, SECOND})


def status(method="POST", path="/v1/completions", tokens=TOKENS, **headers) -> int:
    """Return the status of a refusal; 200 if there is none."""
    given = {"host": "localhost:8000", "content-type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        judge(method, path, given, tokens)
    except ApiError as error:
        return error.status
    return 200


@pytest.mark.parametrize("token", [FIRST, SECOND])
def test_each_token_of_the_file_opens_the_server(token):
    assert status(authorization=f"Bearer {token}") == 200
    assert status(authorization=f"bearer  {token} ") == 200


@pytest.mark.parametrize(
    "authorization",
    [
        *("", "Bearer", "Bearer ", "Bearer é", FIRST, f"Basic {FIRST}"),
        *(f"Bearer {FIRST[:-1]}", f"Bearer {FIRST} {SECOND}"),
        f"Bearer {FIRST.upper()}",
    ],
)
def test_everything_else_is_refused(authorization):
    assert status(authorization=authorization) == 401
    assert status(method="GET", path="/metrics", authorization=authorization) == 401
    assert status(method="GET", path="/v1/models", authorization=authorization) == 401


def test_only_the_health_needs_no_token():
    assert status(method="GET", path="/health") == 200
    assert status(method="GET", path="/health/") == 401
    assert status(method="GET", path="/healthy") == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "", "a@b"])
def test_without_tokens_a_name_that_points_here_from_elsewhere_is_refused(host):
    assert status(tokens=frozenset(), host=host) == 403
    assert status(tokens=frozenset(), method="GET", path="/health", host=host) == 403


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1:8000", "[::1]:8000"])
def test_without_tokens_this_machine_may_ask(host):
    assert status(tokens=frozenset(), host=host) == 200


def test_with_tokens_the_server_may_have_any_name():
    assert status(authorization=f"Bearer {FIRST}", host="models.example") == 200


@pytest.mark.parametrize(
    "kind",
    [
        *("text/plain", "", "application/x-www-form-urlencoded"),
        *("multipart/form-data", "text/plain; application/json", "application/jsonp"),
    ],
)
def test_a_body_that_a_browser_sends_unasked_is_refused(kind):
    assert status(tokens=frozenset(), content_type=kind) == 415
    assert status(authorization=f"Bearer {FIRST}", content_type=kind) == 415
    assert status(tokens=frozenset(), method="GET", content_type=kind) == 200


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON", "application/json; charset=utf-8"]
)
def test_json_is_accepted_however_it_is_written(kind):
    assert status(tokens=frozenset(), content_type=kind) == 200


def test_a_refusal_over_http_has_the_form_of_an_error():
    with running(tokens=TOKENS) as server:
        answer = server.complete()
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert FIRST not in answer.body.decode()
        body = {"model": NAME, "prompt": "ab"}
        token = {"authorization": f"Bearer {FIRST}"}
        assert server.ask("/v1/completions", body, headers=token).status == 200
        assert server.ask("/health").status == 200
        assert server.engine.submitted[0].prompt == (97, 98)
        assert len(server.engine.submitted) == 1
    with running() as server:
        answer = server.ask("/v1/models", headers={"host": "evil.example"})
        assert (answer.status, answer.error["code"]) == (403, "unknown_host")


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_token_file_has_one_token_per_line(tmp_path):
    text = f"# of the first client\n{FIRST}\n\n  {SECOND}  \n"
    assert read_tokens(write(tmp_path / "tokens", text)) == TOKENS


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o604])
def test_a_token_file_that_others_may_use_is_refused(tmp_path, mode):
    with pytest.raises(ValueError, match=f"has mode 0{mode:o}, others may read it"):
        read_tokens(write(tmp_path / "tokens", FIRST, mode))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no token; write one token per line"),
        ("# nothing\n\n", "has no token; write one token per line"),
        (f"{FIRST}\nshort\n", "token 2 must have 16 to 256 letters"),
        ("two words in a line\n", "token 1 must have 16 to 256 letters"),
    ],
)
def test_a_token_file_without_a_good_token_is_refused(tmp_path, text, said):
    path = write(tmp_path / "tokens", text)
    with pytest.raises(ValueError, match=said) as caught:
        read_tokens(path)
    assert "short" not in str(caught.value)
