"""The files that an agent shares with a rank: progress word, stacks and output.

Input: the folder of a generation. Output: names under which the rank opens the files,
and what the rank has written. The agent opens them before the rank does and keeps them
open, so it reads them even if somebody deletes or replaces them. A file that cannot be
created is kept in memory instead. A disk may block: call `read` and `show` in a thread.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mjax.launch.background import say
from mjax.launch.log_rules import LogReader
from mjax.launch.messages import DeviceProgress, LastWords, Match
from mjax.processes import progress
from mjax.processes.progress import WORD_BYTES, Word

_LAST_LINES, _LAST_BYTES = 10, 4096
"""Maximum number of lines and bytes to report from the end of a rank's log."""
_READ_BYTES = 32768
_FRAME = re.compile(r" +@ +0x[0-9a-f]+ ")
"""Start of a line of a C++ stack, which follows the message of an abort."""


def generation_folder(work_dir: Path, generation: int) -> Path:
    """Return the folder of a generation's logs."""
    return work_dir / "launch" / f"generation-{generation:04d}"


def log_path(folder: Path, rank: int) -> Path:
    """Return the file for the output of a rank."""
    return folder / f"rank-{rank}.log"


class Shared:
    """A file that this process keeps open for another one."""

    def __init__(self, path: Path | None, num_bytes: int = 0) -> None:
        """Open a file, or one in memory if that fails.

        Args:
          path: path of the file; None keeps it in memory.
          num_bytes: size to reserve.
        """
        self.descriptor = -1
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
                self.descriptor = os.open(path, flags, 0o644)
                if num_bytes:
                    os.posix_fallocate(self.descriptor, 0, num_bytes)
            except OSError as error:
                self.close()
                say(f"warning: {path} is kept in memory: {error.strerror}")
        if self.descriptor < 0:
            self.descriptor = os.memfd_create("mjax")
            self.name = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        else:
            self.name = str(path)

    @property
    def size(self) -> int:
        """Number of bytes in the file."""
        return os.fstat(self.descriptor).st_size

    def read(self, begin: int = 0) -> bytes:
        """Return the content from a byte on."""
        return os.pread(self.descriptor, max(0, self.size - begin), begin)

    def close(self) -> None:
        """Close the file."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What a rank has written so far."""

    word: Word | None
    """The progress word; None if there is no readable one."""
    matches: Sequence[Match]
    """Matches of log rules since the last reading."""
    devices: list[DeviceProgress]
    last_lines: str
    """End of the log of a rank that has ended; otherwise empty."""
    last_words: LastWords | None


class RankFiles:
    """The files of one rank in one generation."""

    def __init__(self, folder: Path, rank: int, log_bytes: int) -> None:
        """Open all files.

        Args:
          folder: folder of the generation.
          rank: number of the rank.
          log_bytes: size in bytes at which the log is rotated.
        """
        self._log_bytes = log_bytes
        self._word_path = folder / f"progress-{rank}"
        self._stacks_path = folder / f"stacks-{rank}.txt"
        self._word = Shared(self._word_path, WORD_BYTES)
        self._log = Shared(log_path(folder, rank))
        self._aside = log_path(folder, rank).with_suffix(".log.1")
        # In memory: a rank may hang because the disk does.
        self._stacks = Shared(None)
        self._asked, self._question = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._reader = LogReader(self._log.descriptor, rank)

    @property
    def log(self) -> str:
        """Name of the file for the output of the rank."""
        return self._log.name

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that tell the rank its files."""
        return {
            progress.FILE_VARIABLE: self._word.name,
            progress.STACKS_VARIABLE: self._stacks.name,
            progress.LOCK_VARIABLE: f"/proc/{os.getpid()}/fd/{self._asked}",
        }

    def read(self, *, is_over: bool) -> Reading:
        """Return what the rank has written.

        Args:
          is_over: whether the rank has ended, so its log is complete.
        Raises:
          OSError: the disk fails.
        """
        try:
            word = progress.read_from(
                lambda: os.pread(self._word.descriptor, WORD_BYTES, 0), "the word"
            )
        except ValueError:  # somebody has overwritten it; the next write mends it
            word = None
        operations = progress.operations_path(self._word_path)
        reading = Reading(
            word=word,
            matches=self._reader.read(is_over=is_over),
            devices=self._reader.thunks.devices(operations),
            last_lines=self._last_lines() if is_over else "",
            last_words=self._last_words() if is_over else None,
        )
        self._rotate()
        return reading

    def stacks(self, begin: int = 0) -> str:
        """Return the stacks from a byte on."""
        return self._stacks.read(begin).decode(errors="replace")

    @property
    def stacks_size(self) -> int:
        """Number of bytes of stacks so far."""
        return self._stacks.size

    def ask_for_lock(self) -> None:
        """Request `progress.LOCK_ANSWER` from the rank."""
        with contextlib.suppress(BlockingIOError):  # it has not read earlier requests
            os.write(self._question, b"?")

    def show(self, stacks: str) -> None:
        """Append stacks to a file for people; without effect if that fails."""
        with contextlib.suppress(OSError), self._stacks_path.open("a") as file:
            file.write(stacks)

    def close(self) -> None:
        """Close all files."""
        for file in (self._word, self._log, self._stacks):
            file.close()
        os.close(self._asked)
        os.close(self._question)

    def _rotate(self) -> None:
        """If the log is too long, copy it to `<log>.1` and empty it while it is in use.

        Output written during the rotation is lost.
        """
        if self._log.size > self._log_bytes:
            with contextlib.suppress(OSError):  # a full disk must not end the agent
                self._aside.write_bytes(self._log.read())
                os.ftruncate(self._log.descriptor, 0)

    def _last_words(self) -> LastWords | None:
        for look in (
            progress.last_words_path(self._word_path).read_bytes,
            lambda: self._word.read(WORD_BYTES),
        ):
            with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
                return msgspec.json.decode(look(), type=LastWords)
        return None

    def _last_lines(self) -> str:
        text = self._log.read(max(0, self._log.size - _READ_BYTES)).decode(
            errors="replace"
        )
        lines = [line for line in text.splitlines() if not _FRAME.match(line)]
        return "\n".join(lines[-_LAST_LINES:])[-_LAST_BYTES:]
