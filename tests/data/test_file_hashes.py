import hashlib
import mmap
import os
import pathlib
import time

import pytest

from mjax.data import file_hashes
from mjax.data.file_hashes import hash_files


@pytest.fixture
def files(tmp_path, monkeypatch) -> list[pathlib.Path]:
    """Three files whose hashes are remembered although they are new."""
    monkeypatch.setattr(file_hashes, "_SETTLED_NS", 0)
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_text(path.name * 10)
    wait_for_the_clock(tmp_path)
    return paths


def wait_for_the_clock(folder: pathlib.Path) -> None:
    """Return when the file system gives other times than before."""
    probe = folder / "probe"
    probe.touch()
    first = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns == first:
        time.sleep(0.001)
        probe.touch()


@pytest.fixture
def hashed(monkeypatch) -> list[str]:
    """Names of the files that were read."""
    names, original = [], file_hashes._hash
    monkeypatch.setattr(
        file_hashes,
        "_hash",
        lambda path, s: names.append(path.name) or original(path, s),
    )
    return names


def digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_is_read_once_whatever_its_name(files, tmp_path, hashed):
    cache = tmp_path / "cache"
    expected = {path: digest(path) for path in files}
    for _ in range(2):
        assert hash_files(files, cache) == expected
    assert hashed == ["a", "b", "c"]
    link = tmp_path / "link"
    link.symlink_to(files[2])
    assert hash_files([link], cache) == {link: expected[files[2]]}
    assert hashed == ["a", "b", "c"]


@pytest.mark.parametrize("change", ["written", "replaced", "mapped"])
def test_a_change_that_keeps_size_and_time_is_noticed(files, tmp_path, change):
    cache, path = tmp_path / "cache", files[1]
    hash_files(files, cache)
    stat = path.stat()
    match change:
        case "written":
            path.write_text("x" * 10)
        case "replaced":
            (tmp_path / "other").write_text("x" * 10)
            (tmp_path / "other").rename(path)
        case "mapped":
            with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
                content[:] = b"x" * 10
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (10, stat.st_mtime_ns)
    assert hash_files(files, cache)[path] == hashlib.sha256(b"x" * 10).hexdigest()


def test_a_file_that_changed_a_moment_ago_is_not_remembered(
    files, tmp_path, hashed, monkeypatch
):
    monkeypatch.setattr(file_hashes, "_SETTLED_NS", 10**15)
    for _ in range(2):
        hash_files(files[:1], tmp_path / "cache")
    assert hashed == ["a", "a"]


def test_a_file_that_changes_while_it_is_read_is_refused(files, tmp_path, monkeypatch):
    def grow(file, name):
        files[0].write_text("more")
        return hashlib.new(name, file.read())

    monkeypatch.setattr(hashlib, "file_digest", grow)
    with pytest.raises(ValueError, match="a changed while it was read; start again"):
        hash_files(files, tmp_path / "cache")


def test_what_was_hashed_before_an_interrupt_is_kept(files, tmp_path, monkeypatch):
    original, done = file_hashes._hash, []

    def interrupted(path, state):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(path.name)
        return original(path, state)

    monkeypatch.setattr(file_hashes, "_hash", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hash_files(files, tmp_path / "cache")
    done.clear()
    hash_files(files, tmp_path / "cache")
    assert done == ["c"]


def test_a_damaged_table_is_made_again(files, tmp_path, hashed, caplog):
    cache = tmp_path / "cache"
    hash_files(files, cache)
    table = cache / "file_hashes.json"
    content = table.read_bytes()
    table.write_bytes(content[:-20])
    hash_files(files, cache)
    assert "does not match its checksum; files are hashed again" in caplog.text
    assert table.read_bytes() == content
    assert len(hashed) == 6


def test_the_table_keeps_one_state_of_each_file(files, tmp_path):
    cache = tmp_path / "cache"
    sizes = set()
    for _ in range(4):
        files[0].write_text("y" * 10)
        wait_for_the_clock(tmp_path)
        hash_files(files, cache)
        sizes.add((cache / "file_hashes.json").read_text().count(digest(files[1])))
        sizes.add((cache / "file_hashes.json").read_text().count("["))
    assert sizes == {1, 4}


def test_a_cache_that_cannot_be_written_is_said_and_hashes_are_right(
    files, tmp_path, caplog
):
    (tmp_path / "in the way").write_text("")
    cache = tmp_path / "in the way" / "cache"
    assert hash_files(files, cache) == {path: digest(path) for path in files}
    assert "hashes of files cannot be remembered in" in caplog.text


def test_a_file_that_is_gone_is_named(files, tmp_path):
    with pytest.raises(ValueError, match="nothing cannot be read: No such file"):
        hash_files([tmp_path / "nothing"], tmp_path / "cache")
