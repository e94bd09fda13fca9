"""Replicas that should hold the same bits: a wrong one is noticed, and where it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mjax.mesh.axes import AXES, AxisSizes
from mjax.mesh.build import build_mesh
from mjax.step.replicas import Corruption, judge, make_find_corruption

ONE_EACH = np.arange(8).reshape(1, 4, 1, 2, 1)
"""A process for each device of four replicas of two shards."""


def hashes(**changes):
    found = np.zeros((1, 4, 1, 2, 1), np.uint32)
    found += np.arange(2, dtype=np.uint32)[:, None]
    for place, value in changes.items():
        replica, shard = map(int, place.removeprefix("at_").split("_"))
        found[0, replica, 0, shard, 0] = value
    return found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"at_2_1": 9}, Corruption((5,), is_sure=True)),
        ({"at_2_1": 9, "at_0_0": 9}, Corruption((0, 5), is_sure=True)),
        ({"at_2_1": 9, "at_3_1": 9}, Corruption((1, 3, 5, 7), is_sure=False)),
        ({"at_2_1": 9, "at_3_1": 8}, Corruption((1, 3, 5, 7), is_sure=False)),
    ],
)
def test_the_devices_that_differ_from_most_are_named(changes, expected):
    assert judge(hashes(**changes), ONE_EACH) == expected


def test_of_two_replicas_both_are_named():
    found = judge(
        np.array([7, 8], np.uint32).reshape(1, 2, 1, 1, 1),
        np.arange(2)[None, :, None, None, None],
    )
    assert found == Corruption((0, 1), is_sure=False)


@pytest.fixture(scope="module")
def mesh():
    return build_mesh(AxisSizes(pp=1, dp_replicate=4, dp_shard=2, tp=1))


SPECS = {"w": PartitionSpec("dp_shard"), "b": PartitionSpec(), "n": PartitionSpec()}
LEAVES = {
    "w": np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4),
    "b": np.linspace(-1, 1, 5).astype(jnp.bfloat16),
    "n": np.int32(3),
}


def place(leaf, sharding, wrong_device=None, bit=0):
    """Put a leaf on the devices, on one of them with a bit turned over."""

    def shard(device, index):
        part = np.array(leaf[index])
        if device == wrong_device:
            bits = part.reshape(-1).view(f"uint{8 * part.itemsize}")
            bits[-1] ^= 1 << bit
        return jax.device_put(part, device)

    parts = sharding.addressable_devices_indices_map(leaf.shape).items()
    return jax.make_array_from_single_device_arrays(
        leaf.shape, sharding, [shard(device, index) for device, index in parts]
    )


@pytest.mark.parametrize(("name", "bit"), [("w", 0), ("w", 31), ("b", 15), ("n", 7)])
def test_a_bit_that_one_device_has_wrong_is_found(mesh, name, bit):
    shardings = {leaf: NamedSharding(mesh, spec) for leaf, spec in SPECS.items()}
    find = make_find_corruption(shardings, mesh)
    assert find is not None
    state = {leaf: place(value, shardings[leaf]) for leaf, value in LEAVES.items()}
    assert find(state) is None
    wrong = mesh.devices[0, 2, 0, 1, 0]
    state[name] = place(LEAVES[name], shardings[name], wrong, bit)
    assert find(state) == Corruption((0,), is_sure=True)


def test_one_replica_has_nothing_to_be_compared_with():
    mesh = build_mesh(AxisSizes(pp=1, dp_replicate=1, dp_shard=8, tp=1))
    assert [*mesh.axis_names] == [*AXES]
    assert make_find_corruption({}, mesh) is None
