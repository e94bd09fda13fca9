"""Arrange devices in a mesh.

Input: axis sizes and devices, real ones or those of a described topology. Output: a
`jax.sharding.Mesh` with all axes, and its description as text.

Only this module decides the order of devices: by host, then by process, then by device.
The axes divide that list outermost first. So the devices of a tensor-parallel group are
neighbours on one host, and a data-parallel group spans the nearest hosts. Pipeline
neighbours, which exchange least, are furthest apart (Jiang et al. 2024, section 2,
arXiv:2402.15627).
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mjax.mesh.axes import AXES, AxisSizes

MAX_ROWS = 64
"""Number of devices up to which `describe` shows every device."""

FIRST_ROWS = 16
"""Number of devices that `describe` shows of a larger mesh."""


def build_mesh(
    sizes: AxisSizes,
    devices: Sequence[Any] | None = None,
    *,
    tp_across_hosts: bool = False,
) -> Mesh:
    """Build the mesh with all axes; tp groups are neighbours on one host.

    Args:
      sizes: size of every axis.
      devices: devices to use, in any order, real or described; None uses all devices of
        the run.
      tp_across_hosts: accept tensor-parallel groups that span hosts.
    Returns:
      A mesh of axes `AXES`, each of type Auto.
    Raises:
      ValueError: the number of devices is not the product of the sizes, a
        tensor-parallel group spans hosts, or dp_shard is not the number of shards on a
        host. Simulated devices share one host; for them any dp_node is accepted.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) != sizes.num_devices:
        raise ValueError(
            f"a mesh of {_axes_text(sizes.as_tuple())} needs {sizes.num_devices} "
            f"devices, got {len(devices)}"
        )
    grid = np.empty(len(devices), dtype=object)
    grid[:] = sorted(devices, key=lambda d: (host_of(d), d.process_index, d.id))
    grid = grid.reshape(sizes.as_tuple())
    if not tp_across_hosts:
        _check_tp_inside_hosts(grid)
    if sizes.dp_node > 1:
        _check_shards_of_hosts(grid)
    # Auto, because the step is a shard_map over all axes: the partitioner has no work,
    # and values carry no sharding in their types.
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def describe(mesh: Mesh) -> str:
    """Format the position of each device as a table.

    The text is the same on every process. For a mesh of more than `MAX_ROWS` devices
    only the first rows are shown.

    Args:
      mesh: a mesh made by `build_mesh`.
    Returns:
      Lines of text: sizes and totals, then for each device its host, process, number,
        coordinates, and the number of its tensor-parallel group.
    """
    grid: np.ndarray = mesh.devices
    devices: list[Any] = grid.ravel().tolist()
    shown = grid.size if grid.size <= MAX_ROWS else FIRST_ROWS
    rows: list[tuple[Any, ...]] = [("host", "process", "device", *AXES, "tp group")]
    for index, device in enumerate(devices[:shown]):
        place = np.unravel_index(index, grid.shape)
        tp_group = index // grid.shape[-1]
        rows.append(
            (host_of(device), device.process_index, device.id, *place, tp_group)
        )
    table = [[str(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
        for row in table
    ]
    if shown < grid.size:
        lines.append(f"... and {grid.size - shown} more devices")
    return "\n".join([_summary(grid), *lines])


def devices_per_host(devices: Iterable[Any]) -> int:
    """Return the number of devices per host: the common divisor if hosts differ.

    Tensor-parallel groups stay inside hosts if and only if tp divides this number.

    Args:
      devices: devices of all hosts.
    """
    return math.gcd(*Counter(host_of(device) for device in devices).values())


def host_of(device: Any) -> int:
    """Return the number of the host of a device.

    In a run of several processes `partition_index` numbers the machines, however many
    processes each has (jax compares boot ids). A run of one process on CPU has one host
    and no `partition_index`. A described topology has one process per host, and all
    devices have partition 0 (jax 0.11 and 0.12).
    """
    if device.client.local_device_count() == 0:
        return device.process_index
    return getattr(device, "partition_index", device.process_index)


def _check_tp_inside_hosts(grid: np.ndarray) -> None:
    """Refuse a tensor-parallel group that spans hosts."""
    tp = grid.shape[-1]
    for group in grid.reshape(-1, tp):
        hosts = sorted({host_of(device) for device in group})
        if len(hosts) > 1:
            per_host = devices_per_host(grid.flat)
            raise ValueError(
                f"--mesh.tp {tp} puts a tensor-parallel group on hosts "
                f"{', '.join(map(str, hosts))}: a host has {per_host} devices; choose "
                f"a tp that divides {per_host}, or accept slow links with "
                "--mesh.tp-across-hosts"
            )


def _check_shards_of_hosts(grid: np.ndarray) -> None:
    """Check that dp_node is between hosts and dp_shard inside them."""
    if grid.flat[0].platform == "cpu":
        return
    *_, num_nodes, per_node, tp = grid.shape
    hosts = np.vectorize(host_of, otypes=[int])(grid).reshape(
        -1, num_nodes, per_node, tp
    )
    is_inside = (hosts == hosts[:, :, :1, :1]).all()
    firsts = np.sort(hosts[:, :, 0, 0], axis=1)
    if is_inside and (firsts[:, 1:] != firsts[:, :-1]).all():
        return
    per_host = devices_per_host(grid.flat)
    fits, shards = per_host // tp, num_nodes * per_node
    remedy = "leave it out"
    if 1 < fits < shards and per_host % tp == 0 and shards % fits == 0:
        remedy = f"use {fits}, or leave it out"
    raise ValueError(
        f"--mesh.dp-shard-per-node {per_node} must be the number of shards on a host: "
        f"a host has {per_host} devices, and tp is {tp}; {remedy}"
    )


def _axes_text(shape: tuple[int, ...]) -> str:
    """Format axis sizes: pp 1 x dp_replicate 1 x dp_shard 4 x tp 2."""
    return " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True))


def _summary(grid: np.ndarray) -> str:
    """Return the first line of `describe`."""
    hosts = {host_of(device) for device in grid.flat}
    processes = {device.process_index for device in grid.flat}
    kind = grid.flat[0].device_kind
    return (
        f"mesh {_axes_text(grid.shape)} = {grid.size} devices ({kind}), "
        f"hosts: {len(hosts)}, processes: {len(processes)}"
    )
