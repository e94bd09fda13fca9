"""Places of a step at which a device records the time, and the log of these times.

The step carries the log like the gradients; it is None if stamps are off. The log has
space for all rows of a step, in the order of the places.
"""

import enum
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Int32, PyTree

from mjax.kernels.stamp import api as stamp
from mjax.kernels.target import Target
from mjax.mesh.axes import AXES

type Log = Int32[Array, "rows 2"] | None

LOG_SPEC = PartitionSpec(AXES)
"""Spec of the logs of all devices, concatenated in the order of the mesh."""


class Place(enum.IntEnum):
    """The work that is complete when a row is written, as the tag of the row."""

    BEGIN = 0
    """No work: the batch has arrived."""
    FORWARD = 1
    """The forward pass of a microbatch, its loss, and the gradient of the loss."""
    BACKWARD = 2
    """The backward pass of the layers for one microbatch; in a pipeline, for all."""
    TICK = 3
    """All earlier ticks of a pipeline: a tick begins."""
    NORM = 4
    """The global gradient norm."""


def writes_stamps(wanted: bool | None, mesh: Mesh | AbstractMesh) -> bool:
    """Return whether the devices of a mesh write stamps.

    Args:
      wanted: the user's setting; None writes them on GPUs that can.
      mesh: mesh of the devices.
    Raises:
      NotImplementedError: `wanted` is true, and these devices cannot write stamps.
    """
    device = mesh.abstract_mesh.abstract_device
    kind = Target(platform=device.platform, device_kind=device.device_kind)
    if wanted is None:
        return kind.platform == "gpu" and stamp.is_supported(kind)
    if wanted:
        stamp.choose(kind)
    return wanted


def begin(num_rows: int, values: PyTree) -> tuple[Log, PyTree]:
    """Create a log whose first row is BEGIN."""
    return stamp.begin(num_rows, values, Place.BEGIN)


def mark(log: Log, values: PyTree, place: Place) -> tuple[Log, PyTree]:
    """Append a row when the values are ready; see `kernels.stamp.api.append`."""
    if log is None:
        return log, values
    return stamp.append(log, values, place)


def mark_smallest(log: Log, place: Place, *trees: PyTree) -> tuple[Any, ...]:
    """Append a row when the smallest array of each tree is ready.

    Use it for trees whose arrays become ready together, from a loop or a backward pass.
    Do not pass the result of a transfer: waiting for it leaves less work to overlap.

    Returns:
      the log, and the trees.
    """
    if log is None:
        return log, *trees
    flat = [jax.tree.flatten(tree) for tree in trees]
    places = [_smallest(leaves) for leaves, _ in flat]
    found = [leaves[at] for (leaves, _), at in zip(flat, places, strict=True)]
    log, found = mark(log, found, place)
    for (leaves, _), at, leaf in zip(flat, places, found, strict=True):
        leaves[at] = leaf
    return log, *(jax.tree.unflatten(structure, leaves) for leaves, structure in flat)


def _smallest(leaves: list[Array]) -> int:
    """Return the position of the smallest array in the memory of the device."""
    device = jax.memory.Space.Device
    here = [i for i, x in enumerate(leaves) if jax.typeof(x).memory_space == device]
    return min(here, key=lambda i: leaves[i].size)


def mark_global(
    log: Log, values: PyTree, place: Place, mesh: Mesh | AbstractMesh
) -> tuple[Log, PyTree]:
    """Append a row on every device, outside shard_map.

    Args:
      log: log of all devices.
      values: the same on all devices.
      place: the completed work.
      mesh: mesh of the devices.
    """
    if log is None:
        return log, values
    everywhere = PartitionSpec()
    return jax.shard_map(
        lambda log, values: stamp.append(log, values, place),
        mesh=mesh,
        in_specs=(LOG_SPEC, everywhere),
        out_specs=(LOG_SPEC, everywhere),
        # A kernel cannot write in place to an array that varies over the mesh (jax
        # 0.11.2).
        check_vma=False,
    )(log, values)
