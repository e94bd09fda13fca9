"""The server in its own process, with a real engine, and requests to it."""

import contextlib
import dataclasses
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mjax.config.train import TrainConfig
from mjax.data.config import DataConfig
from tests.generate.models import SMALL, random_params, save_run

ROOT = Path(__file__).parents[3]
TOKEN = "0123456789abcdef-of-a-test"
SLOTS, MAX_LEN = 2, 4096
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('role ' + m.role) }}"
    "{% endif %}"
    "[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_run(
    work_dir: Path,
    template: str | None = TEMPLATE,
    *,
    seq_len: int = MAX_LEN,
    **facts: Any,
) -> str:
    """Save a small random byte-level model with a chat template."""
    config = TrainConfig(model=SMALL, data=DataConfig(seq_len=seq_len))
    save_run(work_dir, random_params(SMALL), config, steps=(0,), **facts)
    if template is not None:
        (work_dir / "tokenizer").mkdir()
        (work_dir / "tokenizer" / "chat_template.jinja").write_text(template)
    return str(work_dir)


@dataclasses.dataclass(kw_only=True)
class Answer:
    """An answer of the server."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, in OpenAI's form."""
        (error,) = self.json.values()
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def streamed(self) -> str:
        """The text of a completed stream."""
        events = self.body.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(e.removeprefix("data: ")) for e in events[:-2]]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)


class Server:
    """A process that is started when needed, reachable from other machines."""

    def __init__(self, run: str, folder: Path) -> None:
        """Write the token file; do not start the process."""
        self._run = run
        self._tokens = folder / "tokens"
        self._tokens.write_text(f"{TOKEN}\n")
        self._tokens.chmod(0o600)
        self.process: subprocess.Popen[str] | None = None
        self.port = 0

    def start(self) -> None:
        """Start the process unless it is running."""
        if self.process is not None and self.process.poll() is None:
            return
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "mjax.generate", self._run, "--serve", "0"),
                *("--host", "0.0.0.0", "--token-file", str(self._tokens)),
                *("--dtype", "float32", "--slots", str(SLOTS), "--no-warm-up"),
                *("--queue", "2", "--max-tokens", "3000", "--served-name", "tiny"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.fullmatch(r"http://0\.0\.0\.0:(\d+)/v1\n", line)
        assert found is not None, self.ended()[1]
        self.port = int(found[1])

    def ended(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and the output."""
        assert self.process is not None
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said

    def close(self) -> None:
        """Kill the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def ask(
        self, path: str, body: Any = None, token: str | None = TOKEN, **headers: str
    ) -> Answer:
        """Send one request; a body other than bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            given = {"content-type": "application/json"} | headers
            given |= {"authorization": f"Bearer {token}"} if token else {}
            method = "GET" if body is None else "POST"
            connection.request(method, path, None if body is None else data, given)
            answer = connection.getresponse()
            return Answer(status=answer.status, body=answer.read())

    def complete(self, **body: Any) -> Answer:
        """Request a completion."""
        return self.ask("/v1/completions", {"prompt": "ab"} | body)

    def begin(self, **body: Any) -> socket.socket:
        """Request a stream without reading it."""
        data = json.dumps({"prompt": "ab", "stream": True} | body).encode()
        sent = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"authorization: Bearer {TOKEN}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        sent.sendall(head.encode() + data)
        return sent

    def counters(self) -> dict[str, float]:
        """Return name -> value of the gauges and counters."""
        lines = self.ask("/metrics").body.decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line[0] != "#")
        return {name.removeprefix("mjax_"): float(value) for name, _, value in pairs}

    def until(self, holds: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Wait until a condition on the counters holds."""
        until_s = time.monotonic() + 60
        while not holds(found := self.counters()):
            assert time.monotonic() < until_s, f"it never came to be: {found}"
            time.sleep(0.01)
        return found
