"""Stage 1 of a save: from the devices to host memory, while training waits.

If several devices hold a box, only replica 0 (in jax's numbering) is copied; a copy for
the local tier has all boxes of this process. On return the device buffers may be
donated: nothing refers to them. The next save reuses the buffers, so the system
allocates no new memory.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Shaped

from mjax.ckpt.boxes import Box, box_of
from mjax.ckpt.manifest import Leaf
from mjax.mesh.host_memory import HOST_KIND

PARAMS = "params."
"""Prefix of the names of leaves whose values must all be finite."""


@dataclasses.dataclass(frozen=True)
class HostPiece:
    """A box of a leaf in host memory."""

    box: Box
    data: Any
    """numpy array, or jax array in pinned host memory; see `array`."""
    is_first: bool
    """Whether this process is the one that copies this box for the store."""

    def array(self) -> Shaped[np.ndarray, "..."]:
        """Return the values; no copy on a CPU."""
        return np.asarray(self.data)

    @property
    def is_finite(self) -> bool:
        """Whether no value is an infinity or NaN; true of whole numbers."""
        values = self.array()
        if not values.size or not jnp.issubdtype(values.dtype, jnp.inexact):
            return True
        # Both pass NaN on, and take no second array.
        return bool(np.isfinite(values.min()) and np.isfinite(values.max()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostLeaf:
    """One global array, and the pieces of it that this process has copied."""

    leaf: Leaf
    chunk: tuple[int, ...]
    """Shape of one piece."""
    pieces: tuple[HostPiece, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCopy:
    """A state in host memory: the part of this process."""

    leaves: Mapping[str, HostLeaf]
    num_bytes: int
    """Bytes of all pieces."""
    copy_s: float
    """Seconds that the copy took."""


def why_unusable(leaves: Mapping[str, HostLeaf]) -> str | None:
    """Say which parameter is not finite; None: all are.

    Such a state is useless: every later state would have the same parameters.
    """
    for name, leaf in leaves.items():
        if name.startswith(PARAMS):
            for piece in leaf.pieces:
                if not piece.is_finite:
                    return (
                        f"{name} {list(piece.box)} has values that are not finite: "
                        "this state is not saved"
                    )
    return None


class HostMemory:
    """Buffers for one host copy at a time."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, Box], np.ndarray] = {}

    def copy(self, leaves: Mapping[str, jax.Array], *, replicas: bool) -> HostCopy:
        """Copy the state off the devices; the previous copy becomes invalid.

        Args:
          leaves: global arrays by name.
          replicas: copy each box that this process holds, even if another process has
            replica 0 of it.
        """
        started_s = time.perf_counter()
        shards = {name: _chosen(array, replicas) for name, array in leaves.items()}
        for name, chosen in shards.items():
            shards[name] = {box: _start(shard) for box, shard in chosen.items()}
        copied = {
            name: HostLeaf(
                leaf=Leaf(shape=array.shape, dtype=str(array.dtype)),
                chunk=array.sharding.shard_shape(array.shape),
                pieces=tuple(
                    HostPiece(box, self._fetch(name, box, data), is_first)
                    for box, (data, is_first) in shards[name].items()
                ),
            )
            for name, array in leaves.items()
        }
        return HostCopy(
            leaves=copied,
            num_bytes=sum(p.data.nbytes for x in copied.values() for p in x.pieces),
            copy_s=time.perf_counter() - started_s,
        )

    def _fetch(self, name: str, box: Box, data: jax.Array) -> Any:
        """Copy the values of one shard into memory that nothing else writes."""
        if next(iter(data.devices())).platform != "cpu":
            return jax.block_until_ready(data)  # in pinned memory, see `_start`
        # np.asarray of a CPU array copies nothing: a donated step would write into it.
        values = np.asarray(data)
        buffer = self._buffers.get((name, box))
        if (
            buffer is None
            or buffer.shape != values.shape
            or buffer.dtype != values.dtype
        ):
            buffer = self._buffers[name, box] = np.empty(values.shape, values.dtype)
        np.copyto(buffer, values)
        return buffer


def _chosen(array: jax.Array, replicas: bool) -> dict[Box, Any]:
    """Choose one shard for each box that is copied."""
    chosen: dict[Box, Any] = {}
    for shard in array.addressable_shards:
        box = box_of(shard.index, array.shape)
        if shard.replica_id == 0 or (replicas and box not in chosen):
            chosen[box] = shard
    return chosen


def _start(shard: Any) -> tuple[jax.Array, bool]:
    """Let a device begin to send; the transfers of all devices run side by side."""
    data = shard.data
    if shard.device.platform != "cpu":
        pinned = SingleDeviceSharding(shard.device, memory_kind=HOST_KIND)
        # Copy even what is on the host already: the next step overwrites it.
        data = jax.device_put(data, pinned, may_alias=False)
    return data, shard.replica_id == 0
