"""Data sets of a hub: a small server speaks the few endpoints that the library asks."""

import concurrent.futures
import hashlib
import http.server
import json
import pathlib
import threading
from collections.abc import Iterator

import pytest

from mjax.data import cache_files, corpora
from mjax.data import hub as hub_module
from mjax.data.config import DataConfig
from mjax.data.dataset import open_dataset
from mjax.data.hub import fetch

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PATH = "hf://datasets/org/texts@main"


class Hub(http.server.ThreadingHTTPServer):
    """One data set of a few files; says what was asked for."""

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
        self.damage: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.is_broken = False
        self.commit = COMMIT
        self.odd_answer: bytes | None = None
        self.asked: list[str] = []


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
        info, files = (
            "/api/datasets/org/texts/revision/",
            "/datasets/org/texts/resolve/",
        )
        if self.hub.is_broken:
            self.answer(503, b"busy")
        elif self.hub.odd_answer is not None:
            self.answer(200, self.hub.odd_answer)
        elif path in (f"{info}main", f"{info}{COMMIT}"):
            self.answer(200, json.dumps(self.info()).encode())
        elif path.startswith(info):
            self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(f"{files}{COMMIT}/"):
            self.file(path.removeprefix(f"{files}{COMMIT}/"))
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def info(self) -> dict:
        siblings = [
            {
                "rfilename": name,
                "size": len(content),
                "blobId": hashlib.sha1(
                    b"blob %d\0" % len(content) + content
                ).hexdigest(),
            }
            for name, content in self.hub.files.items()
        ]
        large = next(iter(self.hub.files.values()))
        siblings[0]["lfs"] = {
            "sha256": hashlib.sha256(large).hexdigest(),
            "size": len(large),
            "pointerSize": 130,
        }
        return {"id": "org/texts", "sha": self.hub.commit, "siblings": siblings}

    def file(self, name: str) -> None:
        content = self.hub.damage.get(name, self.hub.files[name])
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        headers = {"X-Repo-Commit": COMMIT, "ETag": etag}
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


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def config(tmp_path: pathlib.Path, path: str = PATH) -> DataConfig:
    return DataConfig(path=(path,), cache_dir=str(tmp_path / "cache"), seq_len=8)


def test_a_data_set_is_read_as_its_files_are_and_the_commit_is_recorded(hub, tmp_path):
    for name in ("a.jsonl", "sub/b.txt"):
        file = tmp_path / "plain" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(hub.files[name])
    dataset = open_dataset(config(tmp_path), seed=0)
    plain = open_dataset(config(tmp_path, str(tmp_path / "plain")), seed=0)
    assert dataset.fingerprint == plain.fingerprint
    assert dataset.origins == (f"hf://datasets/org/texts@{COMMIT}",)
    assert plain.origins == ()
    [manifest] = (tmp_path / "cache").glob("*/manifest.json")
    assert f"hf://datasets/org/texts@{COMMIT}" in manifest.read_text()
    assert not any("README" in asked or "hidden" in asked for asked in hub.asked)


def test_other_files_in_the_cache_of_the_library_are_not_read(hub, tmp_path):
    fetched = fetch(PATH)
    (fetched.folder / "c.txt").write_text("from another program")
    assert [s.name for s in corpora.find_sources((PATH,))] == ["a.jsonl", "sub/b.txt"]


def test_without_the_hub_a_whole_copy_is_read_and_a_part_is_refused(
    hub, tmp_path, caplog
):
    hub.cut.add("sub/b.txt")
    with pytest.raises(
        ValueError, match=r"sub/b\.txt stopped \(.*\); start again, what has arrived"
    ):
        fetch(PATH)
    hub.is_broken = True
    with pytest.raises(ValueError, match="this machine has no whole copy"):
        fetch(PATH)
    hub.is_broken = False
    hub.cut.clear()
    hub.asked.clear()
    whole = fetch(PATH)
    assert not any("GET" in asked and "a.jsonl" in asked for asked in hub.asked)
    hub.is_broken = True
    assert fetch(PATH) == whole
    assert f"reading the copy of commit {COMMIT}" in caplog.text


def test_a_file_that_arrives_damaged_is_removed_and_refused(hub):
    for name in ("a.jsonl", "sub/b.txt"):
        content = bytearray(hub.files[name])
        content[20] ^= 1
        hub.damage = {name: bytes(content)}
        with pytest.raises(ValueError, match=r"arrived damaged \(checksum .*was remov"):
            fetch(PATH)
    hub.damage = {}
    assert (fetch(PATH).folder / "a.jsonl").read_bytes() == hub.files["a.jsonl"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hf://datasets/org/texts", r"must be hf://datasets/NAME@REVISION .*@main"),
        ("hf://org/texts@main", r"must be hf://datasets/NAME@REVISION"),
        ("hf://datasets/org/texts@nope", r"no revision 'nope'; give a branch"),
        ("hf://datasets/org/none@main", r"has no data set org/none, or it is private"),
    ],
)
def test_names_that_do_not_exist_are_refused(hub, path, message):
    with pytest.raises(ValueError, match=message):
        fetch(path)


def test_a_data_set_without_text_is_refused(hub):
    hub.files = {"a.bin": b"x"}
    with pytest.raises(ValueError, match="holds no file of text; files that are read"):
        fetch(PATH)


@pytest.mark.parametrize("answer", [b"<html>log in</html>", b"{}", b"[]", b"null"])
def test_an_answer_that_is_no_data_set_is_refused_or_the_copy_is_read(hub, answer):
    hub.odd_answer = answer
    with pytest.raises(ValueError, match="does not answer as it should"):
        fetch(PATH)
    hub.odd_answer = None
    whole = fetch(PATH)
    hub.odd_answer = answer
    assert fetch(PATH) == whole


def test_names_of_a_hub_never_lead_out_of_its_cache(hub, tmp_path):
    own = tmp_path / "own.txt"
    own.write_text("not of the hub")
    hub.files |= {str(own): b"other", "../../../../own.txt": b"other"}
    assert fetch(PATH).files == ["a.jsonl", "sub/b.txt"]
    hub.commit = "../../../.."
    hub.files = {"own.txt": b"other"}
    fetch(PATH)  # the copy
    assert own.read_text() == "not of the hub"


def test_passwords_and_signatures_of_addresses_are_not_told(hub, monkeypatch):
    host = f"127.0.0.1:{hub.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", f"http://user:secret@{host}")
    hub.is_broken = True
    with pytest.raises(ValueError, match=f"the hub http://{host} does not") as caught:
        fetch(PATH)
    assert "secret" not in str(caught.value)
    error = OSError("403 for url: https://cdn.io/a?X-Amz-Signature=abc (Forbidden)")
    assert hub_module._first_line(error) == "403 for url: https://cdn.io/a (Forbidden)"


def test_processes_that_start_together_and_a_cache_without_room(hub, monkeypatch):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert len(set(map(str, pool.map(fetch, [PATH] * 8)))) == 1

    def full(path):
        raise cache_files.unwritable(path.parent, OSError(28, "No space left"))

    monkeypatch.setattr(cache_files, "locked", full)
    fetch(PATH)  # nothing is written where everything is there
    with pytest.raises(ValueError, match=r"No space left\); set HF_HUB_CACHE"):
        fetch(f"hf://datasets/org/texts@{COMMIT}")
