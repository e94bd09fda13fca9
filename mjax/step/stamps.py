"""The log of a device: the times at which it reached certain places in a step.

The step passes the log along with the gradients. It is None if stamps are off. It has
space for all rows of a step, in the order in which they are written.
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
"""PartitionSpec of the logs of all devices, concatenated in the order of the mesh."""


class Place(enum.IntEnum):
    """Tag of a row: the work that is complete when the row is written."""

    BEGIN = 0
    """No work: the batch has arrived."""
    FORWARD = 1
    """The forward pass of a microbatch, its loss, and the gradient of the loss."""
    BACKWARD = 2
    """The backward pass of a microbatch. For the last microbatch, and in a pipeline,
    the backward pass of the layers."""
    TICK = 3
    """All earlier ticks of a pipeline; the next tick begins."""
    NORM = 4
    """The reduction of the gradients, and their global norm."""


def writes_stamps(wanted: bool | None, mesh: Mesh | AbstractMesh) -> bool:
    """Return whether the devices of a mesh write stamps.

    Args:
      wanted: the user's setting; None chooses stamps if the devices are GPUs that can
        write them.
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
    """Create a log with a row BEGIN, written when `values` are ready; return both."""
    return stamp.begin(num_rows, values, Place.BEGIN)


def mark(log: Log, values: PyTree, place: Place) -> tuple[Log, PyTree]:
    """Append a row when the values are ready; return both (`kernels.stamp.api`)."""
    if log is None:
        return log, values
    return stamp.append(log, values, place)


def mark_smallest(log: Log, place: Place, *trees: PyTree) -> tuple[Any, ...]:
    """Append a row when the smallest array of each tree is ready.

    Use it for the trees of a loop or a backward pass: their arrays are ready together.
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
    """Return the index of the smallest array that is in device memory."""
    device = jax.memory.Space.Device
    here = [i for i, x in enumerate(leaves) if jax.typeof(x).memory_space == device]
    return min(here, key=lambda i: leaves[i].size)


def mark_global(
    log: Log, values: PyTree, place: Place, mesh: Mesh | AbstractMesh
) -> tuple[Log, PyTree]:
    """Append a row on every device, outside shard_map; return the log and `values`.

    Args:
      log: log of all devices.
      values: arrays with equal values on all devices.
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
