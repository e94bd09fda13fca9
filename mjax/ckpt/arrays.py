"""Arrays on disk: written through Orbax, read piece by piece.

`state/` of a step is an Orbax PyTree checkpoint with one leaf a name (TensorStore, zarr
in OCDBT, not compressed), so that Orbax reads it without us. Orbax's own path from
device to disk hides the host copy. We hand it a leaf type instead, `HostLeaf`, whose
checksums have been taken. Orbax is imported when it is needed (`orbax_handlers`):
reading pieces does not need it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import tensorstore as ts
from etils import epath
from jaxtyping import Shaped
from numpy import ndarray

from mjax.ckpt.boxes import Box, slices
from mjax.ckpt.host_copy import HostLeaf
from mjax.ckpt.layout import STATE, kvstore, part_dir, spec
from mjax.ckpt.manifest import DamagedError, Leaf


def write_part(step_dir: epath.Path, leaves: Mapping[str, HostLeaf], part: int) -> None:
    """Write the pieces of one process, and bring them to the disk.

    Args:
      step_dir: folder of the step; it exists.
      leaves: all leaves, each with the pieces that this process writes.
      part: index of the process.
    Raises:
      OSError, ValueError: the store refuses, as when it is full.
    """
    from mjax.ckpt import orbax_handlers

    args = orbax_handlers.PyTreeSave(dict(leaves))
    orbax_handlers.writer(part).save(step_dir / STATE, args=args)


def merge_parts(step_dir: epath.Path) -> None:
    """Make one checkpoint of the parts of all processes; one process calls it.

    Raises:
      OSError, ValueError: the store refuses.
    """
    from mjax.ckpt import orbax_handlers

    orbax_handlers.writer(0).finalize(step_dir / STATE)


class PieceWriter:
    """Writes a step piece by piece, as one process; holds what was added since `flush`.

    A save writes all its pieces in one transaction, from an existing host copy. This
    class is for states that are never in memory as a whole.
    """

    def __init__(
        self, step_dir: epath.Path, leaves: Mapping[str, tuple[Leaf, tuple[int, ...]]]
    ) -> None:
        """Write what Orbax wants to know of the leaves.

        Args:
          step_dir: folder of the step; it exists.
          leaves: all of them, each with the shape of a piece.
        Raises:
          OSError, ValueError: the store refuses.
        """
        empty = {
            name: HostLeaf(leaf=leaf, chunk=chunk, pieces=())
            for name, (leaf, chunk) in leaves.items()
        }
        write_part(step_dir, empty, 0)
        self._leaves = empty
        self._base = kvstore(step_dir / STATE / part_dir(0))
        self._context = ts.Context()
        self._transaction = ts.Transaction(atomic=True)

    def add(self, name: str, box: Box, values: Shaped[ndarray, "..."]) -> None:
        """Take a piece; it must not change until `flush`.

        Raises:
          OSError, ValueError: the store refuses.
        """
        opened = spec(self._base, name, self._leaves[name])
        opening = ts.open(opened, create=True, open=True, context=self._context)
        store = opening.result().with_transaction(self._transaction)
        writing = store[slices(box)].write(
            values, can_reference_source_data_indefinitely=True
        )
        writing.result()

    def flush(self) -> None:
        """Bring to the disk what was added.

        Raises:
          OSError, ValueError: the store refuses, as when it is full.
        """
        self._transaction.commit_sync()
        self._transaction = ts.Transaction(atomic=True)


class Reader:
    """Reads boxes of the arrays of a step."""

    def __init__(self, step_dir: epath.Path, *, part: int | None = None) -> None:
        """Open nothing yet.

        Args:
          step_dir: folder of the step.
          part: read the part of this process only, before or without merging.
        """
        folder = step_dir / STATE
        self._base = kvstore(folder if part is None else folder / part_dir(part))
        self._context = ts.Context()
        self._opened: dict[str, Any] = {}

    def read(self, name: str, leaf: Leaf, box: Box) -> Shaped[ndarray, "..."]:
        """Return a box of a leaf.

        Raises:
          ValueError: the files are missing or damaged, as far as TensorStore sees it,
            or hold an array of another shape or dtype.
        """
        if name not in self._opened:
            opened = {
                "driver": "zarr",
                "kvstore": {"driver": "ocdbt", "base": self._base, "path": name},
                "dtype": leaf.dtype,
                "metadata": {"shape": leaf.shape},
            }
            opening = ts.open(opened, read=True, open=True, context=self._context)
            self._opened[name] = opening.result()
        return self._opened[name][slices(box)].read().result()


def check_orbax_reads(step_dir: epath.Path, names: Iterable[str]) -> None:
    """Check that Orbax alone would read the very arrays that `Reader` reads.

    Orbax goes through files of its own, which `Reader` does not need. It starts a
    backend of jax.

    Args:
      step_dir: folder of the step.
      names: names of its leaves.
    Raises:
      DamagedError: it would read others, or fail.
      RuntimeError: the store does not answer.
    """
    from mjax.ckpt import orbax_handlers

    handler = orbax_handlers.locator()
    folder = step_dir / STATE
    where = f"{step_dir.name}/{STATE}"
    try:
        with orbax_handlers.quiet():
            found = handler.restore(folder)
    except (PermissionError, TimeoutError) as error:
        raise RuntimeError(f"{where} cannot be read now: {error}") from error
    except Exception as error:  # Orbax trusts its files: damaged, they raise anything
        reason = next(iter(str(error).splitlines()), "")
        raise DamagedError(
            f"{where} cannot be read by Orbax: {type(error).__name__}: {reason}"
        ) from error
    if found != {name: (folder.as_posix(), name, True, False) for name in names}:
        raise DamagedError(
            f"{where}: Orbax' list of the arrays is not that of the step"
        )
