"""Orbax handlers that write host copies, and that report what Orbax would read.

Input: host copies and folders. Output: handlers for Orbax. Importing this module
imports Orbax, which takes a quarter of a second, so `arrays` imports it only to write
or check.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import type_handlers

from mjax.ckpt.boxes import slices
from mjax.ckpt.host_copy import HostLeaf
from mjax.ckpt.layout import kvstore, part_dir, spec

PyTreeSave = ocp.args.PyTreeSave


class _HostLeafHandler(type_handlers.TypeHandler):
    """Writes the pieces of a `HostLeaf` as Orbax writes the shards of a jax array."""

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
        # After an error, wait for the other writes: they still read the host copy.
        for outcome in await asyncio.gather(*writing, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        await transaction.commit_async()
        return []

    async def _write(self, value: HostLeaf, info: Any, transaction: Any) -> None:
        base = kvstore(info.parent_dir / part_dir(self._part))
        opened = spec(base, info.name, value)
        store = await ts.open(opened, create=True, open=True, context=info.ts_context)
        store = store.with_transaction(transaction)
        for piece in value.pieces:
            await store[slices(piece.box)].write(
                piece.array(), can_reference_source_data_indefinitely=True
            )


class _Locator(type_handlers.TypeHandler):
    """Handler that reads no arrays, and returns where Orbax would read them."""

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


def writer(part: int) -> ocp.PyTreeCheckpointHandler:
    """Return the handler that writes the pieces of one process."""
    registry = type_handlers.create_type_handler_registry(
        (HostLeaf, _HostLeafHandler(part))
    )
    with quiet():
        return ocp.PyTreeCheckpointHandler(
            use_ocdbt=True, use_compression=False, type_handler_registry=registry
        )


def locator() -> ocp.PyTreeCheckpointHandler:
    """Return the handler that gives, for each array, where Orbax would read it."""
    registry = type_handlers.create_type_handler_registry((jax.Array, _Locator()))
    with quiet():
        return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress Orbax's warnings that metadata of jax arrays is missing."""
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
