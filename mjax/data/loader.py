"""Load batches as global arrays and place them on the devices ahead of the step.

A batch is a dict of int32 arrays [B, T]: tokens, targets, segments, positions. A thread
of each process reads only the sequences that its own devices hold. Token files are
mapped into memory, so the processes of a host share one copy in the page cache.
"""

import collections
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
from jaxtyping import Int32

from mjax.data.dataset import Dataset
from mjax.data.samples import NO_TARGET, Samples
from mjax.data.stream import Stream

FIELDS = ("tokens", "targets", "segments", "positions")
"""The arrays of a batch."""

Batch = dict[str, jax.Array]
"""One int32 array [B, T] for each name in `FIELDS`."""

Rows = dict[str, Int32[np.ndarray, "_ T"]]


class Loader:
    """The training batches of steps start_step, start_step + 1, and so on.

    A background thread reads, packs and copies batches to the devices, `prefetch`
    batches ahead. The batch of a step does not depend on start_step. `next` re-raises
    exceptions of the thread. Close the loader, or use it in a with statement.
    """

    def __init__(
        self,
        stream: Stream,
        sharding: jax.sharding.NamedSharding,
        *,
        batch_size: int,
        start_step: int = 0,
        prefetch: int = 2,
    ) -> None:
        """Start reading.

        Args:
          stream: training samples.
          sharding: sharding of the [B, T] arrays.
          batch_size: B, global.
          start_step: first step whose batch is read.
          prefetch: number of batches prepared ahead; each takes 16 B T bytes.
        Raises:
          ValueError: prefetch is less than 1.
        """
        if prefetch < 1:
            raise ValueError(f"prefetch must be at least 1, got {prefetch}")
        self.data_wait_s = 0.0
        """Seconds that the last `next` waited for its batch."""
        self._stream, self._sharding = stream, sharding
        self._shape = (batch_size, stream.seq_len)
        self._next_step = start_step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mjax-loader")
        self._ahead: collections.deque[Future[Batch]] = collections.deque()
        for _ in range(prefetch):
            self._submit()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the batch of the next step; the thread then prepares another."""
        started = time.perf_counter()
        if not self._ahead:
            raise RuntimeError("the loader is closed")
        # A failed batch stays in the queue, so the next call raises again.
        batch = self._ahead[0].result()
        self._ahead.popleft()
        self.data_wait_s = time.perf_counter() - started
        self._submit()
        return batch

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread: wait for the batch being read, and drop all batches."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def _submit(self) -> None:
        self._ahead.append(self._thread.submit(self._read, self._next_step))
        self._next_step += 1

    def _read(self, step: int) -> Batch:
        read_rows = functools.partial(self._stream.rows, step, self._shape[0])
        return _place(read_rows, self._shape, self._sharding)


class OneBatch:
    """The batch of the first step, read once and returned for every step.

    The step time then does not depend on files, threads or copies to devices. Use this
    like a `Loader`.
    """

    data_wait_s = 0.0

    def __init__(
        self, stream: Stream, sharding: jax.sharding.NamedSharding, *, batch_size: int
    ) -> None:
        """Read the batch; arguments as in `Loader`."""
        read_rows = functools.partial(stream.rows, 0, batch_size)
        self._batch = _place(read_rows, (batch_size, stream.seq_len), sharding)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the same arrays each time."""
        return self._batch

    def __enter__(self) -> "OneBatch":
        return self

    def __exit__(self, *exception: object) -> None:
        """Do nothing: there is no thread to stop."""


def held_out_batches(
    samples: Samples,
    sharding: jax.sharding.NamedSharding,
    *,
    batch_size: int,
    num_batches: int,
) -> Iterator[Batch]:
    """Yield the first held-out batches, the same in every run.

    Stops early if the samples end. The last batch is padded with sequences without
    targets, so every batch has the same shape and no sample counts twice.
    """
    for batch_index in range(min(num_batches, -(-len(samples) // batch_size))):
        first = batch_index * batch_size

        def read_rows(rows: slice, first: int = first) -> Rows:
            start, stop, _ = rows.indices(batch_size)
            return _read_padded(samples, first + start, first + stop)

        yield _place(read_rows, (batch_size, samples.seq_len), sharding)


def held_out_num_bytes(dataset: Dataset, num_samples: int) -> int:
    """Return the bytes of text that the targets of the first held-out samples encode.

    This is the denominator of bits per byte for `held_out_batches`, with num_samples =
    batch_size * num_batches; it is the same in every process.
    """
    indices = np.arange(min(num_samples, len(dataset.held_out)))
    return sum(
        dataset.count_target_bytes(dataset.held_out.rows(part)["targets"])
        for part in np.array_split(indices, -(-len(indices) // 256))
    )


def _read_padded(samples: Samples, start: int, stop: int) -> Rows:
    indices = np.arange(start, min(stop, len(samples)))
    num_missing = stop - start - len(indices)
    # Padding repeats a real sample, whose targets are removed.
    padding = np.zeros(num_missing, indices.dtype)
    rows = samples.rows(np.concatenate([indices, padding]))
    rows["targets"][len(indices) :] = NO_TARGET
    return rows


def _place(
    read_rows: Callable[[slice], Rows],
    shape: tuple[int, int],
    sharding: jax.sharding.NamedSharding,
) -> Batch:
    """Return a batch: read the sequences of this process's devices, start the copies.

    Sequences that several devices hold (tensor parallelism) are read once.
    """
    read: dict[tuple[int, int], Rows] = {}

    def local_part(
        index: tuple[slice, ...] | None, name: str
    ) -> Int32[np.ndarray, "_ _"]:
        assert index is not None  # None only in a process without devices
        start, stop, _ = index[0].indices(shape[0])
        if (start, stop) not in read:
            read[start, stop] = read_rows(slice(start, stop))
        return read[start, stop][name][:, index[1]]

    return {
        name: jax.make_array_from_callback(
            shape, sharding, functools.partial(local_part, name=name)
        )
        for name in FIELDS
    }
