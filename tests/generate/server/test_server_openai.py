"""The official client understands the server. `make test-hf` runs this."""

import json
import subprocess
from pathlib import Path

import pytest

from mjax.generate.requests import Request, Sampling
from tests.generate.server.fake_engine import whole_text
from tests.generate.server.running import NAME, running

ROOT = Path(__file__).parents[3]
PEER = Path(__file__).with_name("openai_client.py")
TOKEN = "0123456789abcdef"


def expected(prompt: str, seed: int) -> str:
    sampling = Sampling(max_tokens=12, seed=seed)
    return whole_text(Request(prompt=tuple(prompt.encode()), sampling=sampling))


@pytest.mark.hf
def test_the_official_client_gets_answers_streams_and_errors():
    with running(tokens=frozenset({TOKEN})) as server:
        base = f"http://127.0.0.1:{server.port}/v1"
        done = subprocess.run(
            [ROOT / ".venv-hf/bin/python", PEER, base, TOKEN, NAME],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    prompts = ("def f", "def f", "x = ", "x = ")
    texts = [expected(prompt, 3 + i) for i, prompt in enumerate(prompts)]
    chat = expected("user: hello\n", 3)
    assert found == {
        "models": [NAME],
        "texts": texts,
        "pieces": texts,
        "token_logprobs": [-1.0] * 12,
        "usage": {"prompt_tokens": 9, "completion_tokens": 48, "total_tokens": 57},
        "chat": chat,
        "chat_finish": "length",
        "chat_logprobs": [-1.0] * 12,
        "chat_tops": [3] * 12,
        "streamed": chat,
        "roles": ["assistant"],
        "stream_ends": ["length"],
        "stream_usage": {
            "prompt_tokens": 12,
            "completion_tokens": 12,
            "total_tokens": 24,
        },
        "wrong_token": ["AuthenticationError", 401, "invalid_api_key"],
        "wrong_model": ["NotFoundError", 404, "model_not_found"],
        "wrong_value": ["BadRequestError", 400, None],
        "too_long": ["BadRequestError", 400, "context_length_exceeded"],
        "tools": ["UnprocessableEntityError", 422, "unsupported_parameter"],
        "large": ["APIStatusError", 413, "body_too_large"],
    }
