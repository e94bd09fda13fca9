"""Load a saved step onto the devices of any mesh.

A process reads the pieces that its devices need and compares each with its checksum. If
devices of several processes hold the same box (replicas), one process reads it and the
others get it over the devices' own network: a step is read from the store only once,
however many replicas there are.

Source: Jiang et al. 2024 (MegaScale), arXiv:2402.15627, section 4.4 (fast recovery).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from mjax.ckpt.boxes import Box, box_of, shape_of
from mjax.hardware.xla_flags import for_collectives
from mjax.mesh.host_memory import HOST_KIND

_NUM_READERS = 8  # leaves that are read at the same time

Host = dict[str, dict[Box, np.ndarray]]
"""Values that a process has read, by leaf and box."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The sources of the values of one leaf."""

    box_of: dict[Any, Box]
    """Box of every device of the mesh."""
    source: dict[Box, Any]
    """For each box, the device from which all others with this box get it."""
    is_shared: bool
    """Some box is on devices of several processes, and not all of them have read it."""

    def reads(self, process: int) -> list[Box]:
        """Return the boxes that a process supplies."""
        return [b for b, d in self.source.items() if d.process_index == process]


def plan(leaf: jax.ShapeDtypeStruct, holders: set[int] | None = None) -> Plan | None:
    """Plan which process supplies each box of a leaf; all processes plan the same.

    Args:
      leaf: with its sharding.
      holders: the processes that have read all their boxes; None: nobody has, and the
        plan says who reads what.
    Returns:
      the plan; None if no holder has one of the boxes.
    """
    assert leaf.sharding is not None
    boxes = _boxes_of(leaf.sharding, leaf.shape)
    groups: dict[Box, list[Any]] = {}
    for device, box in boxes.items():
        groups.setdefault(box, []).append(device)
    source = {}
    for box, devices in groups.items():
        able = [d for d in devices if holders is None or d.process_index in holders]
        if not able:
            return None
        source[box] = min(able, key=lambda device: (device.process_index, device.id))
    processes = {device.process_index for device in boxes}
    return Plan(
        box_of=boxes,
        source=source,
        is_shared=holders != processes
        and any(len({d.process_index for d in group}) > 1 for group in groups.values()),
    )


def own_boxes(leaf: jax.ShapeDtypeStruct) -> list[Box]:
    """Return the boxes that the devices of this process hold, each once."""
    assert leaf.sharding is not None
    this = jax.process_index()
    boxes = _boxes_of(leaf.sharding, leaf.shape)
    return [*dict.fromkeys(b for d, b in boxes.items() if d.process_index == this)]


def _boxes_of(sharding: jax.sharding.Sharding, shape: Sequence[int]) -> dict[Any, Box]:
    """Say which box of an array each device of the mesh holds."""
    indices = sharding.devices_indices_map(tuple(shape))
    return {
        device: box_of(index, shape)
        for device, index in indices.items()
        if index is not None
    }


def read(
    read_boxes: Callable[[str, list[Box]], list[np.ndarray]],
    abstract: Mapping[str, jax.ShapeDtypeStruct],
) -> Host:
    """Read this process' share; touches no device.

    Args:
      read_boxes: returns boxes of a leaf; called by several threads. Its errors
        pass through.
      abstract: shapes, dtypes and shardings of the leaves.
    """
    wanted: dict[str, list[Box]] = {}
    this = jax.process_index()
    for name, leaf in abstract.items():
        planned = plan(leaf)
        assert planned is not None  # without holders every box has a reader
        wanted[name] = planned.reads(this)

    def read_leaf(name: str) -> dict[Box, np.ndarray]:
        boxes = wanted[name]
        return dict(zip(boxes, read_boxes(name, boxes) if boxes else [], strict=True))

    with ThreadPoolExecutor(_NUM_READERS) as pool:
        return dict(zip(wanted, pool.map(read_leaf, wanted), strict=True))


def place(
    host: Host,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    holders: set[int] | None = None,
) -> dict[str, jax.Array]:
    """Put what the processes have read on the devices; every process calls it.

    A shared leaf of host memory is summed on the devices first. Such leaves follow each
    other, so that a device holds one of them at a time.

    Args:
      host: what this process has read; leaf by leaf it is let go.
      abstract: shapes, dtypes and NamedShardings.
      holders: as in `plan`.
    """
    placed: dict[str, jax.Array] = {}
    scattered: dict[str, jax.Array] = {}
    sums: dict[jax.ShapeDtypeStruct, Any] = {}
    for name, leaf in abstract.items():
        planned = plan(leaf, holders)
        assert planned is not None
        values = host.pop(name, {})
        if not planned.is_shared:
            placed[name] = _placed(leaf, planned, values)
        elif leaf.sharding is not None and leaf.sharding.memory_kind == HOST_KIND:
            if leaf not in sums:  # leaves of one type share a program
                sums[leaf] = _totals({"leaf": leaf})
            parts = {"leaf": _scattered(leaf, planned, values)}
            placed[name] = _moved(sums[leaf](parts)["leaf"], leaf.sharding)
        else:
            scattered[name] = _scattered(leaf, planned, values)
    if scattered:
        leaves = {name: abstract[name] for name in scattered}
        for name, total in _totals(leaves)(scattered).items():
            placed[name] = jax.device_put(total, leaves[name].sharding)
    return placed


def _moved(x: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Copy an array to other memory; wait, as its own memory is not free before."""
    return jax.device_put(x, sharding).block_until_ready()


def _placed(
    leaf: jax.ShapeDtypeStruct, plan: Plan, values: Mapping[Box, np.ndarray]
) -> jax.Array:
    """Put boxes on the devices of this process, which has them all."""
    sharding = leaf.sharding
    assert sharding is not None
    own = [d for d in plan.box_of if d in sharding.addressable_devices]
    kind = sharding.memory_kind
    parts = [
        jax.device_put(
            values[plan.box_of[device]], SingleDeviceSharding(device, memory_kind=kind)
        )
        for device in own
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)


def _scattered(
    leaf: jax.ShapeDtypeStruct, plan: Plan, values: Mapping[Box, np.ndarray]
) -> jax.Array:
    """Make the bits [copies, *shape] of a leaf: one copy of each box, else zeros."""
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    bits = _bits(leaf)
    parts = []
    for device, box in plan.box_of.items():
        if device in sharding.addressable_devices:
            is_source = plan.source[box] == device
            part = (
                values[box].view(bits) if is_source else np.zeros(shape_of(box), bits)
            )
            parts.append(jax.device_put(part[None], device))
    axes = _replicated_axes(sharding)
    copies = math.prod(sharding.mesh.shape[axis] for axis in axes)
    return jax.make_array_from_single_device_arrays(
        (copies, *leaf.shape), NamedSharding(sharding.mesh, _stacked(sharding)), parts
    )


def _totals(leaves: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
    """Compile the sums over the copies: exact, being taken of bits as whole numbers."""
    shardings = {name: leaf.sharding for name, leaf in leaves.items()}

    def totals(scattered: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {
            name: lax.bitcast_convert_type(
                lax.psum(bits[0], _replicated_axes(shardings[name])), leaves[name].dtype
            )
            for name, bits in scattered.items()
        }

    [mesh] = {sharding.mesh for sharding in shardings.values()}
    summed = jax.shard_map(
        totals,
        mesh=mesh,
        in_specs=({name: _stacked(sharding) for name, sharding in shardings.items()},),
        out_specs={name: sharding.spec for name, sharding in shardings.items()},
    )
    return jax.jit(summed, donate_argnums=0, compiler_options=for_collectives(mesh))


def _bits(leaf: jax.ShapeDtypeStruct) -> np.dtype:
    """Return the whole numbers as wide as an element of a leaf."""
    return np.dtype(f"uint{8 * leaf.dtype.itemsize}")


def _stacked(sharding: Any) -> PartitionSpec:
    """Return the spec of the copies [copies, *shape] of a leaf, one on each replica."""
    return PartitionSpec(_replicated_axes(sharding), *sharding.spec)


def _replicated_axes(sharding: Any) -> tuple[str, ...]:
    """Return the mesh axes along which every device holds the same."""
    used: set[str] = set()
    for entry in sharding.spec:
        used |= {entry} if isinstance(entry, str) else {*(entry or ())}
    return tuple(axis for axis in sharding.mesh.axis_names if axis not in used)
