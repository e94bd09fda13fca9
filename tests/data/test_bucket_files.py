"""Corpora in s3:// and gs://: in memory by default, on servers with -m stores."""

import dataclasses
import gzip
import io
import logging
import pathlib
import threading

import pyarrow
import pyarrow.parquet
import pytest

from mjax.data import bucket_files, remote, remote_hosts
from mjax.data.config import CacheConfig, DataConfig
from mjax.data.dataset import open_dataset, prepare_files
from mjax.processes import hosts
from mjax.processes.agreement import Agreement
from mjax.run import work_dir
from mjax.stores import address
from mjax.stores.objects import ObjectStore, RefusedError, UnavailableError
from mjax.stores.opened import open_store
from tests.processes.test_agreement import ended, members
from tests.stores.memory import MemoryStore
from tests.stores.servers import gcs_server, gs_url, s3_server, s3_url

__all__ = ["gcs_server", "gs_url", "s3_server", "s3_url"]


def parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file)
    return file.getvalue()


FILES = {
    "a.jsonl.gz": gzip.compress(
        b"".join(b'{"text": "line %d of a, in words"}\n' % i for i in range(60))
    ),
    "sub/b.txt": b"text of b\n" * 90,
    "sub/c.parquet": parquet([f"row {i} of c" for i in range(200)]),
    "sub/d.json": b'[{"text": "one"}, {"text": "two"}]',
}
OTHERS = {"picture.png": b"\x89PNG", ".hidden.txt": b"hidden", "empty.txt": b""}


pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture
def memory(monkeypatch) -> MemoryStore:
    """A bucket in memory, in which s3://bucket/run is opened at any depth."""
    store = MemoryStore()

    def opened(at: address.Address, flag: str, **options) -> ObjectStore:
        assert flag == "--data.path"
        inner = at.url.removeprefix(store.url).strip("/")
        if not inner:
            return store
        kept = {
            name.removeprefix(f"{inner}/"): content
            for name, content in store.kept.items()
            if name.startswith(f"{inner}/")
        }
        below = MemoryStore(at.url, kept)
        below.before = store.before
        return below

    monkeypatch.setattr(bucket_files, "open_store", opened)
    for name, content in (FILES | OTHERS).items():
        store.write(name, content)
    return store


def config(folder: pathlib.Path, path: str = "s3://bucket/run") -> DataConfig:
    return DataConfig(path=(path,), seq_len=8, cache_dir=str(folder / "tokens"))


def token_files(folder: pathlib.Path) -> dict[str, bytes]:
    root = folder / "tokens"
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.glob("*/*")
        if path.suffix in (".tokens", ".crc32")
    }


def plain(folder: pathlib.Path) -> DataConfig:
    """The same text in a folder, where .json is one text and not records."""
    for name, content in FILES.items():
        path = folder / "plain" / name.replace("d.json", "d.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "plain/sub/d.jsonl").write_bytes(b'{"text": "one"}\n{"text": "two"}\n')
    return config(folder, str(folder / "plain"))


def check_parity(url: str, tmp_path: pathlib.Path) -> None:
    """Read FILES below a URL: the tokens are those of the same files in a folder."""
    files = prepare_files(config(tmp_path / "remote", url))[0]
    expected = prepare_files(plain(tmp_path / "local"))[0]
    assert files.survey.num_documents == expected.survey.num_documents == 263
    assert files.survey.num_bytes == expected.survey.num_bytes
    counts = [
        sum(side.num_tokens for side in found.counts.values())
        for found in (files, expected)
    ]
    assert counts[0] == counts[1]


def test_a_bucket_is_read_as_its_files_are(memory, tmp_path, caplog):
    check_parity("s3://bucket/run", tmp_path)
    assert "left out of s3://bucket/run: picture.png" in caplog.text
    assert "hidden" not in caplog.text
    del memory.kept["sub/d.json"]  # then names and formats are those of the folder
    local = plain(tmp_path / "same")
    (tmp_path / "same/plain/sub/d.jsonl").unlink()
    prepare_files(local)
    prepare_files(config(tmp_path / "again"))
    assert token_files(tmp_path / "again") == token_files(tmp_path / "same")


def test_a_folder_of_a_bucket_and_one_object_can_be_named(memory, tmp_path):
    below = open_dataset(config(tmp_path, "s3://bucket/run/sub"), seed=0)
    one = open_dataset(config(tmp_path, "s3://bucket/run/a.jsonl.gz"), seed=0)
    assert (below.num_documents, one.num_documents) == (203, 60)
    [origin] = one.origins
    assert origin.startswith("s3://bucket/run/a.jsonl.gz (1 files, versions ")
    [(url, version)] = one.versions.items()
    assert url == "s3://bucket/run/a.jsonl.gz"
    assert version.startswith(f"{len(FILES['a.jsonl.gz'])} bytes, ETag ")


def test_each_block_is_read_once_and_a_stop_keeps_what_has_come(memory, tmp_path):
    def stop(method: str, name: str) -> None:
        if (method, name) == ("read", "sub/c.parquet"):
            raise UnavailableError("cannot read sub/c.parquet: connection reset")

    memory.before = stop
    with pytest.raises(ValueError, match=r"c\.parquet from the remote in 4 tries"):
        open_dataset(config(tmp_path), seed=0)
    memory.before = lambda method, name: None
    memory.calls.clear()
    open_dataset(config(tmp_path), seed=0)
    reads = [name for method, name in memory.calls if method == "read"]
    num_blocks = -(-len(FILES["sub/c.parquet"]) // 400)
    assert reads.count("sub/c.parquet") == num_blocks
    assert "a.jsonl.gz" not in reads
    memory.calls.clear()
    open_dataset(config(tmp_path), seed=0)
    assert {method for method, _ in memory.calls} == {"objects"}


def _down(method: str, name: str) -> None:
    raise UnavailableError("cannot list s3://bucket/run: connection refused")


def test_a_store_that_is_down_is_said_and_complete_token_files_are_read(
    memory, tmp_path, caplog
):
    memory.before = _down
    with pytest.raises(
        ValueError, match=r"connection refused, and this host has no complete list"
    ):
        open_dataset(config(tmp_path), seed=0)
    memory.before = lambda method, name: None
    whole = open_dataset(config(tmp_path), seed=0)
    memory.before = _down
    again = open_dataset(config(tmp_path), seed=0)
    assert (again.fingerprint, again.versions) == (whole.fingerprint, whole.versions)
    assert "reading the 5 files of the list that this host keeps" in caplog.text


def test_a_new_host_takes_the_list_of_another_while_the_store_is_down(
    memory, tmp_path, monkeypatch
):
    def opened(name: str, rank: int, agreements: list[Agreement]) -> str:
        threading.current_thread().name = name
        cache = CacheConfig(mirror_dir=str(tmp_path / name))
        own = dataclasses.replace(config(tmp_path / "tokens" / name), cache=cache)
        with remote_hosts.shared(own, agreements[rank]) as files:
            dataset = agreements[rank].together(
                lambda: open_dataset(own, seed=0, remote=files)
            )
        return dataset.fingerprint

    def run(*names: str) -> list[str | Exception]:
        agreements = members(len(names))
        return ended(agreements, lambda a: opened(names[a.rank], a.rank, agreements))

    monkeypatch.setattr(hosts, "_own_name", lambda: threading.current_thread().name)
    first = run("a", "b")
    assert first[0] == first[1]
    memory.before = _down
    assert run("new", "a") == first
    refused = run("other", "another")
    assert "no complete list" in str(refused[0])
    assert "no complete list" in str(refused[1])


def test_an_object_that_is_replaced_or_deleted_while_it_is_read_is_refused(
    memory, tmp_path
):
    def replace(method: str, name: str) -> None:
        if (method, name) == ("read", "sub/b.txt"):
            memory.before = lambda method, name: None
            memory.write("sub/b.txt", b"other text of b\n" * 90)

    memory.before = replace
    with pytest.raises(
        ValueError, match=r"s3://bucket/run/sub/b\.txt was replaced .*900 bytes, ETag"
    ):
        open_dataset(config(tmp_path), seed=0)

    def delete(method: str, name: str) -> None:
        if (method, name) == ("read", "sub/b.txt"):
            memory.kept.pop(name, None)

    memory.before = delete
    with pytest.raises(ValueError, match=r"b\.txt was deleted after it was listed"):
        open_dataset(config(tmp_path), seed=0)


def test_a_run_that_goes_on_names_the_object_that_changed(memory, tmp_path):
    def versions() -> dict[str, str]:
        with remote.alone(config(tmp_path)) as files:
            assert files is not None
            return files.versions

    before = versions()
    work_dir.check_data_files(tmp_path, before)  # nothing is recorded yet
    work_dir.keep_data_files(tmp_path, before)
    work_dir.check_data_files(tmp_path, versions())
    memory.write("sub/b.txt", b"longer text of b\n" * 90)
    with pytest.raises(
        ValueError,
        match=r"s3://bucket/run/sub/b\.txt differs from the file that the run in .* "
        r"has read: 900 bytes, ETag .* there, 1530 bytes, ETag .* now; put that "
        r"version back",
    ):
        work_dir.check_data_files(tmp_path, versions())
    memory.kept.pop("sub/b.txt")
    memory.write("e.txt", b"new")
    with pytest.raises(
        ValueError, match=r"e\.txt .* absent there, .*, and 1 more file"
    ):
        work_dir.check_data_files(tmp_path, versions())


class Name(str):
    """A name that counts how often it is compared."""

    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Name.num_compared += 1
        return str.__eq__(self, other)


def test_the_time_of_a_listing_grows_with_the_objects_not_with_their_square(
    memory, tmp_path, monkeypatch
):
    memory.write("a.txt", b"text")
    (one,) = (found for found in memory.objects() if found.name == "a.txt")
    found = [dataclasses.replace(one, name=Name(f"{i}.txt")) for i in range(300)]
    monkeypatch.setattr(memory, "objects", lambda under="": iter(found))
    assert len(bucket_files.list_files("s3://bucket/run", tmp_path).files) == 300
    assert Name.num_compared < 10 * 300


@pytest.mark.parametrize(("every_s", "counts"), [(0, [1, 2, 3, 4, 4]), (1e9, [4])])
def test_hashes_are_kept_after_so_many_seconds_and_at_the_end(
    memory, tmp_path, monkeypatch, every_s, counts
):
    kept: list[int] = []
    write = remote.RemoteFiles._write_hashes

    def count(self: remote.RemoteFiles) -> None:
        kept.append(len(self._digests))
        write(self)

    monkeypatch.setattr(remote.RemoteFiles, "_write_hashes", count)
    monkeypatch.setattr(remote, "SAVE_S", every_s)
    open_dataset(config(tmp_path), seed=0)
    assert kept == counts


def test_what_the_store_refuses_is_passed_on_at_once(memory, tmp_path):
    def refuse(method: str, name: str) -> None:
        if method == "read":
            raise RefusedError("--data.path s3://bucket/run: AccessDenied; set AWS_...")

    memory.before = refuse
    with pytest.raises(ValueError, match=r"AccessDenied; set AWS_"):
        open_dataset(config(tmp_path), seed=0)
    assert [method for method, _ in memory.calls].count("read") == 1


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "s3://bucket/run/sup",
            r"no such object, .*; did you mean s3://bucket/run/sub",
        ),
        ("s3://bucket/run/picture.png", r"no file of text, only picture.png; files"),
    ],
)
def test_a_url_without_text_is_refused(memory, tmp_path, path, message):
    with pytest.raises(ValueError, match=message):
        open_dataset(config(tmp_path, path), seed=0)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3:///a", r"--data.path s3:///a: '' is not the name of a bucket"),
        (
            "https://host/a",
            r"--data.path must be s3://BUCKET/PREFIX or gs://.* 'https:",
        ),
        ("s3a://bucket/a", r"--data.path must be s3://BUCKET/PREFIX"),
    ],
)
def test_a_url_that_is_none_is_refused_with_the_flags(path, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(path=(path,))
    with pytest.raises(ValueError, match=message):
        DataConfig(mixture=(f"1={path}",))


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs obstore; pip install 'mjax\[gs\]'"):
        open_dataset(config(tmp_path, "gs://bucket/run"), seed=0)


# ------------------------------------------------------------------------- real servers


@pytest.mark.stores
@pytest.mark.parametrize("name", ["s3_url", "gs_url"])
def test_servers_are_read_as_a_folder_and_a_changed_object_is_noticed(
    name, request, tmp_path, caplog
):
    caplog.set_level(logging.WARNING)
    url = request.getfixturevalue(name)
    store = open_store(address.parse(url, "--flag"), "--flag", patience_s=2)
    for file, content in (FILES | OTHERS).items():
        store.write(file, content)
    check_parity(url, tmp_path)
    assert f"left out of {url}: picture.png" in caplog.text
    own = config(tmp_path / "remote", url)
    with remote.alone(own) as files:
        assert files is not None
        before = files.versions
        store.write("sub/b.txt", b"other text\n" * 90)
        changed = [path for n, path in files.files(url) if n == "sub/b.txt"]
        for block in (tmp_path / "remote/tokens/blocks").glob("*.block"):
            block.unlink()
        with pytest.raises(ValueError, match=r"b\.txt was replaced after it was list"):
            changed[0].open().read(10)
    with remote.alone(own) as files:
        assert files is not None
        now = files.versions
    assert [u for u in now if now[u] != before[u]] == [f"{url}/sub/b.txt"]


@pytest.mark.stores
def test_a_bucket_that_is_not_there_and_a_server_that_stops_are_said(
    s3_url, s3_server, tmp_path, monkeypatch, caplog
):
    with pytest.raises(
        ValueError, match=r"--data.path s3://no-bucket/a: there is no bucket no-bucket"
    ):
        open_dataset(config(tmp_path, "s3://no-bucket/a"), seed=0)
    store = open_store(address.parse(s3_url, "--flag"), "--flag", patience_s=2)
    store.write("sub/b.txt", FILES["sub/b.txt"])
    whole = open_dataset(config(tmp_path, s3_url), seed=0)
    monkeypatch.setattr(bucket_files, "_PATIENCE_S", 1)
    s3_server.stop()
    assert open_dataset(config(tmp_path, s3_url), seed=0).fingerprint == (
        whole.fingerprint
    )
    assert "reading the 1 files of the list" in caplog.text
    own = dataclasses.replace(
        config(tmp_path / "other", s3_url),
        cache=CacheConfig(mirror_dir=str(tmp_path / "blocks")),
    )
    with pytest.raises(ValueError, match="has no complete list of its files; start"):
        open_dataset(own, seed=0)
    s3_server.start()
    assert open_dataset(own, seed=0).fingerprint == whole.fingerprint
