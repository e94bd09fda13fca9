"""Arrays on disk: written through Orbax, read piece by piece.

`state/` of a step is an Orbax PyTree checkpoint with one leaf a name (TensorStore, zarr
in OCDBT, not compressed), so that Orbax reads it without us. Orbax' own way from device
to disk keeps the host copy to itself; ours hands it a leaf type, `HostLeaf`, of which
the checksums have been taken.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from jaxtyping import Shaped
from numpy import ndarray
from orbax.checkpoint import type_handlers

from mjax.ckpt.boxes import Box, slices
from mjax.ckpt.host_copy import HostLeaf
from mjax.ckpt.manifest import DamagedError, Leaf

STATE = "state"


def write_part(step_dir: epath.Path, leaves: Mapping[str, HostLeaf], part: int) -> None:
    """Write the pieces of one process, and bring them to the disk.

    Args:
      step_dir: of the step; it exists.
      leaves: all leaves, each with the pieces that this process writes.
      part: index of the process.
    Raises:
      OSError, ValueError: the store refuses, as when it is full.
    """
    _handler(part).save(step_dir / STATE, args=ocp.args.PyTreeSave(dict(leaves)))


def merge_parts(step_dir: epath.Path) -> None:
    """Make one checkpoint of the parts of all processes; one process calls it.

    Raises:
      OSError, ValueError: the store refuses.
    """
    _handler(0).finalize(step_dir / STATE)


class PieceWriter:
    """Writes a step piece by piece, as one process; holds what was added since `flush`.

    A save writes all its pieces in one transaction, out of a host copy that is there
    anyway. This one is for states that are never in memory as a whole.
    """

    def __init__(
        self, step_dir: epath.Path, leaves: Mapping[str, tuple[Leaf, tuple[int, ...]]]
    ) -> None:
        """Write what Orbax wants to know of the leaves.

        Args:
          step_dir: of the step; it exists.
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
        self._base = _kvstore(step_dir / STATE / _part_dir(0))
        self._context = ts.Context()
        self._transaction = ts.Transaction(atomic=True)

    def add(self, name: str, box: Box, values: Shaped[ndarray, "..."]) -> None:
        """Take a piece; it must not change until `flush`.

        Raises:
          OSError, ValueError: the store refuses.
        """
        spec = _spec(self._base, name, self._leaves[name])
        opening = ts.open(spec, create=True, open=True, context=self._context)
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
          step_dir: of the step.
          part: read the part of this process only, before or without merging.
        """
        folder = step_dir / STATE
        self._base = _kvstore(folder if part is None else folder / _part_dir(part))
        self._context = ts.Context()
        self._opened: dict[str, Any] = {}

    def read(self, name: str, leaf: Leaf, box: Box) -> Shaped[ndarray, "..."]:
        """Return a box of a leaf.

        Raises:
          ValueError: the files are missing or damaged, as far as TensorStore sees it,
            or hold an array of another shape or dtype.
        """
        if name not in self._opened:
            spec = {
                "driver": "zarr",
                "kvstore": {"driver": "ocdbt", "base": self._base, "path": name},
                "dtype": leaf.dtype,
                "metadata": {"shape": leaf.shape},
            }
            opening = ts.open(spec, read=True, open=True, context=self._context)
            self._opened[name] = opening.result()
        return self._opened[name][slices(box)].read().result()


class _HostLeafHandler(type_handlers.TypeHandler):
    """Writes the pieces of `HostLeaf` as Orbax writes those of a jax array."""

    def __init__(self, part: int) -> None:
        self._part = part

    def typestr(self) -> str:
        return "jax.Array"

    async def metadata(self, infos: Sequence[Any]) -> Any:
        raise NotImplementedError("a host copy is written only; see Reader")

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Any:
        raise NotImplementedError("a host copy is written only; see Reader")

    async def serialize(
        self, values: Sequence[HostLeaf], infos: Sequence[Any], args: Any = None
    ) -> Sequence[Any]:
        del args
        transaction = ts.Transaction(atomic=True)
        pairs = zip(values, infos, strict=True)
        writing = [self._write(x, info, transaction) for x, info in pairs if x.pieces]
        # After an error the others are waited for: they refer to the host copy.
        for outcome in await asyncio.gather(*writing, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        await transaction.commit_async()
        return []

    async def _write(self, value: HostLeaf, info: Any, transaction: Any) -> None:
        base = _kvstore(info.parent_dir / _part_dir(self._part))
        spec = _spec(base, info.name, value)
        store = await ts.open(spec, create=True, open=True, context=info.ts_context)
        store = store.with_transaction(transaction)
        for piece in value.pieces:
            await store[slices(piece.box)].write(
                piece.array(), can_reference_source_data_indefinitely=True
            )


class _Locator(type_handlers.TypeHandler):
    """Instead of reading arrays, says where Orbax would read them."""

    def typestr(self) -> str:
        return "jax.Array"

    async def metadata(self, infos: Sequence[Any]) -> Any:
        raise NotImplementedError("see check_orbax_reads")

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Any = None
    ) -> Sequence[Any]:
        raise NotImplementedError("see check_orbax_reads")

    async def deserialize(
        self, infos: Sequence[Any], args: Any = None
    ) -> Sequence[tuple[str, str, bool, bool]]:
        return [
            (i.parent_dir.as_posix(), i.name, i.is_ocdbt_checkpoint, i.use_zarr3)
            for i in infos
        ]


def check_orbax_reads(step_dir: epath.Path, names: Iterable[str]) -> None:
    """Check that Orbax alone would read the very arrays that `Reader` reads.

    Orbax goes through files of its own, which `Reader` does not need. It starts a
    backend of jax.

    Args:
      step_dir: of the step.
      names: of its leaves.
    Raises:
      DamagedError: it would read others, or fail.
      RuntimeError: the store does not answer.
    """
    registry = type_handlers.create_type_handler_registry((jax.Array, _Locator()))
    with _quiet():
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    folder = step_dir / STATE
    where = f"{step_dir.name}/{STATE}"
    try:
        with _quiet():
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


def _handler(part: int) -> ocp.PyTreeCheckpointHandler:
    registry = type_handlers.create_type_handler_registry(
        (HostLeaf, _HostLeafHandler(part))
    )
    with _quiet():
        return ocp.PyTreeCheckpointHandler(
            use_ocdbt=True, use_compression=False, type_handler_registry=registry
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep back Orbax' warnings that there is no metadata of jax arrays."""
    logger = logging.getLogger("absl")

    def keep(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return "ArrayMetadata persistence is disabled" not in message and (
            "No ArrayMetadata Store defined" not in message
        )

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _spec(base: Any, name: str, value: HostLeaf) -> dict[str, Any]:
    """Describe a new array to TensorStore."""
    return {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": base, "path": name},
        "dtype": value.leaf.dtype,
        "metadata": {
            "shape": value.leaf.shape,
            "chunks": [max(1, size) for size in value.chunk],
            "compressor": None,
        },
    }


def _part_dir(part: int) -> str:
    """Return the name of a folder that Orbax merges."""
    return f"ocdbt.process_{part}"


def _kvstore(folder: epath.Path) -> Any:
    """Describe a folder to TensorStore: a URL, or a local path."""
    text = folder.as_posix()
    return f"{text}/" if "://" in text else {"driver": "file", "path": f"{text}/"}
