"""Stage 2 of a save: from host memory to the store, in the background.

One thread in each process. Process 0 makes the folder and names it to the others. Every
process sums and writes its pieces; process 0 merges the parts and writes the manifest;
every process reads its pieces back out of the whole and compares them with the sums of
the host copy; process 0 renames the folder. If anything fails anywhere, the folder is
deleted and the same host copy is tried again after a pause, until it succeeds or a
newer copy takes its place.

Everything is agreed through the key-value store: no collective runs in the background,
and no process waits for one that has failed.
"""

import contextlib
import dataclasses
import json
import queue
import threading
import time
from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
from etils import epath

from mjax.ckpt import arrays, manifest
from mjax.ckpt.host_copy import HostCopy, HostLeaf, why_unusable
from mjax.ckpt.manifest import Leaf, Manifest, Piece, Pieces
from mjax.ckpt.saved_step import read_checked
from mjax.ckpt.store import Retention, Store, manifest_in, pieces_in, write_file
from mjax.processes.key_value import KeyValueStore

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_DAY_S = 86_400.0
_ABANDONED = "abandoned"
_UNUSABLE = -1
"""In place of a checksum: this state may not be saved, however often it is tried."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A host copy that is to become a saved step."""

    step: int
    save_id: str
    copy: HostCopy | str
    """Or why this process has none: the attempt fails."""
    run: Mapping[str, Any]
    """JSON facts that belong to the state."""
    max_attempts: int | None
    """Then it is given up; None tries until a newer job comes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """How one try went, as process 0 saw it."""

    step: int
    save_id: str
    number: int
    """1 for the first try of a job."""
    error: str | None
    """None: the step is saved."""
    pause_s: float | None
    """Until the next try; None: there is none."""
    write_s: float
    """Seconds from the first folder to the last rename."""
    checksum_s: float
    """Seconds of these that process 0 spent on the checksums of its host copy."""
    read_back_s: float
    """Seconds of these that process 0 spent on reading its part back."""
    num_bytes: int
    """Of all arrays, over all processes."""
    removed: tuple[int, ...] = ()
    """Older steps that were deleted after this one was safe."""
    warning: str | None = None
    """What went wrong after the step was saved, as when older ones are deleted."""


class Writer:
    """The background thread of one process; every process makes the same calls."""

    def __init__(
        self,
        store: Store,
        retention: Retention,
        texts: KeyValueStore,
        *,
        refused: Callable[[], Container[tuple[int, str]]],
        timeout_s: int,
    ) -> None:
        """Start the thread.

        Args:
          store: where steps go.
          retention: which older ones stay.
          texts: shared with the writers of the other processes, and with nobody else.
          refused: returns (step, save id) of what may not be restored.
          timeout_s: after this an attempt in which a process does not answer fails.
        """
        self.attempts: queue.SimpleQueue[Attempt] = queue.SimpleQueue()
        """How tries went, on process 0."""
        self.saved_step: int | None = None
        """The last step that was committed, or from which the run goes on."""
        self._store, self._retention, self._texts = store, retention, texts
        self._refused, self._timeout_s = refused, timeout_s
        self._rank, self._num = jax.process_index(), jax.process_count()
        self._tries = 0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._is_writing = False
        self._since_s = 0.0
        self._lock = threading.Lock()
        self._superseded = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(
            target=self._work, name="mjax-ckpt-writer", daemon=True
        )
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether process 0 writes now; not while it pauses between two tries."""
        return self._is_writing

    @property
    def is_stalled(self) -> bool:
        """Whether process 0 has been in one try for longer than the time limit."""
        return self._is_writing and time.monotonic() - self._since_s > self._timeout_s

    def claim(self) -> bool:
        """Let process 0 begin no other try; false if it is in one.

        After true, a newer job may be submitted without waiting for a store.
        """
        with self._lock:
            if not self._is_writing:
                self._superseded.set()
            return not self._is_writing

    def _begin_try(self) -> bool:
        """Say whether process 0 is to try once more."""
        with self._lock:
            self._is_writing = not self._superseded.is_set()
            self._since_s = time.monotonic()
            return self._is_writing

    def submit(self, job: Job) -> None:
        """Write a host copy; the one before must be done, see `wait`."""
        assert self._is_idle.is_set()
        self._raise_failure()
        self._superseded.clear()
        self._is_idle.clear()
        self._begin_try()
        self._jobs.put(job)

    def supersede(self) -> None:
        """Let process 0 try the present job no more once it pauses."""
        self._superseded.set()

    def wait(self, timeout_s: int | float | None = None) -> bool:
        """Wait until the last job is saved or given up; say whether it is."""
        done = self._is_idle.wait(timeout_s)
        self._raise_failure()
        return done

    def close(self) -> None:
        """Stop after the present job."""
        self._jobs.put(None)
        self._thread.join(_LONGEST_PAUSE_S)  # a store that hangs holds nobody up

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the thread that writes checkpoints has died") from (
                self._failure
            )

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._lead(job) if self._rank == 0 else self._follow(job)
            except BaseException as error:  # whatever it is, `wait` raises it
                self._failure = error
            self._is_writing = False
            self._is_idle.set()

    # ----------------------------------------------------------------------- process 0

    def _lead(self, job: Job) -> None:
        pause_s = _FIRST_PAUSE_S
        for number in range(1, 1 << 30):
            is_last = number == job.max_attempts
            attempt = self._try(job, number, None if is_last else pause_s)
            self._is_writing = False
            self.attempts.put(attempt)
            if attempt.pause_s is None:
                return
            self._superseded.wait(pause_s)
            if not self._begin_try():
                self._texts.post(self._key("go"), _ABANDONED)
                self._tries += 1
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _try(self, job: Job, number: int, pause_s: float | None) -> Attempt:
        """Write, read back and commit once; the result is posted."""
        begun_s = time.perf_counter()
        part, folder, error, read_back_s = _Part(), None, None, 0.0
        leaves = {} if isinstance(job.copy, str) else job.copy.leaves
        num_bytes = sum(value.leaf.num_bytes for value in leaves.values())
        try:
            folder = self._store.begin(job.step, num_bytes)
        except OSError as problem:
            error = _in_words(problem)
        self._texts.post(self._key("go"), folder.as_posix() if folder else "")
        if folder is not None:
            part = _write_part(folder, job.copy, 0)
            sums = self._collect("done", part.file_sum, part.error)
            error = sums.error or _merge(folder, job, leaves, sums.values)
            pause_s = None if _UNUSABLE in sums.values else pause_s
            self._texts.post(self._key("merged"), "" if error else "yes")
            if not error:
                started_s = time.perf_counter()
                problem = _read_back(folder, part)
                read_back_s = time.perf_counter() - started_s
                error = self._collect("checked", 0, problem).error
            error = error or self._commit(folder, job.step)
            if error:
                # What cannot be deleted now is deleted before the next try.
                with contextlib.suppress(OSError):
                    folder.rmtree()
        result = {"error": error, "again": bool(error) and pause_s is not None}
        self._texts.post(self._key("result"), json.dumps(result))
        self._next_try()
        attempt = Attempt(
            step=job.step,
            save_id=job.save_id,
            number=number,
            error=error,
            pause_s=pause_s if error else None,
            write_s=time.perf_counter() - begun_s,
            checksum_s=part.checksum_s,
            read_back_s=read_back_s,
            num_bytes=num_bytes,
        )
        if error:
            return attempt
        self.saved_step = job.step
        return self._pruned(attempt)

    def _pruned(self, attempt: Attempt) -> Attempt:
        """Delete the older steps that are no longer kept."""
        try:
            removed = self._store.prune(
                self._retention, newest=attempt.step, refused=self._refused()
            )
        except OSError as problem:
            return dataclasses.replace(attempt, warning=_in_words(problem))
        return dataclasses.replace(attempt, removed=tuple(removed))

    def _collect(self, key: str, value: int, error: str | None) -> "_Answers":
        """Wait for what every process posts under a key; the own answer is given."""
        values = [value]
        problems = [f"process 0: {error}"] if error else []
        until_s = time.monotonic() + self._timeout_s
        for rank in range(1, self._num):
            try:
                left_s = max(0.1, until_s - time.monotonic())
                text = self._texts.read(self._key(f"{key}/{rank}"), timeout_s=left_s)
            except TimeoutError:
                problems.append(f"process {rank} did not answer ({self._timeout_s} s)")
                continue
            value, error = json.loads(text)
            values.append(value)
            if error:
                problems.append(f"process {rank}: {error}")
        return _Answers(values=values, error="; ".join(problems) or None)

    def _commit(self, folder: epath.Path, step: int) -> str | None:
        try:
            self._store.commit(folder, step)
        except OSError as problem:
            return _in_words(problem)
        return None

    # ------------------------------------------------------------------ other processes

    def _follow(self, job: Job) -> None:
        is_over = False
        while not is_over:
            folder = self._texts.read(self._key("go"), timeout_s=_DAY_S)
            if folder == _ABANDONED:
                self._tries += 1
                return
            if folder:
                path = epath.Path(folder)
                part = _write_part(path, job.copy, self._rank)
                self._answer("done", part.file_sum, part.error)
                if self._texts.read(self._key("merged"), timeout_s=_DAY_S):
                    self._answer("checked", 0, _read_back(path, part))
            text = self._texts.read(self._key("result"), timeout_s=_DAY_S)
            result = json.loads(text)
            is_over = not result["again"]
            if result["error"] is None:
                self.saved_step = job.step
            self._next_try()

    def _answer(self, key: str, value: int, error: str | None) -> None:
        text = json.dumps([value, error])
        self._texts.post(self._key(f"{key}/{self._rank}"), text)

    def _key(self, name: str) -> str:
        return f"{self._tries}/{name}"

    def _next_try(self) -> None:
        if self._rank == 0:  # which has read them
            self._texts.remove(self._key("done"))
            self._texts.remove(self._key("checked"))
        self._tries += 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Answers:
    """What the processes posted, by rank."""

    values: list[int]
    error: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """How the part of one process was written."""

    pieces: Pieces = dataclasses.field(default_factory=dict)
    leaves: Mapping[str, Leaf] = dataclasses.field(default_factory=dict)
    file_sum: int = 0
    """CRC32C of the file that lists the pieces."""
    checksum_s: float = 0.0
    error: str | None = None


def _write_part(folder: epath.Path, copy: HostCopy | str, rank: int) -> _Part:
    """Sum and write the pieces of this process."""
    if isinstance(copy, str):
        return _Part(error=copy)
    leaves = _first_pieces(copy)
    if why := why_unusable(leaves):
        return _Part(file_sum=_UNUSABLE, error=why)
    started_s = time.perf_counter()
    pieces: Pieces = {
        name: [Piece(p.box, manifest.crc32c(p.array())) for p in value.pieces]
        for name, value in leaves.items()
    }
    text = manifest.write_pieces(pieces)
    part = _Part(
        pieces=pieces,
        leaves={name: value.leaf for name, value in leaves.items()},
        file_sum=manifest.text_crc32c(text),
        checksum_s=time.perf_counter() - started_s,
    )
    try:
        arrays.write_part(folder, leaves, rank)
        write_file(folder / manifest.part_name(rank), text)
    except (OSError, ValueError, RuntimeError) as problem:
        return dataclasses.replace(part, error=_in_words(problem))
    return part


def _merge(
    folder: epath.Path, job: Job, leaves: Mapping[str, HostLeaf], sums: list[int]
) -> str | None:
    """Make one checkpoint of the parts, and write the manifest; say what is wrong."""
    try:
        arrays.merge_parts(folder)
        text = manifest.write_manifest(
            Manifest(
                step=job.step,
                save_id=job.save_id,
                leaves={name: value.leaf for name, value in leaves.items()},
                part_sums=sums,
                run=job.run,
            )
        )
        write_file(folder / manifest.MAIN_FILE, text)
        pieces_in(folder, manifest_in(folder))
    except (OSError, ValueError, RuntimeError) as problem:
        return _in_words(problem)
    return None


def _read_back(folder: epath.Path, part: _Part) -> str | None:
    """See that the merged checkpoint gives back the pieces of this process."""
    reader = arrays.Reader(folder)
    try:
        for name, pieces in part.pieces.items():
            for piece in pieces:
                read_checked(reader, name, part.leaves[name], piece, "read back")
    except (OSError, ValueError, RuntimeError) as problem:
        return _in_words(problem)
    return None


def _first_pieces(copy: HostCopy) -> dict[str, HostLeaf]:
    """Leave out the boxes that another process writes."""
    return {
        name: dataclasses.replace(
            value, pieces=tuple(p for p in value.pieces if p.is_first)
        )
        for name, value in copy.leaves.items()
    }


def _in_words(problem: Exception) -> str:
    """Say what a failed write was about, in one line."""
    lines = str(problem).splitlines()
    return lines[0] if lines else repr(problem)
