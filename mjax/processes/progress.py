"""The progress word: a process's progress, in a file that other processes can read.

Input: a path in `MJAX_PROGRESS_FILE`, set by the parent process. Output: 168 bytes at
the beginning of the file: the phase of the process, its step, the time of its last
write, and the time spent in each phase. One system call writes the whole word, so a
file that was damaged or truncated is whole again after the next write, and a failed
write harms nothing. A thread writes: a disk that blocks does not hold the process.
Reading does not depend on Python code in the process, so it works even if the process
hangs while it holds the interpreter lock.

A word is 21 little-endian int64: magic, generation, phase, step, microstep,
monotonic_ns, saved_step, sequence, began_ns, start_step, first_step_ns, and the
nanoseconds spent in each of ten phases. The sequence is even; older writers made it odd
while other fields changed. A reader accepts a word only if it did not change during the
read.
"""

import contextlib
import dataclasses
import enum
import faulthandler
import json
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

FILE_VARIABLE = "MJAX_PROGRESS_FILE"
"""Environment variable: path of the file. If absent, nothing is written."""
GENERATION_VARIABLE = "MJAX_GENERATION"
"""Environment variable: number of this generation of the launch, from 1."""
LAUNCH_VARIABLE = "MJAX_LAUNCH"
"""Environment variable: name of the launch that counts the generations."""
STACKS_VARIABLE = "MJAX_STACKS_FILE"
"""Environment variable: path to which the process writes its stacks on
STACKS_SIGNAL."""
LOCK_VARIABLE = "MJAX_LOCK_PIPE"
"""Environment variable: path of a pipe. A thread answers each byte that it reads there
with LOCK_ANSWER, in the file of stacks."""
STACKS_SIGNAL = signal.SIGUSR1
LOCK_ANSWER = "The interpreter lock is free.\n"
"""If a process does not write this, no Python code runs in it."""

OF_ANOTHER = "Another process raised this error."
"""Note on an error that an `Agreement` raises in the processes that did not fail, which
Python prints after the error."""

_MAGIC = 0x6D6A617870726F32  # "mjaxpro2"
_NUM_WORDS = 21
_FORMAT = struct.Struct(f"<{_NUM_WORDS}q")
WORD_BYTES = _FORMAT.size
_GENERATION, _PHASE, _STEP, _MICROSTEP, _TIME, _SAVED, _SEQUENCE = range(1, 8)
_BEGAN, _START_STEP, _FIRST_STEP, _SPENT = 8, 9, 10, 11
_TRIES = 100
_WAIT_S = 0.05
"""Seconds that a mark waits until the word is written: a process may hold its
interpreter lock from then on. While the disk blocks, later marks do not wait."""


class Phase(enum.IntEnum):
    """Phase of a process of a run."""

    IMPORT = 0
    INIT = 1
    BUILD = 2
    COMPILE = 3
    RESTORE = 4
    STEP = 5
    EVAL = 6
    SAVE = 7
    SAMPLE = 8
    EXIT = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Word:
    """The last state that a process reported."""

    generation: int
    """Number of this generation of the launch, from 1; 0 without a launch."""
    phase: Phase
    step: int
    """Optimizer steps that have been dispatched to the devices."""
    microstep: int
    """Count of marks within the step or the phase."""
    monotonic_ns: int
    """Time of the write, by the monotonic clock of the host."""
    saved_step: int
    """Newest step that this generation restored or saved; -1 for none."""
    sequence: int
    """Twice the number of words written, this one included."""
    began_ns: int
    """Time of the first write, by the same clock."""
    start_step: int
    """Steps in the state when this process began; -1 before it is known."""
    first_step_ns: int
    """Time at which the first step of this process ended, by the same clock; 0
    before."""
    spent_ns: tuple[int, ...]
    """Time spent in each `Phase`, until `monotonic_ns`."""


class Writer:
    """Writes the word of this process. Only one thread at a time may call it."""

    def __init__(self, path: Path | None, generation: int = 0) -> None:
        """Create the file, or use an existing one.

        Args:
          path: path of the file, created if absent; None keeps the word in this
            process.
          generation: current generation of the run.
        Raises:
          OSError: the file cannot be created or mapped.
        """
        self.generation = generation
        self._path = path
        self._descriptor: int | None = None
        self._pen: _Pen | None = None
        if path is not None:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(self._descriptor, WORD_BYTES)
            self._pen = _Pen(self._descriptor)
        self._words = [0] * _NUM_WORDS
        self._words[0], self._words[_GENERATION] = _MAGIC, generation
        self._words[_SAVED] = self._words[_START_STEP] = -1
        self._words[_BEGAN] = self._words[_TIME] = time.monotonic_ns()
        self.mark(Phase.IMPORT)

    def mark(self, phase: Phase, step: int | None = None, microstep: int = 0) -> None:
        """Report the phase that begins now.

        Args:
          phase: phase that begins.
          step: number of dispatched steps; None keeps the previous value.
          microstep: a count within the phase.
        """
        self._count_time()
        words = self._words
        words[_PHASE] = phase
        if step is not None:
            words[_STEP] = step
            if words[_START_STEP] < 0:
                words[_START_STEP] = step
        words[_MICROSTEP] = microstep
        self._write()

    def ended_first_step(self) -> None:
        """Report that the first step is finished; later steps may be in flight."""
        self._words[_FIRST_STEP] = self._count_time()
        self._write()

    def saved(self, step: int) -> None:
        """Report that the store has a step: it was saved or restored."""
        self._count_time()
        self._words[_SAVED] = step
        self._write()

    def word(self) -> Word:
        """Return the last word; any thread may call this."""
        return _unpack(self._word)

    def diverged(self, step: int, ways: Mapping[int, Sequence[str]]) -> None:
        """Report in `last_words_path` that the run must return to an older step.

        Args:
          step: optimizer steps that the state has seen.
          ways: maps each saved step to the values of `--data.skip` with which a run
            from that step skips the data that this run has read since.
        """
        named = {str(to): [*words] for to, words in ways.items()}
        self._tell("diverged", {"step": step, "ways": named})

    def corrupted(self, step: int, processes: Sequence[int], *, is_sure: bool) -> None:
        """Report in `last_words_path` that the replicas of the state differ.

        Args:
          step: optimizer steps that the state has seen.
          processes: processes whose devices hold other bits than the majority; without
            a majority, all processes that disagree.
          is_sure: whether there is a majority.
        """
        facts = {"step": step, "processes": [*processes], "is_sure": is_sure}
        self._tell("corrupted", facts)

    def operations(self, places: Mapping[str, Mapping[str, str]]) -> None:
        """Record where each compiled operation is in the traced code.

        Args:
          places: for each compiled program, by its name, maps XLA's names of operations
            to positions in the traced code. Programs may share names of operations.
        """
        if self._path is not None:
            with contextlib.suppress(OSError):  # a report then has the names alone
                operations_path(self._path).write_text(json.dumps(places))

    def _tell(self, what: str, facts: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        text = json.dumps({what: facts})
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            new.write_text(text)
            new.rename(last_words_path(self._path))
        except OSError:  # a full disk has room after the word, in the same block
            assert self._descriptor is not None
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, text.encode(), WORD_BYTES)

    def _count_time(self) -> int:
        """Add the time since the last word to its phase; return the current time."""
        words, now_ns = self._words, time.monotonic_ns()
        words[_SPENT + words[_PHASE]] += now_ns - words[_TIME]
        words[_TIME] = now_ns
        return now_ns

    def _write(self) -> None:
        self._words[_SEQUENCE] += 2
        self._word = _FORMAT.pack(*self._words)
        if self._pen is not None:
            self._pen.write(self._word)


class _Pen:
    """Writes the newest word at the beginning of a file, in a thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._newest = self._written = b""
        threading.Thread(target=self._run, name="mjax-word", daemon=True).start()

    def write(self, word: bytes) -> None:
        """Have a word written; wait a little for it, unless the disk blocks."""
        with self._changed:
            is_blocked = self._written is not self._newest
            self._newest = word
            self._changed.notify_all()
            if not is_blocked:
                self._changed.wait_for(self._is_current, _WAIT_S)

    def _is_current(self) -> bool:
        return self._written is self._newest

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_current())
                word = self._newest
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, word, 0)
            with self._changed:
                self._written = word
                self._changed.notify_all()


def last_words_path(path: Path) -> Path:
    """Return the path of the file with the reason why a process gave up."""
    return path.with_name(f"{path.name}.last")


def operations_path(path: Path) -> Path:
    """Return the path of the file that maps operations to their positions."""
    return path.with_name(f"{path.name}.operations")


def from_environment(environment: Mapping[str, str] = os.environ) -> Writer:
    """Return the writer that the parent process requests.

    Raises:
      ValueError: the generation is not an integer, or the file cannot be created.
    """
    path = environment.get(FILE_VARIABLE)
    generation = environment.get(GENERATION_VARIABLE, "0")
    if not (generation.isascii() and generation.isdigit()):
        raise ValueError(
            f"{GENERATION_VARIABLE} must be a whole number, got {generation!r}"
        )
    try:
        return Writer(Path(path) if path else None, int(generation))
    except OSError as error:
        raise ValueError(
            f"{FILE_VARIABLE} must name a file that can be written: {error}"
        ) from error


def show_stacks_on_signal(environment: Mapping[str, str] = os.environ) -> None:
    """Let STACKS_SIGNAL append the stacks of all threads to the requested file.

    The C library calls the handler, so even a process that never releases the
    interpreter lock writes its stacks; but it does not answer a byte in the pipe of
    LOCK_VARIABLE. Call this before anything that may hang. If the files cannot be
    opened, a warning is printed.
    """
    path, pipe = environment.get(STACKS_VARIABLE), environment.get(LOCK_VARIABLE)
    if not path:
        return
    try:
        file = open(path, "a")  # noqa: SIM115, it stays open until the process ends
        # A pipe, not a signal: a signal that some thread of a library leaves unblocked
        # could kill the process.
        asked = os.open(pipe, os.O_RDWR) if pipe else None  # never at end of file
    except OSError as error:
        print(f"warning: a hang of this process will show no stacks: {error}")
        return
    if asked is not None:
        threading.Thread(
            target=_answer, args=(asked, file.fileno()), name="mjax-lock", daemon=True
        ).start()
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)


def _answer(asked: int, descriptor: int) -> None:
    while os.read(asked, 1):
        with contextlib.suppress(OSError):
            os.write(descriptor, LOCK_ANSWER.encode())


def read(path: Path) -> Word | None:
    """Return the word of a process.

    Returns:
      None if the process has not written yet, or if it was stopped during a write. In
      the latter case the previous word remains valid.
    Raises:
      ValueError: the file is not a progress word, or cannot be read.
    """
    try:
        return read_from(path.read_bytes, str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def read_from(look: Callable[[], bytes], where: str) -> Word | None:
    """Return the word that a function reads; see `read`.

    Args:
      look: returns the content of the file.
      where: name of the file in messages.
    Raises:
      ValueError: the file is not a progress word.
    """
    for _ in range(_TRIES):
        before, after = (look()[:WORD_BYTES] for _ in range(2))
        if not any(before):
            return None
        if len(before) != WORD_BYTES:
            raise ValueError(f"{where} holds {len(before)} bytes, not {WORD_BYTES}")
        if before == after and _FORMAT.unpack(before)[_SEQUENCE] % 2 == 0:
            try:
                return _unpack(before)
            except ValueError as error:
                raise ValueError(
                    f"{where} is not a progress word of this version of mjax"
                ) from error
    return None


def _unpack(content: bytes) -> Word:
    """Return a word; raise ValueError if the bytes are none."""
    words = _FORMAT.unpack(content)
    if words[0] != _MAGIC:
        raise ValueError("magic")
    return Word(
        generation=words[_GENERATION],
        phase=Phase(words[_PHASE]),
        step=words[_STEP],
        microstep=words[_MICROSTEP],
        monotonic_ns=words[_TIME],
        saved_step=words[_SAVED],
        sequence=words[_SEQUENCE],
        began_ns=words[_BEGAN],
        start_step=words[_START_STEP],
        first_step_ns=words[_FIRST_STEP],
        spent_ns=words[_SPENT:],
    )
