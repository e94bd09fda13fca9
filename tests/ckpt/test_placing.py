"""From what the processes have read onto the devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.ckpt import placing
from tests.ckpt.states import assert_same, sharding

BITS = {
    "float32": [0x80000000, 0x7FC00001, 0xFFC12345, 0x7F800001, 0x7F800000, 1, 0, 2],
    "bfloat16": [0x8000, 0x7FC1, 0xFFC2, 0x7F81, 0x7F80, 1, 0, 0xFFFF],
    "int32": [0xFFFFFFFF, 0x80000000, 1, 0, 7, 0x7FFFFFFF, 5, 6],
}
"""-0.0, NaN with payloads (signalling too), infinity, the smallest subnormal."""


def leaf_and_values(dtype, where):
    unsigned = np.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    values = np.array(BITS[dtype] * 2, unsigned).view(jnp.dtype(dtype)).reshape(8, 2)
    return jax.ShapeDtypeStruct((8, 2), values.dtype, sharding=where), values


def host_of(leaf, values):
    """Return what `placing.read` would have read here."""
    return {
        box: values[tuple(slice(*ends) for ends in box)].copy()
        for box in placing.plan(leaf).reads
    }


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize(
    ("is_shared", "where"),
    [
        (True, (2, 4, "rows")),
        (True, (2, 4, None, "rows")),
        (True, (8, 1)),
        (False, (2, 4, "rows")),
    ],
)
def test_replicas_get_the_bits_that_one_device_has(
    monkeypatch, dtype, is_shared, where
):
    leaf, values = leaf_and_values(dtype, sharding(*where))
    host = host_of(leaf, values)
    made = placing.plan(leaf)
    assert not made.is_shared, "one process shares with nobody"
    monkeypatch.setattr(
        placing, "plan", lambda _: dataclasses.replace(made, is_shared=is_shared)
    )
    placed = placing.place({"x": host}, {"x": leaf})["x"]
    assert placed.sharding == leaf.sharding
    assert_same(placed, values)
    for shard in placed.addressable_shards:
        assert np.asarray(shard.data).tobytes() == values[shard.index].tobytes()


def test_scalars_are_shared_too(monkeypatch):
    leaf = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding(4, 2))
    made = dataclasses.replace(placing.plan(leaf), is_shared=True)
    monkeypatch.setattr(placing, "plan", lambda _: made)
    placed = placing.place({"n": {(): np.array(-3, np.int32)}}, {"n": leaf})["n"]
    assert [int(shard.data) for shard in placed.addressable_shards] == [-3] * 8


class Device:
    """Stands for a device of a process."""

    def __init__(self, process_index, number):
        self.process_index, self.id = process_index, number


@pytest.mark.parametrize("this", [0, 1])
def test_each_box_is_read_by_one_process(monkeypatch, this):
    """Two processes with two devices; rows over the first dim of 2 x 2, replicated."""
    leaf = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding(8, 1))
    low, high = ((0, 2),), ((2, 4),)
    devices = [Device(number // 2, number) for number in (3, 2, 1, 0)]

    def planned(*boxes):
        given = dict(zip(devices, boxes, strict=True))
        with monkeypatch.context() as patched:
            patched.setattr(placing, "_boxes_of", lambda *_: given)
            patched.setattr(jax, "process_index", lambda: this)
            return placing.plan(leaf)

    replicas = planned(low, high, low, high)  # each process has both boxes
    assert replicas.is_shared
    assert sorted(replicas.reads) == ([low, high] if this == 0 else [])
    assert {box: device.id for box, device in replicas.source.items()} == {
        low: 1,
        high: 0,
    }
    apart = planned(low, low, high, high)  # each process has one box, twice
    assert not apart.is_shared
    assert apart.reads == ([high] if this == 0 else [low])
