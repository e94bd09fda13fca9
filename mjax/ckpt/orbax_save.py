"""One attempt to save a step, run by Orbax's AsyncCheckpointer.

Orbax runs the phases in order, in a thread that ends with the commit. A handler and a
class of temporary paths implement the phases:

    folder      temporary path, create     process 0 makes <step>.unfinished-*
    written     handler, commit future     all checksum, write and fsync their pieces
    merged      handler, finalize          process 0 merges them, writes the manifest
    checked     handler, finalize          all read their pieces back and compare
    committed   temporary path, finalize   process 0 fsyncs and renames the folder

The processes agree on the result of every phase (`phases`). So Orbax is told that each
process saves alone (`active_processes`, `primary_host`), and runs none of its own
barriers, which are device collectives or have their own time limits.
"""

import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.path import atomicity_types

from mjax.ckpt import arrays, manifest
from mjax.ckpt.errors import FinalError
from mjax.ckpt.host_copy import HostCopy, HostLeaf, why_unusable
from mjax.ckpt.job import Job, Progress
from mjax.ckpt.manifest import Leaf, Manifest, Piece, Pieces
from mjax.ckpt.phases import Phases
from mjax.ckpt.saved_step import read_checked
from mjax.ckpt.store import Store, manifest_in, pieces_in, write_file

_DAY_S = 86_400
# mjax prints the reason on one line; Orbax would add two tracebacks.
_OF_FAILED_SAVES = "Handler Commit operations or the Commit callback"


def save_once(job: Job, store: Store, phases: Phases, progress: Progress) -> None:
    """Save a step; return on every process when it is committed.

    Call this from a daemon thread. Orbax's threads are then daemons too, so a store
    that hangs does not keep the program from exiting.

    Args:
      job: host copy and description of the step.
      store: folder of the steps.
      phases: a new attempt at the phases of `job.PHASES`.
      progress: updated in place, even if the attempt fails.
    Raises:
      FailedError: a phase failed on some process; the step was not committed.
      OSError, RuntimeError: Orbax failed on this process only.
    """
    assert threading.current_thread().daemon
    logging.getLogger("absl").addFilter(_is_no_failed_save)
    handler = _StepHandler(phases, progress)
    checkpointer = ocp.AsyncCheckpointer(
        handler,
        async_options=ocp.options.AsyncOptions(
            timeout_secs=_DAY_S,  # `phases` limits how long a process may be silent
            barrier_sync_fn=_no_barrier,
            create_directories_asynchronously=False,
        ),
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            primary_host=None, active_processes={phases.rank}
        ),
        file_options=ocp.options.FileOptions(skip_sync_file_validations=True),
        # Orbax's own metadata are not needed: a step's manifest contains more.
        checkpoint_metadata_store=ocp.metadata.metadata_store(
            enable_write=False, blocking_write=True
        ),
        temporary_path_class=_agreed_path(job, store, phases, progress),
    )
    try:
        with checkpointer:
            checkpointer.save(store.path(job.step), args=_StepSave(job))
    finally:
        concurrent.futures.wait(handler.writing)  # still runs if Orbax itself failed


class _StepHandler(ocp.AsyncCheckpointHandler):
    """Writes a host copy with its checksums, and reads it back before the commit."""

    def __init__(self, phases: Phases, progress: Progress) -> None:
        self._phases, self._progress = phases, progress
        self.writing: list[Any] = []
        self._job: Job | None = None
        self._part = _Part()
        self._part_sums: list[int] = []

    async def async_save(
        self, directory: epath.Path, *_: Any, args: "_StepSave"
    ) -> list[Any]:
        """Start writing; return a future that ends when all processes have written."""
        self._job = args.job
        self.writing = [_in_background(lambda: self._write(directory, args.job))]
        return self.writing

    def finalize(self, directory: epath.Path) -> None:
        """Merge the parts into one checkpoint and read it back, before the commit."""
        job, sums = self._job, self._part_sums
        assert job is not None
        self._phases.lead("merged", lambda: _merge(directory, job, sums))

        def act() -> int:
            started_s = time.perf_counter()
            _read_back(directory, self._part)
            self._progress.read_back_s = time.perf_counter() - started_s
            return 0

        self._phases.together("checked", act)

    def _write(self, folder: epath.Path, job: Job) -> None:
        def act() -> int:
            self._part = _summed(job.copy)
            self._progress.checksum_s = self._part.checksum_s
            arrays.write_part(folder, self._part.leaves, self._phases.rank)
            write_file(folder / manifest.part_name(self._phases.rank), self._part.text)
            return manifest.text_crc32c(self._part.text)

        self._part_sums = self._phases.together("written", act)

    def save(self, directory: epath.Path, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a step is saved by `async_save`."""
        raise NotImplementedError("a step is saved by async_save")

    def restore(self, directory: epath.Path, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a step is read by `SavedStep`, which compares the checksums."""
        raise NotImplementedError("a step is read by SavedStep")


@ocp.args.register_with_handler(_StepHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _StepSave(ocp.args.CheckpointArgs):
    """The arguments that Orbax passes to the handler."""

    job: Job


def _agreed_path(
    job: Job, store: Store, phases: Phases, progress: Progress
) -> type[atomicity_types.TemporaryPath]:
    """Return the class with which Orbax creates and renames an attempt's folder."""

    class AgreedPath(atomicity_types.TemporaryPath):
        """The folder of an attempt; a failure on process 0 fails all processes."""

        def __init__(self, final_path: epath.Path) -> None:
            self._final_path = final_path

        @classmethod
        def from_final(
            cls, final_path: epath.Path, **_: Any
        ) -> atomicity_types.TemporaryPath:
            return cls(final_path)

        @classmethod
        def from_temporary(cls, temporary_path: epath.Path, **_: Any) -> NoReturn:
            raise NotImplementedError("a folder that was left is deleted, see Store")

        @classmethod
        async def validate(cls, temporary_path: epath.Path) -> NoReturn:
            raise NotImplementedError("a folder that was left is deleted, see Store")

        @classmethod
        async def validate_final(cls, final_path: epath.Path) -> NoReturn:
            raise NotImplementedError("a step is verified by SavedStep")

        def get(self) -> epath.Path:
            assert progress.folder is not None
            return progress.folder

        def get_final(self) -> epath.Path:
            return self._final_path

        async def create(self) -> epath.Path:
            def act() -> str:
                progress.folder = store.begin(job.step, job.num_bytes)
                return progress.folder.as_posix()

            progress.folder = epath.Path(phases.lead("folder", act))
            return progress.folder

        async def finalize(self) -> None:
            def act() -> str:
                store.commit(self.get(), job.step)
                return ""

            phases.lead("committed", act)

    return AgreedPath


def remove_unfinished(progress: Progress) -> None:
    """Delete the folder of a failed attempt, on process 0.

    If it cannot be deleted now, it is deleted before the next attempt.
    """
    if progress.folder is not None:
        with contextlib.suppress(OSError):
            progress.folder.rmtree()


def _no_barrier(*, key: str, timeout_ms: int) -> None:
    """Replace a barrier of Orbax: `phases` synchronises the processes already."""


def _is_no_failed_save(record: logging.LogRecord) -> bool:
    return _OF_FAILED_SAVES not in record.getMessage()


def _in_background(act: Callable[[], None]) -> concurrent.futures.Future[None]:
    """Call `act` in a daemon thread, which the exit does not wait for.

    Returns:
      A future with the result of `act`.
    """
    future: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # Orbax raises it from the future
            future.set_exception(error)

    threading.Thread(target=run, name="mjax-ckpt-write", daemon=True).start()
    return future


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """The pieces that one process writes, with checksums computed in host memory."""

    leaves: Mapping[str, HostLeaf] = dataclasses.field(default_factory=dict)
    pieces: Pieces = dataclasses.field(default_factory=dict)
    text: str = ""
    """Text of the file that lists the pieces."""
    checksum_s: float = 0.0


def _summed(copy: HostCopy | str) -> _Part:
    """Return the pieces that this process writes, with their checksums.

    Raises:
      RuntimeError: there is no host copy.
      FinalError: a parameter has non-finite values.
    """
    if isinstance(copy, str):
        raise RuntimeError(copy)
    leaves = _first_pieces(copy)
    if why := why_unusable(leaves):
        raise FinalError(why)
    started_s = time.perf_counter()
    pieces: Pieces = {
        name: [Piece(p.box, manifest.crc32c(p.array())) for p in value.pieces]
        for name, value in leaves.items()
    }
    return _Part(
        leaves=leaves,
        pieces=pieces,
        text=manifest.write_pieces(pieces),
        checksum_s=time.perf_counter() - started_s,
    )


def _merge(folder: epath.Path, job: Job, sums: list[int]) -> str:
    """Merge the parts of all processes, write the manifest and check it; return ""."""
    arrays.merge_parts(folder)
    text = manifest.write_manifest(
        Manifest(
            step=job.step,
            save_id=job.save_id,
            leaves={name: value.leaf for name, value in job.leaves.items()},
            part_sums=sums,
            run=job.run,
        )
    )
    write_file(folder / manifest.MAIN_FILE, text)
    pieces_in(folder, manifest_in(folder))
    return ""


def _read_back(folder: epath.Path, part: _Part) -> None:
    """Check that the merged checkpoint returns the pieces of this process."""
    reader = arrays.Reader(folder)
    for name, pieces in part.pieces.items():
        leaf: Leaf = part.leaves[name].leaf
        for piece in pieces:
            read_checked(reader, name, leaf, piece, "read back")


def _first_pieces(copy: HostCopy) -> dict[str, HostLeaf]:
    """Return the leaves without the boxes that another process writes."""
    return {
        name: dataclasses.replace(
            value, pieces=tuple(p for p in value.pieces if p.is_first)
        )
        for name, value in copy.leaves.items()
    }
