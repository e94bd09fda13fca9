"""A preparation that is killed at any moment ends with the files of a whole one."""

import dataclasses
import hashlib
import json
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from mjax.data import cache_files, compressed, prepare, token_files, unfinished
from mjax.data.__main__ import main
from mjax.data.cache_files import BlockWriter, DamagedFileError, checksums_path
from mjax.data.config import DataConfig
from mjax.data.dataset import prepare_files

# Prepares argv[3:] and kills itself at the argv[2]-th call of what argv[1] names.
KILLED = """
import os, signal, sys
from mjax.data import cache_files, formats, prepare, token_files, unfinished
from mjax.data.__main__ import main
formats.PIECE_CHARS = 300
unfinished.SAVE_S, prepare._BATCH_CHARS = 0, 400
owner, name = {
    "save": (unfinished.Unfinished, "put"),
    "sync": (cache_files.BlockWriter, "sync"),
    "write": (cache_files.BlockWriter, "write"),
    "rename": (token_files, "_rename"),
}[sys.argv[1]]
original, calls = getattr(owner, name), int(sys.argv[2])
def counted(*args):
    global calls
    calls -= 1
    if calls == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args)
setattr(owner, name, counted)
sys.exit(main(["prepare", *sys.argv[3:]]))
"""


def words(index: int) -> str:
    numbers = np.random.default_rng(index).integers(1000, size=60)
    return " ".join(f"wörd{number}" for number in numbers)


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    path = tmp_path / "corpus"
    path.mkdir()
    for name, numbers in {"a": range(40), "b": range(40, 90)}.items():
        lines = [json.dumps({"text": words(i)}) for i in numbers]
        (path / f"{name}.jsonl").write_text("\n".join(lines))
    (path / "c.txt").write_text("\n".join(words(i) for i in range(90, 130)))
    return path


def contents(cache: pathlib.Path) -> dict[str, str]:
    [found] = [path for path in cache.iterdir() if path.is_dir()]
    assert ".tmp-" not in found.name
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(found.iterdir())
    }


def run(moment: str, number: int, *args: str) -> int:
    command = [sys.executable, "-c", KILLED, moment, str(number), *args]
    return subprocess.run(command, capture_output=True, check=False).returncode


def flags(paths: list[pathlib.Path], cache: pathlib.Path) -> list[str]:
    return ["--data.path", *map(str, paths), "--data.cache-dir", str(cache)]


@pytest.mark.parametrize("is_one_file", [False, True])
def test_a_preparation_killed_at_any_point_gives_the_files_of_a_whole_one(
    folder, tmp_path, is_one_file
):
    """One file is split by position, several by document."""
    paths = [folder / "c.txt"] if is_one_file else [folder]
    assert run("save", 10**6, *flags(paths, tmp_path / "whole")) == 0
    whole = contents(tmp_path / "whole")
    cache = tmp_path / "cache"
    moments = [("write", 2), ("save", 4), ("sync", 4), ("rename", 1)]
    for moment, number in moments[1:3] if is_one_file else moments:
        assert run(moment, number, *flags(paths, cache)) == -signal.SIGKILL
        [left] = [path for path in cache.iterdir() if path.is_dir()]
        assert (left / "unfinished.json").exists(), "what was done is known to the end"
        assert left.name.endswith("-unfinished")
    assert run("save", 10**6, *flags(paths, cache)) == 0
    assert contents(cache) == whole


def interrupted(config: DataConfig, monkeypatch, batches: int) -> None:
    """Stop a preparation, as Ctrl-C does, behind so many batches."""
    left = batches

    def advance(self, place, meter):
        nonlocal left
        original(self, place, meter)
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    original = prepare._Streams.advance
    with monkeypatch.context() as patch:
        patch.setattr(unfinished, "SAVE_S", 0)
        patch.setattr(prepare, "_BATCH_CHARS", 400)
        patch.setattr(prepare._Streams, "advance", advance)
        with pytest.raises(KeyboardInterrupt):
            prepare_files(config)


@pytest.mark.parametrize("tokenizer", ["bytes", "train:290"])
def test_what_was_done_is_not_done_again(folder, tmp_path, monkeypatch, tokenizer):
    config = DataConfig(
        path=(str(folder),), cache_dir=str(tmp_path / "cache"), tokenizer=tokenizer
    )
    interrupted(config, monkeypatch, 5)
    names = []
    original = prepare.split_pieces

    def split_pieces(documents, *args):
        def noted():
            for document in documents():
                names.append(document.name)
                yield document

        return original(noted, *args)

    with monkeypatch.context() as patch:
        patch.delattr(prepare, "survey")
        patch.delattr(token_files, "train_bpe")
        patch.setattr(prepare, "split_pieces", split_pieces)
        prepare_files(config)
    assert "a.jsonl:1" not in names
    assert names[-1] == "c.txt"


def altered(path: pathlib.Path, monkeypatch, at_batch: int, *, restore: bool) -> bytes:
    """Change a file of a corpus while it is tokenized; kill the process in the third.

    The change is undone at once if asked to.
    """
    before, number = path.read_bytes(), 0
    original = prepare._Streams.advance

    def advance(self, place, meter):
        nonlocal number
        number += 1
        if number == at_batch:
            path.write_bytes(before.replace(b"w", b"W"))
            if restore:
                path.write_bytes(before)
        original(self, place, meter)
        if place.source_index == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(unfinished, "SAVE_S", 0)
    monkeypatch.setattr(prepare, "_BATCH_CHARS", 400)
    monkeypatch.setattr(prepare._Streams, "advance", advance)
    return before


def test_a_file_that_is_changed_before_a_kill_and_put_back_after_it_is_noticed(
    folder, tmp_path, monkeypatch
):
    config = DataConfig(path=(str(folder),), cache_dir=str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        before = altered(folder / "c.txt", patch, 3, restore=False)
        with pytest.raises(ValueError, match=r"c\.txt changed while it was read"):
            prepare_files(config)
    (folder / "c.txt").write_bytes(before)
    prepare_files(config)
    own = DataConfig(path=(str(folder),), cache_dir=str(tmp_path / "own"))
    prepare_files(own)
    assert contents(tmp_path / "cache") == contents(tmp_path / "own")


def test_a_change_that_is_undone_keeps_what_was_done_before_it(
    folder, tmp_path, monkeypatch
):
    config = DataConfig(path=(str(folder),), cache_dir=str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        altered(folder / "c.txt", patch, 5, restore=True)
        with pytest.raises(ValueError, match=r"c\.txt was changed.*back.*start again"):
            prepare_files(config)
    [left] = (tmp_path / "cache").glob("*-unfinished")
    assert json.loads((left / "unfinished.json").read_text())["content"]["facts"]
    prepare_files(config)
    own = DataConfig(path=(str(folder),), cache_dir=str(tmp_path / "own"))
    prepare_files(own)
    assert contents(tmp_path / "cache") == contents(tmp_path / "own")


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_trained_tokenizer_that_is_lost_or_damaged_is_trained_again(
    folder, tmp_path, monkeypatch, is_missing
):
    config = DataConfig(
        path=(str(folder),), cache_dir=str(tmp_path / "cache"), tokenizer="train:290"
    )
    interrupted(config, monkeypatch, 5)
    [left] = (tmp_path / "cache").glob("*-unfinished")
    (left / "tokenizer.json").write_text("{")
    if is_missing:
        (left / "tokenizer.json").unlink()
    prepare_files(config)
    own = dataclasses.replace(config, cache_dir=str(tmp_path / "own"))
    prepare_files(own)
    assert contents(tmp_path / "cache") == contents(tmp_path / "own")


def test_damaged_and_foreign_beginnings_are_not_continued(
    folder, tmp_path, monkeypatch, caplog
):
    config = DataConfig(path=(str(folder),), cache_dir=str(tmp_path / "cache"))
    own = DataConfig(path=(str(folder),), cache_dir=str(tmp_path / "own"))
    prepare_files(own)
    interrupted(config, monkeypatch, 5)
    [left] = (tmp_path / "cache").glob("*-unfinished")
    (left / "train.tokens").write_bytes(b"cut")
    prepare_files(config)
    assert "less than the" in caplog.text
    assert "tokenized again from the beginning" in caplog.text
    assert contents(tmp_path / "cache") == contents(tmp_path / "own")

    again = DataConfig(path=(str(folder),), cache_dir=str(tmp_path / "again"))
    interrupted(again, monkeypatch, 5)
    with monkeypatch.context() as patch:
        patch.setattr(token_files, "_versions", lambda: ["mjax 9"])
        prepare_files(again)
    assert "this is mjax 9; it starts over" in caplog.text
    assert contents(tmp_path / "again") == contents(tmp_path / "own")


@pytest.mark.parametrize("place", ["cache", "source"])
def test_a_disk_that_fails_takes_nothing_that_was_done(
    folder, tmp_path, monkeypatch, place
):
    config = DataConfig(path=(str(folder),), cache_dir=str(tmp_path / "cache"))
    interrupted(config, monkeypatch, 5)
    [left] = (tmp_path / "cache").glob("*-unfinished")
    before = (left / "unfinished.json").read_bytes()

    def fails(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if place == "cache":
            patch.setattr(unfinished, "SAVE_S", 0)
            patch.setattr(cache_files, "write_json", fails)
        else:
            patch.setattr(compressed._Counted, "readinto", fails)
        with pytest.raises(ValueError, match="No space left on device"):
            prepare_files(config)
    assert (left / "unfinished.json").read_bytes() == before
    prepare_files(config)


def test_what_nobody_continues_is_told_listed_and_removed(
    folder, tmp_path, monkeypatch, caplog, capsys
):
    cache = tmp_path / "cache"
    config = DataConfig(path=(str(folder),), cache_dir=str(cache))
    interrupted(config, monkeypatch, 5)
    [left] = cache.glob("*-unfinished")
    elsewhere = left.with_name(f"{'0' * 32}.tmp-other-host-unfinished")
    shutil.copytree(left, elsewhere)

    caplog.set_level("INFO")
    prepare_files(dataclasses.replace(config, path=(str(folder / "c.txt"),)))
    assert "2 unfinished preparations take 0.00 GB in" in caplog.text
    assert "python -m mjax.data unfinished lists and removes them" in caplog.text

    command = ["unfinished", "--cache-dir", str(cache)]
    with cache_files.locked(
        cache / left.name.partition(".")[0]
    ):  # somebody works on it
        assert main([*command, "--remove"]) == 0
        assert left.name not in capsys.readouterr().out
    assert main(command) == 0
    listed = capsys.readouterr().out
    assert left.name in listed
    assert "ago on other-host" in listed
    assert left.exists()
    assert main([*command, "--remove"]) == 0
    assert f"removed  {left.name}" in capsys.readouterr().out
    assert not left.exists()
    assert elsewhere.exists(), "its processes cannot be seen from here"
    shutil.rmtree(elsewhere)
    assert main(command) == 0
    assert capsys.readouterr().out == f"none in {cache}\n"
    assert len([*cache.glob("*/manifest.json")]) == 1


def test_a_writer_goes_on_where_another_was_synced(tmp_path):
    rng = np.random.default_rng(0)
    parts = [rng.bytes(size) for size in (70_000, 5, 131_072, 61_067, 1, 0)]
    with BlockWriter(tmp_path / "whole.tokens") as file:
        for part in parts:
            file.write(part)
    path, written = tmp_path / "parts.tokens", None
    for part in parts:
        with BlockWriter(path, written) as file:
            file.write(part)
            written = file.sync()
            file.write(b"lost when the process is killed")
    with BlockWriter(path, written):
        pass
    for name in (path, checksums_path(path)):
        whole = name.with_name(name.name.replace("parts", "whole"))
        assert name.read_bytes() == whole.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(DamagedFileError, match=r"less than the \d+ bytes"):
        BlockWriter(path, written)


def test_a_line_of_progress_counts_only_the_work_of_this_process():
    meter = unfinished.Meter("tokenizing", 10**10, num_bytes=4 * 10**9)
    meter.add(10**9, documents=5000, tokens=10**8)
    assert meter.line(100.0) == (
        "tokenizing: 5.00 of 10.00 GB (50%), 5,000 documents, 10.0 MB/s, "
        "1,000,000 tokens/s, 8 min left"
    )


def test_no_time_left_is_reported_before_anything_is_read():
    meter = unfinished.Meter("reading", 663)
    meter.add(0, documents=1)
    assert meter.line(5.0) == ("reading: 0.00 of 0.00 GB (0%), 1 documents, 0.0 MB/s")
