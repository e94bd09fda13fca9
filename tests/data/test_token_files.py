import dataclasses
import errno
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from mjax.data import cache_files, prepare, token_files
from mjax.data.cache_files import DamagedFileError
from mjax.data.config import DataConfig
from mjax.data.dataset import open_dataset
from mjax.data.documents import DocumentSamples
from mjax.data.samples import PackedSamples, Samples
from mjax.data.stream import HeldOut, Stream

# Opens the corpus argv[1] with the cache argv[2]. With argv[3] it stops in the middle,
# tells so by creating that file, and waits to be killed.
OPEN = """
import pathlib, sys, time
from mjax.data import prepare
from mjax.data.config import DataConfig; from mjax.data.dataset import open_dataset
write = prepare.write_streams
def write_and_wait(*args):
    streams = write(*args)
    print("built", flush=True)
    if len(sys.argv) > 3:
        pathlib.Path(sys.argv[3]).touch()
        time.sleep(600)
    return streams
prepare.write_streams = write_and_wait
config = DataConfig(path=(sys.argv[1],), cache_dir=sys.argv[2], seq_len=16)
print(open_dataset(config, seed=0).fingerprint)
"""


def start(*args: pathlib.Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OPEN, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def config(corpus: pathlib.Path, cache: pathlib.Path, **changes) -> DataConfig:
    return DataConfig(path=(str(corpus),), cache_dir=str(cache), seq_len=16, **changes)


def stream(side: Stream | Samples) -> np.ndarray:
    assert isinstance(side, Stream | HeldOut)
    (samples,) = side.corpora
    assert isinstance(samples, PackedSamples)
    return samples.stream[:]


def folders(cache: pathlib.Path) -> list[pathlib.Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_processes_that_start_together_build_once_and_agree(corpus, tmp_path):
    cache = tmp_path / "cache"
    running = [start(corpus, cache) for _ in range(3)]
    lines = [process.communicate()[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert sorted(len(line) for line in lines) == [1, 1, 2], "one process builds"
    expected = open_dataset(config(corpus, tmp_path / "own"), seed=0).fingerprint
    assert {line[-1] for line in lines} == {expected}
    assert len(folders(cache)) == 1


def test_a_killed_build_leaves_nothing_behind_that_counts(corpus, tmp_path):
    cache, reached = tmp_path / "cache", tmp_path / "reached"
    process = start(corpus, cache, reached)
    while not reached.exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert [".tmp-" in folder.name for folder in folders(cache)] == [True]
    dataset = open_dataset(config(corpus, cache), seed=0)
    fresh = open_dataset(config(corpus, tmp_path / "own"), seed=0)
    assert (stream(dataset.train) == stream(fresh.train)).all()
    assert [".tmp-" in folder.name for folder in folders(cache)] == [False]


def test_a_second_opening_reads_the_cache_and_gives_the_same(
    corpus, tmp_path, monkeypatch
):
    for tokenizer in ("bytes", "train:290"):
        again = config(corpus, tmp_path / "cache", tokenizer=tokenizer)
        first = open_dataset(again, seed=0)
        with monkeypatch.context() as patch:
            patch.delattr(token_files, "_build")
            second = open_dataset(again, seed=0)
        assert (stream(first.train) == stream(second.train)).all()
        assert first.fingerprint == second.fingerprint
        assert first.tokenizer.digest == second.tokenizer.digest


def test_token_files_are_mapped_not_read(corpus, tmp_path):
    dataset = open_dataset(config(corpus, tmp_path / "cache"), seed=0)
    view = stream(dataset.train)
    while not isinstance(view, np.memmap):
        assert view.base is not None
        view = view.base


def test_a_failed_build_leaves_no_folder(corpus, tmp_path):
    (corpus / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"bad\.txt is not UTF-8"):
        open_dataset(config(corpus, tmp_path / "cache"), seed=0)
    assert folders(tmp_path / "cache") == []


def fresh(corpus: pathlib.Path, tmp_path: pathlib.Path, **changes) -> DataConfig:
    """Build the token files of a corpus; return the config that opens them."""
    again = config(corpus, tmp_path / "cache", **changes)
    open_dataset(again, seed=0)
    return again


def test_folders_with_the_same_names_sizes_and_times_have_their_own_tokens(tmp_path):
    streams = []
    for letter in "ab":
        folder = tmp_path / letter
        folder.mkdir()
        for index in range(30):
            file = folder / f"{index:02}.txt"
            file.write_text(letter * (50 + index))
            os.utime(file, ns=(10**18, 10**18))
        dataset = open_dataset(config(folder, tmp_path / "cache"), seed=0)
        streams.append(set(stream(dataset.train).tolist()))
    assert streams == [{ord("a"), 256}, {ord("b"), 256}]


def test_a_file_replaced_with_its_size_and_time_kept_is_noticed(corpus, tmp_path):
    again = config(corpus, tmp_path / "cache")
    before = open_dataset(again, seed=0)
    file = corpus / "00.txt"
    stat = file.stat()
    file.write_text(file.read_text().replace("alpha", "ALPHA"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    assert file.stat().st_mtime_ns == stat.st_mtime_ns
    assert open_dataset(again, seed=0).fingerprint != before.fingerprint


@pytest.mark.parametrize("offset", [0, 101, -1])
@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_a_flipped_bit_is_refused_when_it_is_read(corpus, tmp_path, offset, packing):
    again = fresh(corpus, tmp_path, packing=packing)
    (path,) = (tmp_path / "cache").glob("*/train.tokens")
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)
    train = open_dataset(again, seed=0).train
    message = r"train\.tokens is damaged: bytes 0 to \d+ do not .*; delete the folder"
    for _ in range(2):  # it is not forgotten
        with pytest.raises(DamagedFileError, match=message):
            train.rows(0, 4)


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "train.tokens", "held_out.crc32", "tokenizer.json"],
)
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "altered", "a folder"])
def test_what_is_damaged_when_it_is_opened_is_built_again(
    corpus, tmp_path, caplog, name, damage
):
    if (name, damage) == ("train.tokens", "altered"):
        name = "train.crc32"  # tokens of the same size are compared when they are read
    again = fresh(corpus, tmp_path, tokenizer="train:290")
    before = open_dataset(again, seed=0)
    (path,) = (tmp_path / "cache").glob(f"*/{name}")
    content = path.read_bytes()
    path.unlink()
    match damage:
        case "empty":
            path.write_bytes(b"")
        case "cut":
            path.write_bytes(content[:-2])
        case "altered":
            path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        case "a folder":
            path.mkdir()
    after = open_dataset(again, seed=0)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert f"{path}" in caplog.text
    assert "is built again" in caplog.text
    assert path.read_bytes() == content
    assert after.fingerprint == before.fingerprint
    assert (stream(after.train) == stream(before.train)).all()
    assert len(folders(tmp_path / "cache")) == 1


@pytest.mark.parametrize("moment", ["survey", "write_streams"])
def test_files_that_change_while_they_are_tokenized_are_noticed(
    corpus, tmp_path, monkeypatch, moment
):
    original = getattr(prepare, moment)

    def change_before(*args):
        (corpus / "30.txt").write_text("other words\n" * 9)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(prepare, moment, change_before)
        with pytest.raises(
            ValueError, match=r"30\.txt changed while it was read; start"
        ):
            fresh(corpus, tmp_path)
    assert folders(tmp_path / "cache") == []
    dataset = open_dataset(config(corpus, tmp_path / "cache"), seed=0)
    own = open_dataset(config(corpus, tmp_path / "own"), seed=0)
    assert dataset.fingerprint == own.fingerprint


def test_a_disk_that_fills_up_while_tokens_are_written_is_a_message(
    corpus, tmp_path, monkeypatch
):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare, "write_streams", fail)
    with pytest.raises(
        ValueError, match=r"the cache folder .* \(No space left on device\)"
    ):
        fresh(corpus, tmp_path)


def test_a_cache_folder_that_cannot_be_written_is_refused(corpus, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"cannot be written .*; set --data.cache-dir"):
        open_dataset(config(corpus, tmp_path / "file" / "cache"), seed=0)
    assert cache_files.cache_dir(None).parts[-2:] == ("mjax", "tokens")


def documents_of(side: Stream | HeldOut) -> np.ndarray:
    (samples,) = side.corpora
    assert isinstance(samples, DocumentSamples)
    return samples.index


def test_documents_are_found_once_and_mapped(corpus, tmp_path, monkeypatch):
    unpacked = config(corpus, tmp_path / "cache", packing="documents")
    first = open_dataset(unpacked, seed=0)
    with monkeypatch.context() as patch:
        patch.delattr(token_files, "index_documents")
        second = open_dataset(unpacked, seed=0)
    for side in ("train", "held_out"):
        index = documents_of(getattr(second, side))
        assert isinstance(index.base, np.memmap)
        assert (index == documents_of(getattr(first, side))).all()
        assert index.shape[1] == first.corpora[0].counts[side].num_documents + 1
    other = open_dataset(dataclasses.replace(unpacked, seq_len=5), seed=0)
    assert other.train.num_samples > first.train.num_samples


@pytest.mark.parametrize("damage", ["empty", "cut", "altered"])
def test_a_damaged_index_of_documents_is_built_again(corpus, tmp_path, caplog, damage):
    unpacked = fresh(corpus, tmp_path, packing="documents")
    (path,) = (tmp_path / "cache").glob("*/train.documents-16-started.npy")
    content = path.read_bytes()
    altered = content[:200] + bytes([content[200] ^ 1]) + content[201:]
    damaged = {"empty": b"", "cut": content[:-4], "altered": altered}
    path.write_bytes(damaged[damage])
    open_dataset(unpacked, seed=0)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert (
        "train.documents-16-started.npy is missing or damaged; it is built"
        in caplog.text
    )
    assert path.read_bytes() == content


def test_what_a_killed_writer_of_an_index_left_is_removed(corpus, tmp_path):
    open_dataset(config(corpus, tmp_path / "cache"), seed=0)
    (folder,) = folders(tmp_path / "cache")
    left = folder / f"train.documents-16-started.npy.tmp-{socket.gethostname()}-1"
    left.write_bytes(b"half")
    open_dataset(config(corpus, tmp_path / "cache", packing="documents"), seed=0)
    assert not left.exists()
    assert not [path for path in folder.iterdir() if ".tmp-" in path.name]
