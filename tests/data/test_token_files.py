import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from mjax.data import token_files
from mjax.data.dataset import DataConfig, open_dataset
from mjax.data.documents import DocumentSamples
from mjax.data.samples import PackedSamples, Samples
from mjax.data.stream import HeldOut, Stream

# Opens the corpus argv[1] with the cache argv[2]. With argv[3] it stops in the middle,
# tells so by creating that file, and waits to be killed.
OPEN = """
import pathlib, sys, time
from mjax.data import prepare
from mjax.data.dataset import DataConfig, open_dataset
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
    return samples.stream


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
    assert isinstance(stream(dataset.train).base, np.memmap)


def test_a_failed_build_leaves_no_folder(corpus, tmp_path):
    (corpus / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"bad\.txt is not UTF-8"):
        open_dataset(config(corpus, tmp_path / "cache"), seed=0)
    assert folders(tmp_path / "cache") == []


def test_damaged_files_are_noticed(corpus, tmp_path):
    open_dataset(config(corpus, tmp_path / "cache"), seed=0)
    (path,) = (tmp_path / "cache").glob("*/train.tokens")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(RuntimeError, match=r"instead of \d+; delete"):
        open_dataset(config(corpus, tmp_path / "cache"), seed=0)


def test_a_cache_folder_that_cannot_be_written_is_refused(corpus, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"cannot be written .*; set --data.cache-dir"):
        open_dataset(config(corpus, tmp_path / "file" / "cache"), seed=0)
    assert token_files.default_cache_dir().parts[-2:] == ("mjax", "tokens")


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


@pytest.mark.parametrize("num_bytes", [0, 100, 200])
def test_a_damaged_index_of_documents_is_noticed(corpus, tmp_path, num_bytes):
    unpacked = config(corpus, tmp_path / "cache", packing="documents")
    open_dataset(unpacked, seed=0)
    (path,) = (tmp_path / "cache").glob("*/train.documents-16.npy")
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(RuntimeError, match=r"documents-16.npy is damaged; delete it"):
        open_dataset(unpacked, seed=0)


def test_what_a_killed_writer_of_an_index_left_is_removed(corpus, tmp_path):
    open_dataset(config(corpus, tmp_path / "cache"), seed=0)
    (folder,) = folders(tmp_path / "cache")
    left = folder / f"train.documents-16.tmp-{socket.gethostname()}-1"
    left.write_bytes(b"half")
    open_dataset(config(corpus, tmp_path / "cache", packing="documents"), seed=0)
    assert not left.exists()
    assert not [path for path in folder.iterdir() if ".tmp-" in path.name]
