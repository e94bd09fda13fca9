"""Detect silent data corruption: replicas of a state whose bits differ.

Input: a state. Output: the processes with a device whose shards differ from the same
shards in other replicas. Each device hashes its own shards; only hashes are sent.
Source: ByteRobust, arXiv:2509.16293, which finds machines with silent corruption by
replaying steps. Differs: the replicas of the run itself are compared.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, UInt32

from mjax.mesh.axes import AXES, DP_REPLICATE
from mjax.mesh.collectives import vary
from mjax.mesh.host_memory import is_on_host, to_device

_REPLICA = AXES.index(DP_REPLICATE)
# Odd factors: a changed bit of one element always changes the sum.
_PLACE, _MIX, _LEAF = 0x9E3779B9, 0x85EBCA6B, 0x01000193


@dataclasses.dataclass(frozen=True)
class Corruption:
    """Result of a comparison of replicas that differ."""

    processes: tuple[int, ...]
    """Processes whose devices differ from the majority of the replicas; all processes
    that disagree, if there is no majority."""
    is_sure: bool
    """Whether a majority of the replicas agrees, so that the rest is wrong."""


def make_find_corruption(
    shardings: Any, mesh: Mesh | AbstractMesh
) -> Callable[[Any], Corruption | None] | None:
    """Return a function that compares the replicas of a state; None with one replica.

    Every process gets the same result. A comparison all-gathers one number per device.

    Args:
      shardings: shardings of the state; no leaf is sharded over `dp_replicate`.
      mesh: mesh with all axes.
    """
    if mesh.shape[DP_REPLICATE] < 2:
        return None
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    hashes = jax.jit(
        jax.shard_map(
            _gathered_hash, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec()
        )
    )

    def find(state: Any) -> Corruption | None:
        assert isinstance(mesh, Mesh)
        processes = np.vectorize(lambda device: device.process_index, otypes=[int])(
            mesh.devices
        )
        return judge(np.asarray(hashes(state)), processes)

    return find


def judge(
    hashes: UInt32[np.ndarray, "pp r n s tp"], processes: np.ndarray
) -> Corruption | None:
    """Return the processes whose devices differ; None if all agree.

    Args:
      hashes: hash of each device, in the layout of the mesh.
      processes: index of each device's process, in the same layout.
    """
    num_replicas = hashes.shape[_REPLICA]
    by_place = np.moveaxis(hashes, _REPLICA, -1).reshape(-1, num_replicas)
    owners = np.moveaxis(processes, _REPLICA, -1).reshape(-1, num_replicas)
    wrong: set[int] = set()
    is_sure = True
    for row, owner in zip(by_place, owners, strict=True):
        values, counts = np.unique(row, return_counts=True)
        if len(values) == 1:
            continue
        has_majority = 2 * counts.max() > num_replicas
        is_sure &= bool(has_majority)
        is_wrong = row != values[counts.argmax()] if has_majority else row == row
        wrong |= {int(process) for process in owner[is_wrong]}
    return Corruption(tuple(sorted(wrong)), is_sure) if wrong else None


def _gathered_hash(state: Any) -> UInt32[Array, "pp r n s tp"]:
    """Hash this device's shards, and return the hashes of all devices."""
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(state):
        if is_on_host(leaf):  # copy leaves to the device one at a time
            leaf, total = lax.optimization_barrier((leaf, total))
        total = total * jnp.uint32(_LEAF) + _hash(to_device(leaf))
    found = vary(total)
    for axis in reversed(AXES):
        found = lax.all_gather(found, axis, to="invarying")
    return found


def _hash(leaf: Array) -> UInt32[Array, ""]:
    """Sum the bits of an array, after mixing each element with its position."""
    width = leaf.dtype.itemsize * 8
    bits = lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{width}")).astype(jnp.uint32)
    places = jnp.arange(leaf.size, dtype=jnp.uint32).reshape(leaf.shape)
    mixed = (bits ^ (places * jnp.uint32(_PLACE))) * jnp.uint32(_MIX)
    mixed = mixed ^ (mixed >> 13)
    return jnp.sum(mixed, dtype=jnp.uint32)
