"""Rows of steps in memory that several processes share: one writes, the others read.

Enters: rows of int32 words, a step's at a time. Leaves: the same rows. What the words
mean is not known here.

The memory is an anonymous file (memfd): it has no name, so nothing can stay behind in
/dev/shm, and it lives exactly as long as a process has it open or mapped, however those
processes end. It holds `num_slots` slots; step s goes to slot s % num_slots.

There is no lock that a killed process could keep. Each word has one writer:

- A consumer's cell is the first step that it still wants. The writer fills a slot again
  only when every cell is past the step that it held.
- A slot's step is -1 while the slot is written, and set last. A writer killed halfway
  leaves -1, and its successor writes the slot again.
- Each row has a CRC32 that begins with its step and number. A row that is torn, old or
  altered does not match, and is not given out.
- A failure is a step and a text: steps from that one on will not come.
"""

import dataclasses
import mmap
import os
import struct
import zlib

import numpy as np
from jaxtyping import Int32

COUNTERS = ("readers", "rows", "disk_bytes", "major_faults", "cpu_us")
"""What the writers of a ring add up: writers started, rows written, bytes that the
kernel fetched from storage for them, page faults that waited for storage, CPU time in
microseconds."""

_TEXT_BYTES = 4096
_ABSENT = -1


class TornRowError(RuntimeError):
    """A row does not match its checksum."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What is where in the memory."""

    num_slots: int
    num_rows: int
    """Rows of one step."""
    row_words: int
    """Words of one row, 4 bytes each."""
    num_consumers: int

    def parts(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of each array, in the order of the memory."""
        return {
            "counters": ("int64", (len(COUNTERS),)),
            "failed_step": ("int64", (1,)),
            "wanted": ("int64", (self.num_consumers,)),
            "steps": ("int64", (self.num_slots,)),
            "checksums": ("uint32", (self.num_slots, self.num_rows)),
            "text": ("uint8", (_TEXT_BYTES,)),
            "rows": ("int32", (self.num_slots, self.num_rows, self.row_words)),
        }

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""
        return sum(_padded(*part) for part in self.parts().values())


def create(layout: Layout, start_step: int) -> int:
    """Make the memory of a ring; return its file descriptor.

    Args:
      layout: its sizes.
      start_step: the first step that every consumer wants.
    """
    descriptor = os.memfd_create("mjax-rows", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, layout.num_bytes)
    ring = Ring(descriptor, layout)
    ring.wanted[:] = start_step
    ring.steps[:] = _ABSENT
    ring.failed_step[:] = _ABSENT
    return descriptor


class Ring:
    """One process' view of the memory; its arrays are the memory itself."""

    def __init__(self, descriptor: int, layout: Layout) -> None:
        """Map the memory; the descriptor may be closed afterwards."""
        memory, offset = mmap.mmap(descriptor, layout.num_bytes), 0
        arrays: dict[str, np.ndarray] = {}
        for name, (dtype, shape) in layout.parts().items():
            arrays[name] = np.ndarray(shape, dtype, memory, offset)
            offset += _padded(dtype, shape)
        self.layout = layout
        self.counters, self.wanted = arrays["counters"], arrays["wanted"]
        self.steps, self.failed_step = arrays["steps"], arrays["failed_step"]
        self._checksums, self._rows = arrays["checksums"], arrays["rows"]
        self._text = arrays["text"]

    def next_step(self) -> int:
        """Return the first wanted step that is not here; a new writer begins there."""
        step = int(self.wanted.min())
        while self.holds(step):
            step += 1
        return step

    def has_room(self, step: int) -> bool:
        """Say whether all consumers are done with what lies in the slot of a step."""
        return int(self.wanted.min()) > step - self.layout.num_slots

    def write(self, step: int, rows: Int32[np.ndarray, "_ _"]) -> None:
        """Put a step into its slot, which must have room.

        Args:
          step: whose rows they are.
          rows: [num_rows, row_words].
        """
        slot = step % self.layout.num_slots
        self.steps[slot] = _ABSENT
        self._rows[slot] = rows
        for index, row in enumerate(rows):
            self._checksums[slot, index] = _checksum(step, index, row)
        self.steps[slot] = step

    def holds(self, step: int) -> bool:
        """Say whether a step can be read."""
        return int(self.steps[step % self.layout.num_slots]) == step

    def read(self, step: int, start: int, stop: int) -> Int32[np.ndarray, "_ _"]:
        """Return a copy of rows start to stop of a step that is here.

        Raises:
          TornRowError: a row is not what was written.
        """
        slot = step % self.layout.num_slots
        rows = self._rows[slot, start:stop].copy()
        for index, row in enumerate(rows, start):
            expected = int(self._checksums[slot, index])
            if _checksum(step, index, row) != expected:
                raise TornRowError(
                    f"row {index} of step {step} in shared memory does not match its "
                    "checksum"
                )
        return rows

    def finish(self, consumer: int, step: int) -> None:
        """Note that a consumer has what it needs of a step."""
        self.wanted[consumer] = step + 1

    def fail(self, step: int, message: str) -> None:
        """Say that there will be no steps from `step` on, and why."""
        text = message.encode()[:_TEXT_BYTES]
        self._text[:] = 0
        self._text[: len(text)] = np.frombuffer(text, np.uint8)
        self.failed_step[0] = step

    def failure(self, step: int) -> str | None:
        """Return why a step will never be here, None if it may still come."""
        if not 0 <= int(self.failed_step[0]) <= step:
            return None
        return self._text.tobytes().rstrip(b"\0").decode(errors="replace")


def _padded(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of an array, up to whole cache lines."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return -(-num_bytes // 64) * 64


def _checksum(step: int, index: int, row: Int32[np.ndarray, "_"]) -> int:
    """Return the CRC32 of a row, of its step and of its place there."""
    return zlib.crc32(row, zlib.crc32(struct.pack("<qq", step, index)))
