"""Stage 1 of a save: from the devices to host memory, while training waits.

A box is a rectangular part of an array (`boxes`). If several devices hold a box, only
replica 0 (in jax's numbering) is copied; a copy that stays on the host (`local`) has
all boxes of this process. After the copy the device buffers may be donated, because the
copy does not use them. The next save reuses the host buffers and allocates no memory.
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
"""Prefix of the leaf names of parameters, whose values must all be finite."""


@dataclasses.dataclass(frozen=True)
class HostPiece:
    """Values of a box of a leaf, in host memory."""

    box: Box
    data: Any
    """The values: a numpy array, or a jax array in pinned host memory; see `array`."""
    is_first: bool
    """Whether this process is the one that writes this box to the store."""

    def array(self) -> Shaped[np.ndarray, "..."]:
        """Return the values; if the devices are CPUs, without copying them."""
        return np.asarray(self.data)

    @property
    def is_finite(self) -> bool:
        """Whether no value is infinite or NaN; always true for integers."""
        values = self.array()
        if not values.size or not jnp.issubdtype(values.dtype, jnp.inexact):
            return True
        # min and max propagate NaN, and need no second array.
        return bool(np.isfinite(values.min()) and np.isfinite(values.max()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostLeaf:
    """Description of a global array, and its pieces that this process has copied."""

    leaf: Leaf
    chunk: tuple[int, ...]
    """Shape of one piece, in elements."""
    pieces: tuple[HostPiece, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostCopy:
    """This process's part of a state, in host memory."""

    leaves: Mapping[str, HostLeaf]
    num_bytes: int
    """Bytes of all pieces of this process."""
    copy_s: float
    """Seconds that the copy took."""


def why_unusable(leaves: Mapping[str, HostLeaf]) -> str | None:
    """Return a text that names a parameter with non-finite values; None if none has.

    Such a state is useless: the parameter would stay non-finite in every later state.
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
        """Copy the state off the devices, overwriting the previous copy.

        Args:
          leaves: global arrays by leaf name.
          replicas: whether to copy each box that this process holds, even if replica 0
            of the box is on another process.
        Returns:
          The copy, which is valid until the next call.
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
        """Return the values of one shard in memory that nothing else writes to."""
        if next(iter(data.devices())).platform != "cpu":
            return jax.block_until_ready(data)  # already in pinned memory, see `_start`
        # np.asarray does not copy a CPU array, and a step to which the array is donated
        # would overwrite the values.
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
    """Return box -> the shard to copy it from."""
    chosen: dict[Box, Any] = {}
    for shard in array.addressable_shards:
        box = box_of(shard.index, array.shape)
        if shard.replica_id == 0 or (replicas and box not in chosen):
            chosen[box] = shard
    return chosen


def _start(shard: Any) -> tuple[jax.Array, bool]:
    """Start copying a shard to host memory, without waiting for the end of the copy.

    Returns:
      The copy (on a CPU the array of the shard, not copied), and whether the shard is
      replica 0.
    """
    data = shard.data
    if shard.device.platform != "cpu":
        pinned = SingleDeviceSharding(shard.device, memory_kind=HOST_KIND)
        # Copy arrays in host memory as well, because the next step overwrites them.
        data = jax.device_put(data, pinned, may_alias=False)
    return data, shard.replica_id == 0
