"""Write the arrays of a step through Orbax, and read them piece by piece.

The folder `state/` of a step is an Orbax PyTree checkpoint with one leaf per name
(TensorStore, zarr in OCDBT, not compressed), so Orbax can read it without mjax. If
Orbax saved the jax arrays, it would make its own host copy, whose checksums mjax could
not compute. So mjax copies the arrays and gives Orbax the copies (`HostLeaf`). Orbax is
imported only to write or check (`orbax_handlers`); reading pieces does not need it.
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
    """Write the pieces of one process, and sync them to disk.

    Args:
      step_dir: existing folder of the step.
      leaves: all leaves by name, each with the pieces that this process writes.
      part: index of the process.
    Raises:
      OSError, ValueError: the disk cannot be written, for example because it is full.
    """
    from mjax.ckpt import orbax_handlers

    args = orbax_handlers.PyTreeSave(dict(leaves))
    orbax_handlers.writer(part).save(step_dir / STATE, args=args)


def merge_parts(step_dir: epath.Path) -> None:
    """Merge the parts of all processes into one checkpoint; one process calls this.

    Raises:
      OSError, ValueError: the disk cannot be written.
    """
    from mjax.ckpt import orbax_handlers

    orbax_handlers.writer(0).finalize(step_dir / STATE)


class PieceWriter:
    """Writes a step piece by piece from one process; buffers pieces until `flush`.

    A save writes all its pieces in one transaction, from an existing host copy. This
    class is for copies of steps, whose state is never in memory as a whole.
    """

    def __init__(
        self, step_dir: epath.Path, leaves: Mapping[str, tuple[Leaf, tuple[int, ...]]]
    ) -> None:
        """Write the metadata of the leaves that Orbax needs.

        Args:
          step_dir: existing folder of the step.
          leaves: all leaves by name, each with the shape of a piece.
        Raises:
          OSError, ValueError: the disk cannot be written.
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
        """Add a piece, whose values must not change until `flush`.

        Raises:
          OSError, ValueError: the disk cannot be written.
        """
        opened = spec(self._base, name, self._leaves[name])
        opening = ts.open(opened, create=True, open=True, context=self._context)
        store = opening.result().with_transaction(self._transaction)
        writing = store[slices(box)].write(
            values, can_reference_source_data_indefinitely=True
        )
        writing.result()

    def flush(self) -> None:
        """Sync the added pieces to disk.

        Raises:
          OSError, ValueError: the disk cannot be written, for example because it is
            full.
        """
        self._transaction.commit_sync()
        self._transaction = ts.Transaction(atomic=True)


class Reader:
    """Reads boxes (rectangular parts) of a step's arrays."""

    def __init__(self, step_dir: epath.Path, *, part: int | None = None) -> None:
        """Store the path; no file is opened yet.

        Args:
          step_dir: folder of the step.
          part: index of a process, to read only what that process wrote, before or
            after the merge; None reads the merged checkpoint.
        """
        folder = step_dir / STATE
        self._base = kvstore(folder if part is None else folder / part_dir(part))
        self._context = ts.Context()
        self._opened: dict[str, Any] = {}

    def read(self, name: str, leaf: Leaf, box: Box) -> Shaped[ndarray, "..."]:
        """Return the values of a box of a leaf.

        Raises:
          ValueError: TensorStore finds the files missing or damaged, or they hold an
            array of another shape or dtype.
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
    """Check that Orbax alone would read the same arrays as `Reader`.

    Orbax reads metadata files of its own, which `Reader` does not need. This check
    starts a backend of jax.

    Args:
      step_dir: folder of the step.
      names: names of the step's leaves.
    Raises:
      DamagedError: Orbax would read other arrays, or would fail.
      RuntimeError: the store denies access or times out.
    """
    from mjax.ckpt import orbax_handlers

    handler = orbax_handlers.locator()
    folder = step_dir / STATE
    where = f"{step_dir.name}/{STATE}"
    try:
        with orbax_handlers.quiet():
            found = handler.restore(folder)
    except (PermissionError, TimeoutError) as error:
        raise RuntimeError(
            f"{where} cannot be read now: {error}; check its permissions and "
            "connection, then repeat"
        ) from error
    except Exception as error:  # if its files are damaged, Orbax may raise any error
        reason = next(iter(str(error).splitlines()), "")
        raise DamagedError(
            f"{where} cannot be read by Orbax: {type(error).__name__}: {reason}"
        ) from error
    if found != {name: (folder.as_posix(), name, True, False) for name in names}:
        raise DamagedError(
            f"{where}: Orbax' list of the arrays is not that of the step"
        )
