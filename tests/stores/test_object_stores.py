"""What every object store does: the one in memory, an S3 server, a small GCS."""

import http.server
import threading
import urllib.parse
from pathlib import Path

import pytest

from mjax.stores import address
from mjax.stores.objects import (
    ABSENT,
    CHUNK_BYTES,
    ConflictError,
    MissingError,
    ObjectStore,
    RefusedError,
    UnavailableError,
    part_bytes,
)
from mjax.stores.opened import open_store
from tests.stores.memory import MemoryStore


def opened(url: str, patience_s: float = 2) -> ObjectStore:
    return open_store(address.parse(url, "--flag"), "--flag", patience_s=patience_s)


@pytest.fixture(
    params=[
        "memory",
        pytest.param("s3_url", marks=pytest.mark.stores),
        pytest.param("gs_url", marks=pytest.mark.stores),
    ]
)
def store(request: pytest.FixtureRequest) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore()
    return opened(request.getfixturevalue(request.param))


@pytest.fixture(
    params=[
        pytest.param("s3_url", marks=pytest.mark.stores),
        pytest.param("gs_url", marks=pytest.mark.stores),
    ]
)
def url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


def test_what_was_written_is_read(store: ObjectStore):
    store.write("a/b", b"0123456789", facts={"sha256": "abc"})
    assert store.read("a/b") == b"0123456789"
    assert store.read("a/b", 2) == b"23456789"
    assert store.read("a/b", 2, 4) == b"23"
    assert store.read("a/b", 8, 40) == b"89"
    assert store.read("a/b", 4, 4) == b""
    found = store.find("a/b")
    assert (found.name, found.num_bytes, found.facts) == ("a/b", 10, {"sha256": "abc"})
    data, version = store.read_versioned("a/b")
    assert (data, version.etag) == (b"0123456789", found.version.etag)


def test_names_may_have_blanks_and_signs(store: ObjectStore):
    for name in ("a b", "a+b", "d/ü%20.txt", "e=1&f"):
        store.write(name, name.encode())
        assert store.read(name).decode() == name
    assert [o.name for o in store.objects()] == ["a b", "a+b", "d/ü%20.txt", "e=1&f"]


def test_objects_are_listed_by_name_and_by_folder(store: ObjectStore):
    for name in ("steps/8/a", "steps/16/x/b", "steps/16.json", "top", "steps2/c"):
        store.write(name, b"x")
    names = [found.name for found in store.objects()]
    assert names == sorted(names)
    assert len(names) == 5
    assert [o.name for o in store.objects("steps/16")] == ["steps/16/x/b"]
    assert store.folders() == ["steps", "steps2"]
    assert store.folders("steps") == ["16", "8"]
    assert [*store.objects("nothing")] == []


def test_long_listings_are_whole(store: ObjectStore):
    names = [f"many/{number:04}" for number in range(1203)]
    for name in names:
        store.write(name, b"")
    assert [found.name for found in store.objects("many")] == names


def test_missing_objects_are_named(store: ObjectStore):
    for act in (store.read, store.find, store.read_versioned):
        with pytest.raises(MissingError, match="none is missing"):
            act("none")
    store.delete(["none"])


def test_a_deleted_object_is_gone(store: ObjectStore):
    for name in ("a", "b", "c"):
        store.write(name, b"x")
    store.delete(["a", "c"])
    store.delete([])
    assert [found.name for found in store.objects()] == ["b"]


def test_an_object_is_created_once(store: ObjectStore):
    store.write("a", b"first", expected=ABSENT)
    with pytest.raises(ConflictError, match=r"/a is in another version"):
        store.write("a", b"second", expected=ABSENT)
    assert store.read("a") == b"first"


def test_an_object_is_replaced_only_in_its_version(store: ObjectStore):
    old = store.write("a", b"1")
    new = store.write("a", b"2", expected=old)
    with pytest.raises(ConflictError):
        store.write("a", b"3", expected=old)
    store.write("a", b"4", expected=new)
    assert store.read("a") == b"4"


def test_a_read_notices_that_the_object_was_replaced(store: ObjectStore):
    store.write("a", b"1" * 10)
    version = store.find("a").version
    assert store.read("a", 1, 3, version=version) == b"11"
    store.write("a", b"2" * 10)
    with pytest.raises(ConflictError):
        store.read("a", 1, 3, version=version)


def test_a_range_behind_the_end_is_refused(store: ObjectStore):
    store.write("a", b"12")
    with pytest.raises(ValueError, match="ends before"):
        store.read("a", 5, 9)


def test_a_stream_has_all_bytes_in_chunks(store: ObjectStore):
    store.write("a", bytes(range(10)))
    chunks = [*store.stream("a", 1, chunk_bytes=4)]
    assert chunks == [bytes([1, 2, 3, 4]), bytes([5, 6, 7, 8]), bytes([9])]
    store.write("empty", b"")
    assert [*store.stream("empty")] == []


@pytest.mark.parametrize("num_bytes", [0, 5, CHUNK_BYTES, 2 * CHUNK_BYTES + 1])
def test_a_file_becomes_an_object(store: ObjectStore, tmp_path: Path, num_bytes: int):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(251)) * (num_bytes // 251) + b"x" * (num_bytes % 251))
    store.upload("deep/file", path, facts={"sha256": "abc"})
    assert b"".join(store.stream("deep/file")) == path.read_bytes()
    found = store.find("deep/file")
    assert (found.num_bytes, found.facts["sha256"]) == (num_bytes, "abc")


def test_parts_are_few_enough_for_any_file():
    assert part_bytes(1) == CHUNK_BYTES
    assert -(-(5 << 40) // part_bytes(5 << 40)) <= 10_000


def test_a_bucket_that_is_absent_is_named(url: str):
    scheme = urllib.parse.urlsplit(url).scheme
    other = opened(f"{scheme}://absent-bucket/run")
    for act in (
        lambda: [*other.objects()],
        lambda: other.read("a"),
        lambda: other.write("a", b""),
    ):
        with pytest.raises(RefusedError, match="there is no bucket absent-bucket"):
            act()


@pytest.mark.stores
def test_a_bucket_that_denies_is_named_with_a_remedy(gcs_server, gs_url: str):
    gcs_server.denied.add("bucket")
    with pytest.raises(RefusedError, match=r"AccessDenied.*GOOGLE_APPLICATION"):
        opened(gs_url).write("a", b"")
    with pytest.raises(RefusedError, match="AccessDenied"):
        opened(gs_url).folders()


@pytest.mark.stores
def test_missing_credentials_are_named_with_a_remedy(s3_server, s3_url, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(RefusedError, match="set AWS_ACCESS_KEY_ID"):
        opened(s3_url).write("a", b"")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    # In place of the instance's own address: a server that knows of no credentials.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"{s3_server.endpoint}/169.254.169.254")
    with pytest.raises(RefusedError, match="set AWS_ACCESS_KEY_ID"):
        opened(s3_url).write("a", b"")


@pytest.mark.stores
@pytest.mark.parametrize("name", ["a//b", "a/../b", "./a", "a\tb"])
def test_an_object_whose_name_cannot_be_read_is_named(s3_server, s3_url: str, name):
    store = opened(s3_url)
    store.write("good", b"1")
    s3_server.client().put_object(Bucket="bucket", Key=f"some/where/{name}", Body=b"2")
    with pytest.raises(RefusedError, match=r"--flag s3://.* object .*; rename or del"):
        list(store.objects())


@pytest.mark.stores
def test_an_expired_token_is_refused_with_a_remedy(s3_url: str, monkeypatch):
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = (
                b"<Error><Code>ExpiredToken</Code>"
                b"<Message>The provided token has expired.</Message></Error>"
            )
            self.send_response(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(RefusedError, match=r"ExpiredToken .*set AWS_ACCESS_KEY_ID"):
            opened(s3_url).write("a", b"")
        server.shutdown()


@pytest.mark.stores
def test_a_server_that_is_away_is_waited_for_and_then_named(s3_server, s3_url: str):
    store = opened(s3_url, patience_s=0.5)
    store.write("a", b"1")
    s3_server.stop()
    with pytest.raises(UnavailableError, match=r"cannot read s3://bucket/some/where/a"):
        store.read("a")
    s3_server.start()
    assert store.read("a") == b"1"
