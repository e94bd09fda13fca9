"""The reader of a host: `python -m mjax.data.host_reader`, started by `host_rows`.

Enters: a pickled `Job` on standard input, and the file descriptors that it names.
Leaves: the rows that this host needs of each step, in the ring, as far ahead as the
ring has slots. It touches no device.

It ends when its standard input does: the pipe's other end is held by the process that
started it, so however that one dies, the reader goes too. Signals from a terminal or a
launcher, which reach every process of a run, are ignored: the run may go on to save.
"""

import dataclasses
import os
import pickle
import resource
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from mjax.data.config import DataConfig
from mjax.data.dataset import open_dataset
from mjax.data.ring import COUNTERS, Layout, Ring
from mjax.data.stream import Stream

FIELDS = ("tokens", "targets", "segments", "positions")
"""The arrays of a batch; in this order in a row of the ring."""


Block = tuple[int, int]
"""Rows [start, stop) of the global batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What is read; the same in all processes of a run."""

    reopen: Callable[[], Stream]
    """Opens the stream in the reader, see `open_stream`; it is pickled."""
    batch_size: int
    """Rows of the global batch."""
    seq_len: int
    """T, tokens per row."""
    start_step: int
    """The first step to read."""
    num_slots: int
    """Steps that the reader is ahead of the slowest process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What a reader is to do."""

    reading: Reading
    blocks: tuple[Block, ...]
    """Wanted rows of the global batch, [start, stop) each, ascending and apart."""
    layout: Layout
    ring: int
    """File descriptor of the memory."""
    doorbell: int
    """Eventfd that is rung when a consumer has finished a step."""
    bells: tuple[int, ...]
    """Eventfd of each consumer, to ring when a step is there."""


def open_stream(config: DataConfig, *, seed: int, fingerprint: str) -> Stream:
    """Open the training stream of a run in another process.

    Raises:
      RuntimeError: the data are not what the run began with.
    """
    dataset = open_dataset(config, seed=seed)
    if dataset.fingerprint != fingerprint:
        raise RuntimeError(
            f"the data changed while the run was reading them: fingerprint "
            f"{fingerprint[:12]} when it started, {dataset.fingerprint[:12]} now; put "
            f"the files of {' '.join(config.path)} back and start the run again"
        )
    return dataset.train


def read(job: Job) -> None:
    """Write step after step to the ring; return only if a step cannot be read."""
    ring = Ring(job.ring, job.layout)
    step = ring.next_step()
    _ring_all(job.bells)  # a reader before this one may have died before it did
    try:
        stream, spent = job.reading.reopen(), _Spent(ring)
        while True:
            rows = np.concatenate(list(_blocks(job, stream, step)))
            while not ring.has_room(step):
                select.select([job.doorbell], [], [])
                os.eventfd_read(job.doorbell)
            spent.add(len(rows))  # before: whoever has the rows finds them counted
            ring.write(step, rows)
            _ring_all(job.bells)
            step += 1
    except Exception as error:  # whatever it is, the consumers raise it
        traceback.print_exc()
        ring.fail(step, f"{type(error).__name__}: {error}")
        _ring_all(job.bells)


def _blocks(job: Job, stream: Stream, step: int) -> Iterator[Int32[np.ndarray, "n _"]]:
    """Read the wanted rows of a step; a row of the ring is a row of every field."""
    for start, stop in job.blocks:
        rows = stream.rows(step, job.reading.batch_size, slice(start, stop))
        yield np.concatenate([rows[name] for name in FIELDS], axis=1)


def _ring_all(bells: tuple[int, ...]) -> None:
    for bell in bells:
        os.eventfd_write(bell, 1)


class _Spent:
    """Adds what this process has used since the last step to the ring's counters."""

    def __init__(self, ring: Ring) -> None:
        self._ring, self._before = ring, np.zeros(len(COUNTERS), np.int64)
        self._num_rows = 0

    def add(self, num_rows: int) -> None:
        self._num_rows += num_rows
        usage = resource.getrusage(resource.RUSAGE_SELF)
        io = dict(
            line.split(": ") for line in Path("/proc/self/io").read_text().splitlines()
        )
        cpu_us = int((usage.ru_utime + usage.ru_stime) * 1e6)
        counts = (1, self._num_rows, int(io["read_bytes"]), usage.ru_majflt, cpu_us)
        now = np.array(counts, np.int64)
        self._ring.counters += now - self._before
        self._before = now


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> int:
    """Read until standard input ends; return 1 after a failure."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    job = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    read(job)
    return 1


if __name__ == "__main__":
    sys.exit(main())
