"""Save and restore the training state.

Enters: a state (any pytree of arrays) with the JSON facts about the run. Leaves: one
folder per saved step. The state is stored as a flat mapping from the path of a leaf
(`params.embed.table`) to its global array: what is on disk depends on names and shapes
only, never on the mesh, on the number of processes or on container classes.

Saving has two stages: the copy to host memory, for which training waits
(`host_copy`), and the writing in the background (`saving`). Restoring takes the newest
step whose every byte has the checksum of what was saved (`saved_step`, `placing`);
damaged ones are put aside. See docs/checkpoints.md for what is promised.
"""

import contextlib
import dataclasses
import enum
import itertools
import json
import queue
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from mjax.ckpt import placing
from mjax.ckpt.config import CkptConfig
from mjax.ckpt.host_copy import HostCopy, HostMemory
from mjax.ckpt.journal import QUARANTINED, SAVED, Journal
from mjax.ckpt.manifest import (
    DamagedError,
    Leaf,
    Manifest,
    read_manifest,
    write_manifest,
)
from mjax.ckpt.saved_step import SavedStep
from mjax.ckpt.saving import Attempt, Job, Writer
from mjax.ckpt.store import Store
from mjax.mesh.board import Board

_NAMED_DIFFERENCES = 5
_LAST_ATTEMPTS = 8  # over about two minutes
_DAY_S = 86_400.0
# Every process opens its folders in the same order: the number is the same in all.
_opened = itertools.count()


class LostError(RuntimeError):
    """What was saved is not there or not intact, and a person must choose."""


class Answer(enum.Enum):
    """What became of the wish to save."""

    ACCEPTED = "accepted"
    """The state is copied; it is written in the background."""
    BUSY = "busy"
    """The save before is still being written; ask again at the next step."""
    HOPELESS = "hopeless"
    """Saves have failed for so long that the run should stop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """A state from a saved step, and what belongs to it."""

    step: int
    state: PyTree
    run: Mapping[str, Any]
    """JSON facts that were saved with it."""
    bytes_read: int
    """Bytes of pieces that this process read."""
    put_aside: tuple[str, ...]
    """Newer steps that were damaged: where they are now and why."""


class Checkpoints:
    """The saved steps of one run.

    Every process of the run makes the same calls in the same order.
    """

    def __init__(self, work_dir: Path, config: CkptConfig) -> None:
        """Open the folder of the checkpoints; nothing is made or changed.

        Args:
          work_dir: of the run; the journal is there.
          config: where the steps are, and which are kept.
        """
        self.store = Store(config.dir or work_dir / "checkpoints")
        self._config = config
        self._journal = Journal(work_dir / "checkpoints.jsonl")
        self._rank, self._num = jax.process_index(), jax.process_count()
        self._board = Board(f"ckpt/{next(_opened)}")
        self._rounds = itertools.count()
        self._memory = HostMemory()
        self._last_good_step = 0
        self._wanted_step: int | None = None
        self._error: str | None = None
        writers = Board(f"ckpt/{next(_opened)}")
        self._writer = Writer(
            self.store, config.retention, writers, timeout_s=config.timeout_s
        )

    # -------------------------------------------------------------------------- saving

    def ask(self, step: int, *, is_last: bool = False) -> Answer:
        """Say whether the state can be saved now; `save` follows ACCEPTED.

        Args:
          step: optimizer steps that the state has seen.
          is_last: the run ends after it: never BUSY, never HOPELESS.
        """
        return Answer(self._decide(lambda: self._answer(step, is_last).value))

    def _answer(self, step: int, is_last: bool) -> Answer:
        if is_last:
            return Answer.ACCEPTED
        if step - self._last_good_step > self._config.unsaved_limit:
            return Answer.HOPELESS
        return Answer.BUSY if self._writer.is_writing else Answer.ACCEPTED

    def save(
        self,
        step: int,
        make_state: Callable[[], PyTree],
        run: Mapping[str, Any],
        *,
        is_last: bool = False,
    ) -> HostCopy | None:
        """Copy the state off the devices, and let it be written in the background.

        On return the device buffers may be donated. A copy that could not be written so
        far is given up for the new one.

        Args:
          step: optimizer steps that the state has seen.
          make_state: returns the pytree of global arrays, sharded at will.
          run: JSON facts that belong to the state: config, data position, versions.
          is_last: give up after a few attempts.
        Returns:
          the copy; None where the step is saved already, or nothing could be copied,
          which the next attempt tells.
        """
        self._writer.supersede()
        self._writer.wait()
        # After the wait, that all processes find the same.
        if step == self._writer.saved_step:
            return None
        copy, error = None, None
        try:
            copy = self._memory.copy(_by_path(make_state()), replicas=False)
        except (RuntimeError, MemoryError) as problem:
            error = str(problem)
        self._writer.submit(
            Job(
                step=step,
                save_id=self._decide(lambda: secrets.token_hex(8)),
                copy=copy or error or "no memory",
                run=dict(run),
                max_attempts=_LAST_ATTEMPTS if is_last else None,
            )
        )
        self._wanted_step = step
        return copy

    def attempts(self) -> list[Attempt]:
        """Return how tries to write went since the last call; empty but on process 0.

        The journal is kept up to date.

        Raises:
          RuntimeError: the background thread has died.
        """
        self._writer.wait(0.0)
        ended: list[Attempt] = []
        while True:
            try:
                attempt = self._writer.attempts.get_nowait()
            except queue.Empty:
                return ended
            self._error = attempt.error
            if attempt.error is None:
                self._last_good_step = attempt.step
                attempt = self._noted(attempt)
            ended.append(attempt)

    def _noted(self, attempt: Attempt) -> Attempt:
        try:
            self._journal.write(SAVED, attempt.step, save_id=attempt.save_id)
        except OSError as error:
            return dataclasses.replace(attempt, warning=str(error))
        return attempt

    def why_unsaved(self, step: int) -> str:
        """Say for how long nothing was saved, and why; on process 0."""
        reason = self._error or "the save before is still being written"
        return (
            f"nothing was saved since step {self._last_good_step}, "
            f"{step - self._last_good_step} steps ago (--ckpt.max-unsaved "
            f"{self._config.unsaved_limit}): {reason}"
        )

    def wait(self) -> bool:
        """Wait until the last save is committed or given up; say whether it is."""
        self._writer.wait()
        return self._wanted_step == self._writer.saved_step

    def close(self) -> None:
        """Give up what is not saved yet, and stop the background thread."""
        self._writer.supersede()
        self._writer.close()

    # ----------------------------------------------------------------------- restoring

    def newest(self) -> Manifest | None:
        """Return what the newest step says about itself; its arrays are not read.

        Steps whose manifest is damaged are passed over, and stay where they are.

        Raises:
          LostError: the run has saved steps, and the store has none of them.
          ValueError: a newer version of mjax wrote the step.
        """

        def find() -> str:
            for step in reversed(self._candidates()):
                with contextlib.suppress(DamagedError):
                    return write_manifest(self.store.manifest(step))
            return ""

        text = self._decide(find)
        return read_manifest(text, "the newest step") if text else None

    def restore(self, abstract_state: PyTree) -> Restored | None:
        """Read the newest step that is intact onto the shardings that are asked for.

        All processes agree on the step. Newer ones that are damaged get another name.

        Args:
          abstract_state: pytree of `jax.ShapeDtypeStruct` with NamedShardings.
        Returns:
          the state: same structure, shapes, dtypes and shardings; None where nothing
          was ever saved.
        Raises:
          ValueError: the step holds other leaves; see `check_matches`.
          LostError: steps were saved and none is intact, or none is there.
          RuntimeError: the store does not answer.
        """
        wanted = _by_path(abstract_state)
        put_aside: list[str] = []
        while steps := json.loads(
            self._decide(lambda: json.dumps(self._candidates()[-1:]))
        ):
            [step] = steps
            saved, host, damage, trouble = self._read(step, wanted)
            damages = self._gather(damage, trouble)
            if damages:
                put_aside.append(self._put_aside(step, damages[0]))
                continue
            assert saved is not None
            arrays = placing.place(host, wanted)
            self._last_good_step = step
            self._writer.saved_step = self._wanted_step = step
            structure = jax.tree.structure(abstract_state)
            return Restored(
                step=step,
                state=jax.tree.unflatten(structure, [arrays[n] for n in wanted]),
                run=saved.manifest.run,
                bytes_read=saved.bytes_read,
                put_aside=tuple(put_aside),
            )
        return None

    def _read(
        self, step: int, wanted: Mapping[str, Any]
    ) -> tuple[SavedStep | None, placing.Host, str, Exception | None]:
        """Read this process' share; then what is damaged, and what else went wrong."""
        try:
            saved = SavedStep(self.store.path(step))
            _check_leaves(saved.manifest, wanted)
            return saved, placing.read(saved, wanted), "", None
        except DamagedError as damage:
            return None, {}, str(damage), None
        except (ValueError, RuntimeError, OSError) as error:
            return None, {}, "", error

    def _candidates(self) -> list[int]:
        """List the steps that may be restored, oldest first.

        Raises:
          LostError: there were some, and there is none now.
        """
        refused = self._journal.quarantined()
        steps, lost = [], []
        for step in self.store.steps():
            reason = refused.get((step, self._id(step)))
            if reason is None:
                steps.append(step)
            else:
                lost.append(f"{self.store.path(step)}: {reason}")
        if steps:
            return steps
        for name, reason in self.store.quarantined().items():
            lost.append(f"{self.store.directory / name}: {reason}")
        if lost:
            raise LostError(
                f"no intact checkpoint is left in {self.store.directory}:\n  "
                + "\n  ".join(lost)
                + "\nPut back a copy of one, or begin anew with --restart-from-scratch"
            )
        last = self._journal.last_saved()
        if last is not None:
            raise LostError(
                f"step {last} of this run was saved, and {self.store.directory} has no "
                "checkpoint at all; mount it, or give the --ckpt.dir of before, or "
                "begin anew with --restart-from-scratch"
            )
        return steps

    def _id(self, step: int) -> str:
        try:
            return self.store.manifest(step).save_id
        except (DamagedError, ValueError):
            return ""

    def _put_aside(self, step: int, reason: str) -> str:
        """Quarantine a step; return where it is now and why."""

        def move() -> str:
            save_id = self._id(step)
            try:
                where = str(self.store.quarantine(step, reason))
            except OSError as error:
                where = f"{self.store.path(step)} (cannot be renamed: {error.strerror})"
                self._journal.write(QUARANTINED, step, save_id=save_id, reason=reason)
            return f"{where}: {reason}"

        return self._decide(move)

    # ----------------------------------------------------------------------- agreement

    def _decide(self, decide: Callable[[], str]) -> str:
        """Decide on process 0 and give every process the same text.

        Raises:
          ValueError, RuntimeError: `decide` raised it (OSError becomes RuntimeError);
            every process raises it.
        """
        key = f"{next(self._rounds)}"
        answer: dict[str, Any] = {}
        if self._rank == 0:
            try:
                answer = {"value": decide()}
            except (ValueError, RuntimeError, OSError) as error:
                answer = {"error": str(error), "kind": type(error).__name__}
            if self._num > 1:
                self._board.post(key, json.dumps(answer))
        else:
            answer = json.loads(self._board.read(key, timeout_s=_DAY_S))
        if "error" in answer:
            kinds = {"ValueError": ValueError, "LostError": LostError}
            raise kinds.get(answer["kind"], RuntimeError)(answer["error"])
        return answer["value"]

    def _gather(self, damage: str, trouble: Exception | None) -> list[str]:
        """Return the damages that any process found; raise if one had other trouble."""
        key = f"{next(self._rounds)}"
        own = json.dumps([damage, "" if trouble is None else str(trouble)])
        texts = [own]
        if self._num > 1:
            self._board.post(f"{key}/{self._rank}", own)
            texts = [
                self._board.read(f"{key}/{rank}", timeout_s=_DAY_S)
                for rank in range(self._num)
            ]
        if trouble is not None:
            raise trouble
        found = [json.loads(text) for text in texts]
        for rank, (_, other) in enumerate(found):
            if other:
                raise RuntimeError(f"process {rank} cannot restore: {other}")
        return [text for text, _ in found if text]


def check_matches(manifest: Manifest, abstract_state: PyTree) -> None:
    """Check that a step holds exactly these leaves.

    Args:
      manifest: of the step.
      abstract_state: pytree of `jax.ShapeDtypeStruct`.
    Raises:
      ValueError: leaves are absent, additional, or of another shape or dtype.
    """
    _check_leaves(manifest, _by_path(abstract_state))


def _check_leaves(manifest: Manifest, abstract: Mapping[str, Any]) -> None:
    saved = manifest.leaves
    wanted = {
        path: Leaf(shape=leaf.shape, dtype=str(leaf.dtype))
        for path, leaf in abstract.items()
    }
    differing = [
        f"  {path}: saved {saved.get(path) or 'absent'}, "
        f"this run {wanted.get(path) or 'absent'}"
        for path in [*wanted, *(path for path in saved if path not in wanted)]
        if saved.get(path) != wanted.get(path)
    ]
    if not differing:
        return
    more = len(differing) - _NAMED_DIFFERENCES
    if more > 0:
        differing[_NAMED_DIFFERENCES:] = [f"  and {more} more"]
    raise ValueError(
        f"the checkpoint at step {manifest.step} is of another model or optimizer:\n"
        + "\n".join(differing)
        + "\nGive the flags it was saved with, or another --work-dir, or "
        "--restart-from-scratch"
    )


def _by_path(tree: PyTree) -> dict[str, Any]:
    """Name every leaf by its path, in the order of `jax.tree.leaves`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
