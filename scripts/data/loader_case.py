"""Run one case of `loader_ways`: some processes that read in one way, and their costs.

Input: a case, a token file. Output: figures of the processes and of their workers, and
checksums of the first rows.
"""

import contextlib
import dataclasses
import functools
import math
import multiprocessing
import operator
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mjax.data.config import DataConfig
from mjax.data.dataset import Dataset, open_dataset
from mjax.data.loader import FIELDS

SEQ_LEN, ROWS_EACH, ROWS_SHARED = 2048, 8, 64
NUM_AHEAD = 2
"""Steps that a worker of Grain is ahead; what mjax' loader is."""
NUM_CHECKED = 4
"""Steps whose rows are compared."""
WAIT_S, CLOSE_S = 300, 30
Rows = dict[str, np.ndarray]
Read = Callable[[int], Rows]
"""From a step to its rows; called for one step after the other."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One run of some processes."""

    way: str
    cache: str
    pattern: str
    num_processes: int
    seconds: float
    config: DataConfig

    @property
    def batch_size(self) -> int:
        """Rows of a step, over all processes."""
        is_same = self.pattern == "same"
        return ROWS_SHARED if is_same else ROWS_EACH * self.num_processes

    def block(self, index: int) -> tuple[int, int]:
        """Return the rows that a process wants of each step."""
        if self.pattern == "same":
            return 0, ROWS_SHARED
        return ROWS_EACH * index, ROWS_EACH * (index + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What a case took."""

    tokens_per_s: float
    """Delivered to all, from the start of the first process to the end of the last."""
    cpu_s: float
    """Per million tokens delivered, all processes together, after the first row."""
    memory_mb: float
    """Proportional set size, all processes together."""
    start_s: float
    """From the start of the processes until the last has its first row."""
    fetched_mb: float
    """Bytes that the kernel fetched from storage, in 10^6."""
    checksums: tuple[int, ...]
    """Of the rows of the first steps, for each process."""


class Meeting:
    """What the processes of a case and this one share."""

    def __init__(self, num_processes: int, max_steps: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.barrier = context.Barrier(num_processes + 1, timeout=WAIT_S)
        self.results = context.SimpleQueue()
        self.end_step = context.Value("q", max_steps, lock=False)


@dataclasses.dataclass(frozen=True)
class Steps:
    """The rows of a process as a random-access source of Grain: an element a step."""

    case: Case
    index: int

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, step: Any) -> Rows:
        return self._read(operator.index(step))

    @functools.cached_property
    def _read(self) -> Read:
        return reading(self.case, self.index, open_dataset(self.case.config, seed=0))


def reading(case: Case, index: int, dataset: Dataset) -> Read:
    """Read from the mapped file."""
    rows = slice(*case.block(index))
    return lambda step: dataset.train.rows(step, case.batch_size, rows)


@contextlib.contextmanager
def by_process(case: Case, index: int, dataset: Dataset) -> Iterator[Read]:
    """Read in the process."""
    yield reading(case, index, dataset)


@contextlib.contextmanager
def by_grain(case: Case, index: int, dataset: Dataset) -> Iterator[Read]:
    """Read in a worker of Grain, which is `NUM_AHEAD` steps ahead."""
    del dataset  # the worker opens it
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # Grain asks for flags, and there are none
    source: Any = Steps(case, index)
    # No threads: Grain's advice for data that are in memory.
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    steps = grain.MapDataset.source(source).to_iter_dataset(reading)
    worker = grain.multiprocessing.MultiprocessingOptions(
        num_workers=1, per_worker_buffer_size=NUM_AHEAD
    )
    rows: Any = iter(steps.mp_prefetch(worker))
    yield lambda step: next(rows)
    rows.close()


WAYS: dict[str, Callable[[Case, int, Dataset], contextlib.AbstractContextManager]] = {
    "mjax": by_process,
    "Grain": by_grain,
}


def consume(case: Case, index: int, meeting: Meeting) -> None:
    """Be one of the processes: read, and drop what was read."""
    try:
        dataset = open_dataset(case.config, seed=0)  # as each training process does
        with WAYS[case.way](case, index, dataset) as read:
            checksum, step = crc(read(0), 0), 1
            first_s = time.monotonic()
            meeting.barrier.wait()  # all have a row
            meeting.barrier.wait()  # go
            begin_s = time.monotonic()
            until_s = begin_s + case.seconds if index == 0 else math.inf
            while step < meeting.end_step.value:
                rows = read(step)
                checksum = crc(rows, checksum) if step < NUM_CHECKED else checksum
                step += 1
                if time.monotonic() > until_s:
                    # The others may be a little further on.
                    end = min(step + NUM_AHEAD, meeting.end_step.value)
                    meeting.end_step.value, until_s = max(end, NUM_CHECKED), math.inf
            end_s = time.monotonic()
            meeting.barrier.wait()  # all are done
            meeting.results.put((index, checksum, first_s, step - 1, begin_s, end_s))
            meeting.barrier.wait()  # looked at
    except BaseException:
        meeting.barrier.abort()
        raise


def crc(rows: Rows, before: int) -> int:
    """Return a checksum of rows and of those before them."""
    for name in FIELDS:
        before = zlib.crc32(np.ascontiguousarray(rows[name], np.int32), before)
    return before


def measure(case: Case, tokens: Path, num_samples: int) -> Found:
    """Run the processes of a case.

    Args:
      case: what runs.
      tokens: the token file.
      num_samples: of an epoch.
    Raises:
      threading.BrokenBarrierError: a process failed, or took too long.
    """
    one_epoch = num_samples // case.batch_size
    max_steps = one_epoch if case.cache == "cold" else len(Steps(case, 0))
    meeting = Meeting(case.num_processes, max_steps)
    if case.cache == "cold":
        forget(tokens)
    else:
        tokens.read_bytes()
    started_s = time.monotonic()
    processes = [
        multiprocessing.get_context("spawn").Process(
            target=consume, args=(case, index, meeting)
        )
        for index in range(case.num_processes)
    ]
    try:
        for process in processes:
            process.start()
        meeting.barrier.wait()  # all have a row
        pids = family([process.pid for process in processes if process.pid])
        cpu_s = sum(map(cpu_seconds, pids))
        meeting.barrier.wait()  # go
        meeting.barrier.wait()  # all are done
        cpu_s = sum(map(cpu_seconds, pids)) - cpu_s
        memory = sum(figure(pid, "smaps_rollup", "Pss") for pid in pids) * 1024
        fetched = sum(figure(pid, "io", "read_bytes") for pid in pids)
        results = sorted(meeting.results.get() for _ in processes)
        meeting.barrier.wait()  # looked at
    finally:
        for process in processes:
            process.join(CLOSE_S)
            process.kill()
    _, checksums, firsts_s, num_steps, begins_s, ends_s = zip(*results, strict=True)
    assert len(set(checksums)) == (1 if case.pattern == "same" else len(processes))
    start, stop = case.block(0)
    num_tokens = SEQ_LEN * (stop - start) * sum(num_steps)
    return Found(
        tokens_per_s=num_tokens / (max(ends_s) - min(begins_s)),
        cpu_s=cpu_s / (num_tokens / 1e6),
        memory_mb=memory / 1e6,
        start_s=max(firsts_s) - started_s,
        fetched_mb=fetched / 1e6,
        checksums=checksums,
    )


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def family(pids: Sequence[int]) -> list[int]:
    """Return processes with all their descendants."""
    found = list(pids)
    for pid in found:  # grows
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def figure(pid: int, file: str, name: str) -> int:
    """Return a figure of a file of /proc/PID, in the unit of the file."""
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(f"{name}:"))
