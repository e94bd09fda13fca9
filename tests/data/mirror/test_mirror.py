"""A mirror of four hosts on loopback, with a remote that counts what is read."""

import collections
import contextlib
import dataclasses
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading

import pytest

from mjax.data.mirror import placement
from mjax.data.mirror.blocks import BlockStore, InUseError, purge, sealed
from mjax.data.mirror.mirror import Mirror, WrongContentError
from tests.data.mirror.four_hosts import (
    CONTENT,
    HOSTS,
    Remote,
    free_addresses,
    read_all,
    sha256,
    terms,
)


def test_four_hosts_read_each_remote_block_once(mirrors):
    made, remote = mirrors
    for mirror in made.values():
        assert read_all(mirror) == CONTENT
    assert set(remote.reads.values()) == {1}
    assert len(remote.reads) == 59


def test_a_lost_host_fails_no_read_and_reads_no_remote_byte_again(mirrors, tmp_path):
    made, remote = mirrors
    for mirror in made.values():
        mirror.fill()
    assert set(remote.reads.values()) == {1}
    kept = [len([*(tmp_path / h).glob("*.block")]) for h in HOSTS]
    assert sum(kept) == 59 * 3
    assert max(abs(num - 59 * 3 / 4) for num in kept) <= 0.1 * 59 * 3 / 4
    made.pop("b").close()
    for mirror in made.values():
        assert read_all(mirror) == CONTENT
    assert set(remote.reads.values()) == {1}


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_block_is_said_and_comes_from_another_host(
    mirrors, tmp_path, caplog, damage
):
    made, remote = mirrors
    for mirror in made.values():
        mirror.fill()
    for path in (tmp_path / "a").glob("*.block"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        kept = {"flip": content, "cut": content[:40], "empty": b""}[damage]
        path.write_bytes(kept)
    assert read_all(made["a"]) == CONTENT
    assert "is damaged; it is fetched again" in caplog.text
    assert set(remote.reads.values()) == {1}


def test_half_a_download_is_refused_and_not_kept(mirrors, tmp_path, waits):
    made, remote = mirrors
    remote.cut = 1
    with pytest.raises(OSError, match="it sent 999 bytes instead of 1000"):
        made["a"].read_range("large", 0, 10)
    assert not [*tmp_path.glob("*/*.block")]
    remote.cut = 0
    assert read_all(made["a"]) == CONTENT


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    found = []
    monkeypatch.setattr("mjax.data.mirror.mirror.time.sleep", found.append)
    return found


def test_the_remote_is_asked_again_after_growing_waits(tmp_path, waits):
    config = dataclasses.replace(terms({"a": ("127.0.0.1", 0)}), num_replicas=1)
    remote = Remote()
    remote.num_failures = 3
    with contextlib.closing(Mirror("a", remote, config, tmp_path)) as mirror:
        assert mirror.read_range("large", 2000, 1) == CONTENT["large"][2000:2001]
        assert waits == [0, 1, 2, 4]
        remote.num_failures = 4
        wanted = "host a cannot read bytes 5000 to 6000 of large .* 4 tries .*reset"
        with pytest.raises(OSError, match=wanted):
            mirror.read_range("large", 5000, 1)
        assert remote.num_failures == 0


def test_a_host_without_the_remote_reads_through_another(mirrors, tmp_path, waits):
    made, _ = mirrors
    cut_off = Remote()
    cut_off.num_failures = 10**6
    made["a"].close()
    made["a"] = Mirror("a", cut_off, made["b"].config, tmp_path / "a")
    made["a"].serve()
    assert read_all(made["a"]) == CONTENT
    assert cut_off.num_failures < 10**6  # it was the first host of some blocks


def test_a_file_with_another_checksum_is_refused_and_removed_everywhere(
    tmp_path,
):
    remote, config = Remote(), terms(free_addresses())
    remote.checksums["large"] = f"sha256:{'0' * 64}"
    made = {h: Mirror(h, remote, config, tmp_path / h) for h in HOSTS}
    for mirror in made.values():
        mirror.serve()
    table = made["a"].table
    first = next(block for block, at in made["a"]._blocks.items() if at[1] == 0)
    found = sha256(CONTENT["large"])
    wanted = f"large has the SHA-256 {found} instead of 00.* blocks were removed"
    with pytest.raises(WrongContentError, match=wanted):
        made[table[first][0]].fill()
    assert len([*tmp_path.glob("*/*.block")]) <= 3  # those of the small file
    for mirror in made.values():
        mirror.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token": "other"}, "refused the token of this run"),
        ({"block_bytes": 999}, "has listed other files, or has another block size"),
    ],
)
def test_a_host_with_another_token_or_block_size_gets_nothing(
    mirrors, tmp_path, caplog, change, reason
):
    made, remote = mirrors
    for mirror in made.values():
        mirror.fill()
    config = terms(dict(made["a"].config.addresses), **change)
    other = Mirror("a", Remote(), config, tmp_path / "other")
    assert read_all(other) == CONTENT  # of its own remote
    assert caplog.text.count(f"gives no blocks ({reason})") == 3  # once for each host
    other.close()
    assert set(remote.reads.values()) == {1}


def test_a_host_that_hangs_is_left_for_the_next(tmp_path):
    addresses, remote = free_addresses(), Remote()
    config = terms(addresses, timeout_s=0.3)
    made = [Mirror(host, remote, config, tmp_path / host) for host in HOSTS[1:]]
    with socket.create_server(addresses["a"]):  # accepts, and never answers
        for mirror in made:
            mirror.serve()
        assert [read_all(mirror) for mirror in made] == [CONTENT] * 3
    for mirror in made:
        mirror.close()
    assert set(remote.reads.values()) == {1}


def test_a_size_limit_evicts_the_block_not_read_for_longest(tmp_path):
    store = BlockStore(tmp_path, limit_bytes=250)
    for name in ("a", "b"):
        store.write(name, sealed(b"x" * 80))
    os.utime(tmp_path / "a.block", (1, 1))
    os.utime(tmp_path / "b.block", (0, 0))
    store.write("c", sealed(b"x" * 80))
    assert [bool(store.read(name)) for name in "abc"] == [True, False, True]
    store.close()


def test_a_folder_without_room_is_said_once(tmp_path, caplog, monkeypatch):
    store = BlockStore(tmp_path)

    def no_room(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    store.write("a", sealed(b"x"))
    store.write("b", sealed(b"x"))
    assert caplog.text.count("blocks cannot be kept") == 1
    assert store.read("a") is None
    assert not [*tmp_path.glob("*.tmp")]
    store.close()


def test_a_read_only_folder_is_said_once_and_fails_no_read(
    mirrors, tmp_path, caplog, monkeypatch
):
    made, remote = mirrors
    for mirror in made.values():
        mirror.fill()
    for path in (tmp_path / "a").glob("*.block"):
        path.write_bytes(b"damaged")
    for path in (tmp_path / "a").glob("*.lock"):
        path.unlink()
    real_open, real_unlink = pathlib.Path.open, pathlib.Path.unlink

    def refuse(real):
        def call(path, *args, **kwargs):
            is_read = "rb" in (*args, kwargs.get("mode"))
            if path.parent.name == "a" and not is_read:
                raise OSError(30, "Read-only file system")
            return real(path, *args, **kwargs)

        return call

    monkeypatch.setattr(pathlib.Path, "open", refuse(real_open))
    monkeypatch.setattr(pathlib.Path, "unlink", refuse(real_unlink))
    assert read_all(made["a"]) == CONTENT
    assert read_all(made["a"]) == CONTENT
    assert set(remote.reads.values()) == {1}
    for what in ("cannot be locked", "cannot be removed", "cannot be kept"):
        assert caplog.text.count(what) == 1


def test_a_rate_limit_holds_where_it_cannot_be_shared(tmp_path, clock):
    store = clock.store(tmp_path)
    (tmp_path / "rate.time").mkdir()  # it can be neither read nor written
    store.wait_for(500, 100.0)
    store.wait_for(500, 100.0)
    assert clock.waits == [5.0]
    store.close()


def test_purge_refuses_what_a_live_run_holds(tmp_path):
    store = BlockStore(tmp_path)
    store.write("a", sealed(b"x"))
    with pytest.raises(InUseError, match="live run"):
        purge(tmp_path)
    store.close()
    assert purge(tmp_path) == 33
    assert not [*tmp_path.glob("*.block")]


def test_a_process_killed_in_a_write_leaves_no_partial_block(tmp_path):
    code = (
        "import os, pathlib, signal, sys\n"
        "from mjax.data.mirror.blocks import BlockStore, sealed\n"
        "os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)\n"
        "BlockStore(pathlib.Path(sys.argv[1])).write('a', sealed(b'x' * 100))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len([*tmp_path.glob("*.tmp")]) == 1
    store = BlockStore(tmp_path)
    assert store.read("a") is None
    store.write("a", sealed(b"y"))
    assert store.read("a") == sealed(b"y")
    assert not [*tmp_path.glob("*.tmp")]
    store.close()


def test_what_another_host_writes_into_a_shared_folder_is_left(tmp_path):
    numbers = [2**22 + 1, os.getpid()]  # no process has the first here
    written = [tmp_path / f"a.{number}.1.other-host.tmp" for number in numbers]
    for path in written:
        path.write_bytes(b"half a block")
    store = BlockStore(tmp_path)
    store.write("b", sealed(b"x"))
    store.close()
    assert all(path.exists() for path in written)
    purge(tmp_path)
    assert not [*tmp_path.glob("*.tmp")]


def _sizes(seed: int) -> dict[str, int]:
    """Blocks of files of very different sizes."""
    random_ = random.Random(seed)
    lengths = [1 + int(random_.lognormvariate(7, 1.5)) for _ in range(60)]
    return {
        f"{seed} {index} {start}": min(1000, length - start)
        for index, length in enumerate(lengths)
        for start in range(0, length, 1000)
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_equal", [True, False])
def test_placement_is_within_a_twentieth_of_even_in_bytes(seed, is_equal):
    equal = {f"{seed} {index}": 1000 for index in range(80)}
    sizes = equal if is_equal else _sizes(seed)
    table = placement.replicas(sizes, HOSTS, 3)
    kept, first = collections.Counter(), collections.Counter()
    for block, hosts in table.items():
        assert len(set(hosts)) == 3
        kept.update(dict.fromkeys(hosts, sizes[block]))
        first[hosts[0]] += sizes[block]
    for counts in (kept, first):
        mean = counts.total() / 4
        assert max(abs(counts[h] - mean) for h in HOSTS) <= 0.05 * mean


def test_a_placement_without_moves_that_help_ends():
    assert len(placement.replicas({"large": 1000, "small": 1}, HOSTS, 3)) == 2
    assert placement.replicas({}, HOSTS, 3) == {}


def test_a_new_host_takes_about_its_share():
    blocks = {f"block {i}": 1 for i in range(400)}
    before = placement.replicas(blocks, HOSTS, 3)
    turned = dict(reversed(blocks.items()))
    after = placement.replicas(turned, ["e", *HOSTS[::-1]], 3)
    moved = sum(len({*after[b]} - {*before[b]}) for b in blocks)
    assert 0.15 < moved / 1200 < 0.3  # a fifth, and what the bound displaces


@pytest.mark.parametrize(("hosts", "replicas"), [((), 3), (("a", "a"), 1), (("a",), 0)])
def test_a_placement_without_sense_is_refused(hosts, replicas):
    with pytest.raises(ValueError, match="at least"):
        placement.replicas({"x": 1}, hosts, replicas)


class Clock(threading.Event):
    """Time that passes only while a store waits."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.waits = 100.0, []

    def store(self, folder: pathlib.Path) -> BlockStore:
        store = BlockStore(folder)
        store.closed = self
        self.clear()
        return store

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        self.now += timeout
        return False


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr("mjax.data.mirror.blocks.time.monotonic", lambda: found.now)
    return found


def test_processes_of_a_host_share_its_rate(tmp_path, clock):
    stores = [clock.store(tmp_path) for _ in range(2)]
    for store in stores:
        store.wait_for(500, 100.0)
    stores[0].wait_for(1, 100.0)
    assert clock.waits == [5.0, 5.0]
    clock.now = 1.0  # the host has started again, and with it the process
    stores.append(clock.store(tmp_path))
    stores[2].wait_for(500, 100.0)
    assert clock.waits == [5.0, 5.0]
    for store in stores:
        store.close()


def test_a_slow_limit_of_an_earlier_run_does_not_delay_a_fast_one(tmp_path, clock):
    for bytes_per_s, waits in ((0.001, []), (1000.0, [0.5])):
        store = clock.store(tmp_path)
        store.wait_for(500, bytes_per_s)
        store.close()
        assert clock.waits == waits
