"""Save and restore the training state with Orbax.

Enters: a state (any pytree of arrays) with the JSON facts about the run. Leaves: one
folder per saved step, committed by an atomic rename, so that a process killed while it
saves leaves the step before. The state is stored as a flat mapping from the path of a
leaf (`params.embed.table`) to its global array: what is on disk depends on names and
shapes only, never on the mesh, on the number of processes or on container classes.

Orbax reports a failed background write at the next call, and some failures of the disk
as ValueError. Here a failed save or restore is always a RuntimeError.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

_STATE = "state"
_RUN = "run"
_NAMED_DIFFERENCES = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class CkptConfig:
    """When the state is saved, and how many saves are kept."""

    every: int = 100
    """Steps between checkpoints; the last step is always saved."""
    keep: int = 3
    """Newest checkpoints kept."""

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--ckpt.{name} must be at least 1, not {getattr(self, name)}"
                )


class Checkpoints:
    """The saved steps of one run: a folder that Orbax writes in the background.

    Every process of the run makes the same calls in the same order.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int) -> None:
        """Open the folder, and make it where it does not exist.

        Args:
          directory: holds one folder per saved step; absolute or relative.
          keep: newest steps kept; older ones are deleted after a newer one is safe.
        """
        self._directory = Path(directory).absolute()
        self._pending_step: int | None = None
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, cleanup_tmp_directories=True
            ),
            item_handlers={
                _STATE: ocp.StandardCheckpointHandler(),
                _RUN: ocp.JsonCheckpointHandler(),
            },
        )

    def latest_step(self) -> int | None:
        """Return the newest committed step, None where nothing is saved."""
        return self._manager.latest_step()

    def save(self, step: int, state: PyTree, run: Mapping[str, Any]) -> None:
        """Copy the state off the devices, then write it in the background.

        On return the device buffers may be donated. A save that still runs is waited
        for first. Saving a step that is saved already does nothing.

        Args:
          step: optimizer steps that the state has seen.
          state: pytree of arrays, sharded at will.
          run: JSON facts that belong to the state: config, data position, versions.
        Raises:
          RuntimeError: this save could not start, or the one before it failed.
        """
        if step in (self._pending_step, self.latest_step()):
            return
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{
                        _STATE: ocp.args.StandardSave(_by_path(state)),
                        _RUN: ocp.args.JsonSave(dict(run)),
                    }
                ),
                force=True,
            )
        except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
            raise self._save_failed(error) from error
        self._pending_step = step

    def check(self) -> None:
        """Raise the error of a background write that has failed since the last call.

        Raises:
          RuntimeError: a save that `save` accepted did not reach the disk.
        """
        # Orbax' own check_for_errors stays silent here: its thread that commits the
        # step has taken the error by then, and hands it out only when waited for.
        if self._pending_step is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Block until the last accepted save is committed.

        Raises:
          RuntimeError: it did not reach the disk.
        """
        try:
            self._manager.wait_until_finished()
        except (ValueError, OSError, jax.errors.JaxRuntimeError) as error:
            raise self._save_failed(error) from error
        self._pending_step = None

    def close(self) -> None:
        """Wait for the last save and stop the background threads.

        Raises:
          RuntimeError: that save did not reach the disk.
        """
        self.wait()
        self._manager.close()

    def check_matches(self, abstract_state: PyTree) -> None:
        """Check that the newest step holds exactly these leaves, from metadata alone.

        Args:
          abstract_state: pytree of `jax.ShapeDtypeStruct`.
        Raises:
          ValueError: leaves are absent, additional, or of another shape or dtype.
          RuntimeError: the metadata cannot be read.
        """
        step = self._newest()
        metadata = self._read(step, lambda: self._manager.item_metadata(step)[_STATE])
        saved = {path: (leaf.shape, leaf.dtype) for path, leaf in metadata.items()}
        wanted = {
            path: (leaf.shape, leaf.dtype)
            for path, leaf in _by_path(abstract_state).items()
        }
        differing = [
            f"  {path}: saved {_shown(saved.get(path))}, "
            f"this run {_shown(wanted.get(path))}"
            for path in [*wanted, *(path for path in saved if path not in wanted)]
            if saved.get(path) != wanted.get(path)
        ]
        if not differing:
            return
        more = len(differing) - _NAMED_DIFFERENCES
        if more > 0:
            differing[_NAMED_DIFFERENCES:] = [f"  and {more} more"]
        raise ValueError(
            f"the checkpoint {self._directory / str(step)} is of another model or "
            "optimizer:\n" + "\n".join(differing) + "\nGive the flags it was saved "
            "with, or another --work-dir, or --restart-from-scratch"
        )

    def restore(self, abstract_state: PyTree) -> PyTree:
        """Read the newest step straight onto the shardings that are asked for.

        Each process reads the pieces that its devices hold, whatever the mesh was
        when the step was saved; no host holds a full copy.

        Args:
          abstract_state: pytree of `jax.ShapeDtypeStruct` with shardings.
        Returns:
          The state: same structure, shapes, dtypes and shardings.
        Raises:
          ValueError: the checkpoint holds other leaves; see `check_matches`.
          RuntimeError: there is no step, or its files cannot be read.
        """
        self.check_matches(abstract_state)
        step = self._newest()
        wanted = _by_path(abstract_state)
        args = ocp.args.Composite(**{_STATE: ocp.args.StandardRestore(wanted)})
        restored = self._read(
            step, lambda: self._manager.restore(step, args=args)[_STATE]
        )
        structure = jax.tree.structure(abstract_state)
        return jax.tree.unflatten(structure, [restored[path] for path in wanted])

    def restore_run(self) -> dict[str, Any]:
        """Return the JSON facts saved with the newest step.

        Raises:
          RuntimeError: there is no step, or its files cannot be read.
        """
        step = self._newest()
        args = ocp.args.Composite(**{_RUN: ocp.args.JsonRestore()})
        return self._read(step, lambda: self._manager.restore(step, args=args)[_RUN])

    def _newest(self) -> int:
        step = self.latest_step()
        if step is None:
            raise RuntimeError(f"no checkpoint in {self._directory}")
        return step

    def _read(self, step: int, read: Any) -> Any:
        """Call `read`; damaged files end as RuntimeError with the way out."""
        path = self._directory / str(step)
        try:
            return read()
        except (ValueError, KeyError, OSError, jax.errors.JaxRuntimeError) as error:
            raise RuntimeError(
                f"cannot read the checkpoint {path}: {error}\nIf its files are "
                "damaged, move that folder away: the run then resumes from the step "
                "before"
            ) from error

    def _save_failed(self, error: Exception) -> RuntimeError:
        self._pending_step = None
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        return RuntimeError(
            f"a checkpoint was not saved in {self._directory}: {reason}"
        )


def _by_path(tree: PyTree) -> dict[str, Any]:
    """Name every leaf by its path, in the order of `jax.tree.leaves`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _shown(leaf: tuple[Any, Any] | None) -> str:
    if leaf is None:
        return "absent"
    shape, dtype = leaf
    return f"{dtype}{list(shape)}"
