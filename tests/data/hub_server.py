"""A small local Hugging Face Hub, with the few endpoints that its client uses."""

import contextlib
import hashlib
import http.server
import json
import pathlib
import re
import threading
import time
from collections.abc import Iterator

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEXT = COMMIT[::-1]
REPOSITORIES = {"datasets": "org/texts", "models": "org/model"}


class Hub(http.server.ThreadingHTTPServer):
    """Serves a data set and a model of a few files each; records the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {
            "a.jsonl": b"".join(
                b'{"text": "line %d of a, with words"}\n' % i for i in range(60)
            ),
            "sub/b.txt": b"text of b\n" * 9,
            "README.md": b"# not text of the corpus",
            ".hidden.txt": b"hidden",
        }
        """Path -> content, for the files of the data set."""
        self.model_files: dict[str, bytes] = {}
        """Path -> content, for the files of the model."""
        self.damage: dict[str, bytes] = {}
        """Path -> content that is sent instead of the file's."""
        self.cut: set[str] = set()
        """Paths of files of which only the first 10 bytes are sent."""
        self.gated: set[str] = set()
        """Paths of files that need a token."""
        self.status = 200
        """HTTP status of every answer; 200 answers normally."""
        self.delay_s = 0.0
        """Seconds before every answer."""
        self.commit = COMMIT
        """Commit of the branch main."""
        self.odd_answer: bytes | None = None
        """Content of every answer; None answers normally."""
        self.asked: list[str] = []
        """Method and path of every request."""
        self.sent_ranges: list[tuple[str, int, int]] = []
        """Path, first byte and end (exclusive) of every answer to a range request."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of a client that has disconnected."""

    def files_of(self, kind: str) -> dict[str, bytes]:
        return self.files if kind == "datasets" else self.model_files


class Handler(http.server.BaseHTTPRequestHandler):
    @property
    def hub(self) -> Hub:
        assert isinstance(self.server, Hub)
        return self.server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.asked.append(f"{self.command} {path}")
        time.sleep(self.hub.delay_s)
        if self.hub.status != 200:
            self.answer(self.hub.status, b"busy")
        elif self.hub.odd_answer is not None:
            self.answer(200, self.hub.odd_answer)
        elif not any(self.answered(path, kind) for kind in REPOSITORIES):
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def answered(self, path: str, kind: str) -> bool:
        """Answer if the path is in the repository of a kind."""
        name = REPOSITORIES[kind]
        info = f"/api/{kind}/{name}/revision/"
        files = f"/datasets/{name}/resolve/"
        if kind == "models":
            files = f"/{name}/resolve/"
        revision, _, file = path.removeprefix(files).partition("/")
        if path in (f"{info}main", f"{info}{COMMIT}", f"{info}{NEXT}"):
            self.answer(200, json.dumps(self.info(kind, path)).encode())
        elif path.startswith(info):
            self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(files) and file in self.hub.gated:
            self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif path.startswith(files) and revision in (COMMIT, NEXT):
            self.file(kind, revision, file)
        else:
            return False
        return True

    def info(self, kind: str, path: str) -> dict:
        files, siblings = self.hub.files_of(kind), []
        for name, content in files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            sibling = {"rfilename": name, "size": len(content), "blobId": blob}
            if not siblings:  # files that are too large for git
                sha256 = hashlib.sha256(content).hexdigest()
                lfs = {"sha256": sha256, "size": len(content), "pointerSize": 130}
                sibling["lfs"] = lfs
            siblings.append(sibling)
        revision = path.rpartition("/")[2]
        commit = self.hub.commit if revision == "main" else revision
        return {"id": REPOSITORIES[kind], "sha": commit, "siblings": siblings}

    def file(self, kind: str, commit: str, name: str) -> None:
        content = self.hub.damage.get(name, self.hub.files_of(kind)[name])
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        headers = {"X-Repo-Commit": commit, "ETag": etag}
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            start, stop = int(match[1]), int(match[2]) + 1
            self.hub.sent_ranges.append((name, start, stop))
            part = content[start:stop]
            sent = part[:10] if name in self.hub.cut else part
            self.answer(206, sent, headers, size=len(part))
            return
        sent = content[:10] if name in self.hub.cut else content
        self.answer(200, sent, headers, size=len(content))

    def answer(
        self,
        code: int,
        content: bytes,
        headers: dict[str, str] | None = None,
        size: int | None = None,
    ) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if size is None else size))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@contextlib.contextmanager
def serving(cache: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Run a hub, with an empty cache of the library."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
