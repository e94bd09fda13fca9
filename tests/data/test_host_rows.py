"""One reader for several processes: here threads, but where a process must die."""

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numbered
import numpy as np
import pytest
from numbered import BATCH, reading

from mjax.data import host_rows, host_socket
from mjax.data.config import DataConfig
from mjax.data.dataset import open_dataset
from mjax.data.host_reader import FIELDS, open_stream
from mjax.data.host_rows import follow, lead, union
from mjax.data.reader_keeper import MAX_DEATHS


@contextlib.contextmanager
def share(wishes, plan):
    """Yield the rows of each of several consumers of one reader."""
    with host_socket.listen() as listener, ThreadPoolExecutor(len(wishes)) as pool:
        at = host_socket.address(listener)
        others = [pool.submit(follow, wish, at) for wish in wishes[1:]]
        guests = host_socket.accept(listener, len(others))
        first = lead(wishes[0], plan, guests)
        # The numbers of the others are those of their arrival.
        everyone = [first, *(other.result() for other in others)]
    try:
        yield everyone
    finally:
        for rows in reversed(everyone):
            rows.close()


def read_all(rows, wish, steps):
    return [rows.read(step, wish) for step in steps]


def assert_rows(read, stream, steps):
    """Check every block of every step against the stream itself."""
    for step, blocks in zip(steps, read, strict=True):
        whole = stream.rows(step, BATCH)
        for (start, stop), rows in blocks.items():
            assert rows.keys() == set(FIELDS)
            for name in FIELDS:
                expected = whole[name][start:stop]
                np.testing.assert_array_equal(rows[name], expected, strict=True)


@pytest.mark.parametrize(
    ("wishes", "num_rows"),
    [
        ([[(0, 8)]], 8),
        ([[(0, 4)], [(4, 8)]], 8),
        # Two groups of two that want the same (tp), one of them in two blocks.
        ([[(2, 4)], [(6, 7), (7, 8)], [(2, 4)], [(6, 8)]], 4),
    ],
)
def test_every_consumer_gets_its_rows_of_every_step_read_once(wishes, num_rows):
    stream, steps = numbered.numbered(16), range(5, 45)
    plan = reading(functools.partial(numbered.numbered, 16), 16, start_step=5)
    with share(wishes, plan) as consumers, ThreadPoolExecutor(4) as pool:
        read = list(pool.map(read_all, consumers, wishes, [steps] * len(wishes)))
        counters = consumers[0].counters()
    for part in read:
        assert_rows(part, stream, steps)
    assert counters["readers"] == 1
    # The reader may be a step or two ahead of the consumers, and never reads twice.
    ahead = counters["rows"] / num_rows - len(steps)
    assert ahead in (0, 1, 2)


def test_rows_are_the_same_when_the_reader_is_killed_at_any_time(capfd):
    """Rows are long, so that some kills fall into the writing of a slot."""
    seq_len, steps, rng = 1 << 14, range(100), random.Random(0)
    stream = numbered.numbered(seq_len)
    plan = reading(functools.partial(numbered.numbered, seq_len), seq_len)
    wishes = [[(0, 8)], [(4, 8)]]
    killed = []

    def kill(keeper, at_steps):
        for at in at_steps:
            while consumers[0].next_wanted < at:
                time.sleep(0.0005)
            time.sleep(rng.random() * 0.01)
            killed.append(keeper.pid)
            os.kill(keeper.pid, signal.SIGKILL)

    with share(wishes, plan) as consumers, ThreadPoolExecutor(3) as pool:
        killer = pool.submit(kill, consumers[0].keeper, (1, 50))
        read = pool.map(read_all, consumers, wishes, [steps] * 2)
        for part in read:
            assert_rows(part, stream, steps)
        killer.result()
        assert consumers[0].counters()["readers"] == 1 + len(set(killed))
    said = capfd.readouterr().out.splitlines()
    assert len(said) == len(set(killed)) == 2
    for pid, line in zip(dict.fromkeys(killed), said, strict=True):
        assert line.startswith(
            f"the reader (process {pid}) was ended by SIGKILL; a new"
        )


def test_an_error_in_the_reader_is_raised_at_its_step_by_every_consumer(capfd):
    reopen = functools.partial(numbered.numbered, 16, fail_after=2)
    wishes = [[(0, 8)], [(4, 8)]]
    with share(wishes, reading(reopen, 16)) as consumers:
        for rows, wish in zip(consumers, wishes, strict=True):
            assert_rows(read_all(rows, wish, [0, 1]), numbered.numbered(16), [0, 1])
        for rows, wish in zip(consumers, wishes, strict=True):
            for _ in range(2):
                with pytest.raises(RuntimeError, match="OSError: disk on fire"):
                    rows.read(2, wish)
    assert "continues" not in capfd.readouterr().out


def test_a_reader_that_keeps_dying_ends_the_run(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    plan = reading(functools.partial(numbered.numbered, 16), 16)
    with share([[(0, 8)]], plan) as [rows]:
        pattern = f"exit code 1, {MAX_DEATHS} times in a row, before step 0 was read"
        with pytest.raises(RuntimeError, match=pattern):
            rows.read(0, [(0, 8)])


def test_stopping_frees_a_thread_that_waits_and_closing_ends_the_reader():
    plan = reading(functools.partial(numbered.numbered, 16), 16)
    wishes = [[(0, 4)], [(4, 8)]]
    with share(wishes, plan) as [rows, other]:
        assert rows.keeper is not None
        pid = rows.keeper.pid
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(read_all, rows, wishes[0], range(100))
            while rows.next_wanted < 2:  # further than the other lets it
                time.sleep(0.001)
            rows.stop()
            with pytest.raises(RuntimeError, match="the loader is closed"):
                waiting.result(timeout=60)
        assert is_alive(pid)
        rows.close()
        assert not is_alive(pid)
        assert "mjax-host-reader" not in {t.name for t in threading.enumerate()}
        # What is in the ring can still be read, then there is no more.
        assert_rows(read_all(other, wishes[1], [0, 1]), numbered.numbered(16), [0, 1])
        with pytest.raises(RuntimeError, match="keeps the reader of this host is gone"):
            other.read(2, wishes[1])


def is_alive(pid):
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def start(*words) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "import numbered; numbered.main()", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )


def test_nothing_is_left_when_processes_are_killed():
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(start("lead"))
        said = iter(first.stdout or ())
        other = stack.enter_context(start("follow", next(said).strip()))
        reader = int(next(said))
        for lines in (said, other.stdout or ()):
            assert "step 4\n" in lines
        for pid in (first.pid, other.pid, reader):  # all share it, and it has no name
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "/memfd:mjax-rows (deleted)\n" in maps
            assert "/dev/shm/" not in maps
        other.kill()
        other.wait()
        assert is_alive(reader)  # until the first process, whose collectives fail, ends
        first.kill()
        first.wait()
        while is_alive(reader):  # the limit is that of the test
            time.sleep(0.01)


def test_processes_that_do_not_come_are_counted():
    with (
        host_socket.listen() as listener,
        pytest.raises(RuntimeError, match=r"2 of the 2 other processes .* 0.01 s"),
    ):
        host_socket.accept(listener, 2, timeout_s=0.01)
    with pytest.raises(RuntimeError, match="does not share its reader"):
        follow([(0, 8)], "mjax-nobody")


def test_blocks_are_joined_and_each_row_is_in_one():
    assert union([(4, 8), (0, 2), (1, 3), (4, 6), (8, 9)]) == ((0, 3), (4, 9))
    assert union([]) == ()


def test_a_reader_refuses_data_that_changed_during_the_run(corpus, tmp_path):
    config = DataConfig(
        path=(str(corpus),), seq_len=32, cache_dir=str(tmp_path / "cache")
    )
    fingerprint = open_dataset(config, seed=1).fingerprint
    stream = open_stream(config, seed=1, fingerprint=fingerprint)
    assert (stream.seed, stream.seq_len) == (1, 32)
    (corpus / "00.txt").write_text("other words " * 40)
    with pytest.raises(RuntimeError, match="the data changed while the run was"):
        open_stream(config, seed=1, fingerprint=fingerprint)


def test_a_row_that_stays_torn_is_an_error_not_a_batch(monkeypatch):
    monkeypatch.setattr(host_rows, "_TORN_S", 0.01)
    plan = reading(functools.partial(numbered.numbered, 16), 16)
    with share([[(0, 8)]], plan) as [rows]:
        rows.read(0, [(0, 8)])
        rows._wait_for(1)
        rows._ring._rows[1, 3, 5] ^= 1
        with pytest.raises(RuntimeError, match="row 3 of step 1 in shared memory"):
            rows.read(1, [(0, 8)])
