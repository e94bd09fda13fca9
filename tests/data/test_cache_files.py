import os
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.data import cache_files
from mjax.data.cache_files import (
    BlockWriter,
    DamagedFileError,
    MappedTokens,
    checksums_path,
    read_json,
    write_json,
)

BLOCK = 16


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_files, "BLOCK_BYTES", BLOCK)
    return tmp_path / "a.tokens"


def mapped(path) -> MappedTokens:
    num_tokens = path.stat().st_size // 2
    checksums = checksums_path(path).read_bytes()
    return MappedTokens(path, np.dtype(np.uint16), num_tokens, checksums)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8, 9, 40])
def test_tokens_read_are_those_written_in_parts_of_any_size(path, num_tokens):
    tokens = np.arange(num_tokens, dtype=np.uint16)
    for part_bytes in (1, 2, 15, 16, 17, 100):
        data = tokens.tobytes()
        with BlockWriter(path) as file:
            for start in range(0, len(data), part_bytes):
                file.write(data[start : start + part_bytes])
        read = mapped(path)
        assert len(read) == num_tokens
        np.testing.assert_array_equal(read[:], tokens)
        np.testing.assert_array_equal(read[2:5], tokens[2:5])
        num_blocks = -(-len(data) // BLOCK)
        assert checksums_path(path).stat().st_size == 4 * num_blocks


def test_only_slices_that_touch_the_damaged_block_are_refused(path):
    tokens = np.arange(40, dtype=np.uint16)
    with BlockWriter(path) as file:
        file.write(tokens.tobytes())
    content = bytearray(path.read_bytes())
    content[2 * 17] ^= 1  # token 17, in the third block of 8 tokens
    path.write_bytes(content)
    for start in range(40):
        for stop in range(start + 1, 41):
            read = mapped(path)
            if start < 24 and stop > 16:
                with pytest.raises(DamagedFileError, match="bytes 32 to 47 do not"):
                    read[start:stop]
            else:
                np.testing.assert_array_equal(read[start:stop], tokens[start:stop])


def test_a_block_is_compared_once(path, monkeypatch):
    with BlockWriter(path) as file:
        file.write(bytes(100))
    read, checked = mapped(path), []
    check = MappedTokens._check
    monkeypatch.setattr(
        MappedTokens, "_check", lambda self, b: (checked.append(b), check(self, b))
    )
    for index in (slice(0, 9), slice(0, 20), slice(10, 50), slice(0, 50)):
        read[index]
    assert checked == [0, 1, 2, 3, 4, 5, 6]


def test_who_waits_for_a_lock_says_once_for_whom(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(cache_files, "_QUIET_S", 0.0)
    path, entered = tmp_path / "corpus", []

    def enter() -> None:
        with cache_files.locked(path):
            entered.append("second")

    with cache_files.locked(path):
        thread = threading.Thread(target=enter)
        thread.start()
        while "waiting" not in caplog.text:
            assert thread.is_alive()
            time.sleep(0.01)
        assert entered == []
    thread.join()
    assert entered == ["second"]
    me = f"process {os.getpid()} of {socket.gethostname()}"
    assert caplog.messages == [f"waiting for {me}, which writes {path}"]


def test_a_lock_that_is_free_is_taken_in_silence(tmp_path, caplog):
    caplog.set_level("INFO")
    for _ in range(2):
        with cache_files.locked(tmp_path / "corpus"):
            pass
    assert caplog.messages == []


@given(flip=st.integers(0, 10_000), cut=st.integers(1, 10_000))
def test_json_that_was_cut_or_altered_is_refused(tmp_path_factory, flip, cut):
    path = tmp_path_factory.mktemp("json") / "a.json"
    write_json(path, {"a": [1, 2.5, None], "é": "x\ny"})
    assert read_json(path) == {"a": [1, 2.5, None], "é": "x\ny"}
    content = path.read_bytes()
    altered = bytearray(content)
    altered[flip % len(content)] ^= 1 << flip % 8
    for bad in (bytes(altered), content[: -1 - cut % len(content)]):
        path.write_bytes(bad)
        with pytest.raises(DamagedFileError, match="does not match its checksum"):
            read_json(path)
