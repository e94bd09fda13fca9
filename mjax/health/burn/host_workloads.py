"""Measurements of a host's memory and disk: a process that `health burn` starts.

Input: a `measurements.Task` as JSON in argv. Output: reports. GB are 10^9 bytes.

- memory.copy: numpy copies n bytes in one thread; counted as 2 n bytes, like Copy in
  STREAM (McCalpin, cs.virginia.edu/stream/ref.html).
- memory.pattern: words are written, read back and compared.
- disk.write: write n bytes to a new file, then fsync. disk.read: read them from the
  file, bypassing the page cache if the file system allows it; checksums of blocks are
  compared outside the measured time.
"""

import hashlib
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mjax import checked_json
from mjax.health.burn import patterns, reporting
from mjax.health.burn.measurements import (
    BUDGET_S,
    LEAST_REPEATS,
    Measured,
    Report,
    Task,
)

_BLOCK_BYTES = 8 * 2**20
"""Bytes of one write or read. It is a multiple of every file system's page size."""
_MIB = 2**20
_GB = 1e9


def main(argv: list[str]) -> int:
    """Run the measurements of the task; return exit code 0."""
    task = checked_json.read(argv[0], Task)
    reporting.end_with_parent()
    reporting.send(task, Report(event="hardware", hardware=processor()))
    reporting.run(
        task,
        {
            "memory.copy": lambda: [memory_copy(task)],
            "memory.pattern": lambda: [memory_pattern(task)],
            "disk": lambda: disk(task),
        },
    )
    return 0


def processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the hardware name of a host that is measured without GPUs."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in lines)
    names = (value.strip() for key, _, value in pairs if key.strip() == "model name")
    return f"cpu ({next(names, platform.machine())})"


def repeat(budget_s: float) -> Iterator[int]:
    """Yield the index of each repeat until the time budget is used; at least 3."""
    end_s, count = time.monotonic() + budget_s, 0
    while count < LEAST_REPEATS or time.monotonic() < end_s:
        yield count
        count += 1


def memory_copy(task: Task) -> Measured:
    """Measure a copy between two arrays that are larger than most caches."""
    source = np.arange(_memory_bytes(task) // 16, dtype=np.uint64)
    target = np.zeros_like(source)
    times = [
        _seconds(lambda: np.copyto(target, source)) for _ in repeat(BUDGET_S[task.form])
    ]
    if not np.array_equal(source, target):
        return Measured(
            name="memory.copy", outcome="wrong", note="the copy differs from its source"
        )
    rate = 2 * source.nbytes / statistics.median(times) / _GB
    return Measured(name="memory.copy", outcome="value", value=rate, unit="GB/s")


def memory_pattern(task: Task) -> Measured:
    """Test memory with patterns, as often as the time budget allows."""
    words = np.empty(_memory_bytes(task) // 24, np.uint64)  # memory_fault makes 2 more
    name, end_s, rounds = "memory.pattern", time.monotonic() + BUDGET_S[task.form], 0
    while not rounds or time.monotonic() < end_s:
        wrong = patterns.memory_fault(words)
        if wrong:
            return Measured(name=name, outcome="wrong", note=wrong)
        rounds += 1
    note = f"{words.nbytes // _MIB} MiB, {rounds} times all patterns"
    return Measured(name=name, outcome="right", note=note)


def disk(task: Task) -> list[Measured]:
    """Measure writes to an unlinked file, and reads from it."""
    if task.disk_dir is None:
        return [Measured(name="disk", outcome="absent", note="--disk-dir is not given")]
    folder, size = Path(task.disk_dir), task.disk_mib * _MIB
    state = os.statvfs(folder)
    # As much space stays free as is written.
    if state.f_bavail * state.f_frsize < 2 * size:
        note = f"{folder} has less than {2 * task.disk_mib} MiB free"
        return [Measured(name="disk", outcome="absent", note=note)]
    path = folder / f".mjax-burn-{platform.node()}-{os.getpid()}"
    descriptor, is_direct = _open(path)
    try:
        path.unlink()  # unlinked, so no file remains however this process ends
        writes, reads, wrong = [], [], None
        for repeat_index in repeat(BUDGET_S[task.form]):
            written, seconds = _write(descriptor, size, repeat_index)
            writes.append(seconds)
            found, seconds = _read(descriptor, size)
            reads.append(seconds)
            wrong = wrong or patterns.wrong_blocks(written, found)
    finally:
        os.close(descriptor)
    note = "" if is_direct else "no O_DIRECT: reads may come from the page cache"
    if wrong:
        return [
            _rate("disk.write", size, writes, note),
            Measured(name="disk.read", outcome="wrong", note=wrong),
        ]
    return [
        _rate("disk.write", size, writes, note),
        _rate("disk.read", size, reads, note),
    ]


def _rate(name: str, size: int, times: list[float], note: str) -> Measured:
    rate = size / statistics.median(times) / _GB
    return Measured(name=name, outcome="value", value=rate, unit="GB/s", note=note)


def _open(path: Path) -> tuple[int, bool]:
    """Create a file; return its descriptor, and whether it bypasses the page cache."""
    options = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, options | os.O_DIRECT, 0o600), True
    except OSError:  # the file system has no O_DIRECT; it may have created the file
        path.unlink(missing_ok=True)
        return os.open(path, options, 0o600), False


def _write(descriptor: int, size: int, seed: int) -> tuple[list[bytes], float]:
    """Write random blocks and wait for the disk.

    Returns:
      the checksum of each block, and the seconds of all writes.
    """
    random = np.random.default_rng((patterns.SEED, seed))
    checksums, total_s = [], 0.0
    with mmap.mmap(-1, _BLOCK_BYTES) as block:  # aligned, as O_DIRECT requires
        for offset in range(0, size, _BLOCK_BYTES):
            block[:] = random.bytes(_BLOCK_BYTES)
            checksums.append(hashlib.blake2b(block).digest())
            total_s += _seconds(lambda at=offset: _write_at(descriptor, block, at))
    return checksums, total_s + _seconds(lambda: os.fsync(descriptor))


def _write_at(descriptor: int, block: mmap.mmap, offset: int) -> None:
    if os.pwrite(descriptor, block, offset) != _BLOCK_BYTES:
        raise OSError(f"the disk accepted only part of a block at {offset}")


def _read(descriptor: int, size: int) -> tuple[list[bytes], float]:
    """Read the blocks.

    Returns:
      the checksum of each block, and the seconds of all reads.
    """
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    checksums, total_s = [], 0.0
    with mmap.mmap(-1, _BLOCK_BYTES) as block:
        for offset in range(0, size, _BLOCK_BYTES):
            block[:] = bytes(_BLOCK_BYTES)  # no data of the previous read
            total_s += _seconds(lambda at=offset: os.preadv(descriptor, [block], at))
            checksums.append(hashlib.blake2b(block).digest())
    return checksums, total_s


def _seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def _memory_bytes(task: Task) -> int:
    """Return the bytes to test: --memory-mib, or 1/4 of the free memory, at most 256
    MiB. The maximum is more than most caches, and tested in
    a second."""
    if task.memory_mib is not None:
        return task.memory_mib * _MIB
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(256 * _MIB, free // 4)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
