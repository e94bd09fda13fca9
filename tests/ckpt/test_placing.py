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


def one_process(leaf, **changes):
    made = placing.plan(leaf)
    assert made is not None
    assert not made.is_shared, "one process shares with nobody"
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(
    ("is_shared", "where"),
    [
        (True, (2, 4, "rows")),
        (True, (2, 4, None, "rows")),
        (True, (8, 1)),
        (False, (2, 4, "rows")),
    ],
)
def test_replicas_get_the_bits_that_one_device_has(monkeypatch, is_shared, where):
    leaves, whole, host = {}, {}, {}
    for dtype in BITS:
        leaves[dtype], whole[dtype] = leaf_and_values(dtype, sharding(*where))
        host[dtype] = {
            box: whole[dtype][tuple(slice(*ends) for ends in box)].copy()
            for box in one_process(leaves[dtype]).source
        }
    leaves["scalar"] = jax.ShapeDtypeStruct(
        (), jnp.int32, sharding=sharding(*where[:2])
    )
    whole["scalar"] = np.array(-3, np.int32)
    host["scalar"] = {(): whole["scalar"]}
    plans = {
        leaf.dtype if leaf.shape else "scalar": one_process(leaf, is_shared=is_shared)
        for leaf in leaves.values()
    }
    monkeypatch.setattr(
        placing,
        "plan",
        lambda leaf, _: plans[leaf.dtype if leaf.shape else "scalar"],
    )
    placed = placing.place(host, leaves)
    for name, leaf in leaves.items():
        assert placed[name].sharding == leaf.sharding
        assert_same(placed[name], whole[name])
        for shard in placed[name].addressable_shards:
            here = whole[name][shard.index]
            assert np.asarray(shard.data).tobytes() == here.tobytes()


def test_leaves_of_host_memory_cross_the_device_one_after_the_other(monkeypatch):
    where = sharding(2, 4, "rows").with_memory_kind("pinned_host")
    leaf, values = leaf_and_values("float32", where)
    plan = one_process(leaf, is_shared=True)
    host = {
        name: {box: values[slice(*box[0])].copy() for box in plan.source}
        for name in ("mu", "nu", "other")
    }
    monkeypatch.setattr(placing, "plan", lambda *_: plan)
    before = {id(x) for x in jax.live_arrays()}
    on_device, scatter = [], placing._scattered

    def scattered(*args):
        live = [x for x in jax.live_arrays() if id(x) not in before]
        kinds = [x.sharding.memory_kind for x in live if not x.is_deleted()]
        on_device.append(kinds.count("device"))
        return scatter(*args)

    monkeypatch.setattr(placing, "_scattered", scattered)
    placed = placing.place(host, dict.fromkeys(host, leaf))
    assert on_device == [0, 0, 0]
    for x in placed.values():
        assert x.sharding == where
        assert_same(x, values)


class Device:
    """Stands for a device of a process."""

    def __init__(self, process_index, number):
        self.process_index, self.id = process_index, number


def planned(monkeypatch, *boxes, holders=None):
    """Plan a leaf [4] on two processes with two devices each."""
    leaf = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding(8, 1))
    devices = [Device(number // 2, number) for number in (3, 2, 1, 0)]
    given = dict(zip(devices, boxes, strict=True))
    with monkeypatch.context() as patched:
        patched.setattr(placing, "_boxes_of", lambda *_: given)
        return placing.plan(leaf, holders)


LOW, HIGH = ((0, 2),), ((2, 4),)


def test_each_box_is_read_by_one_process(monkeypatch):
    replicas = planned(monkeypatch, LOW, HIGH, LOW, HIGH)  # each process has both
    assert replicas is not None
    assert replicas.is_shared
    assert sorted(replicas.reads(0)) == [LOW, HIGH]
    assert replicas.reads(1) == []
    sources = {box: device.id for box, device in replicas.source.items()}
    assert sources == {LOW: 1, HIGH: 0}
    apart = planned(monkeypatch, LOW, LOW, HIGH, HIGH)  # each process has one, twice
    assert apart is not None
    assert not apart.is_shared
    assert (apart.reads(0), apart.reads(1)) == ([HIGH], [LOW])


def test_a_process_that_lost_its_copy_gets_its_boxes_from_a_peer(monkeypatch):
    replicas = planned(monkeypatch, LOW, HIGH, LOW, HIGH, holders={1})
    assert replicas is not None
    assert replicas.is_shared
    assert {device.process_index for device in replicas.source.values()} == {1}


def test_where_every_process_has_its_copy_nothing_is_sent(monkeypatch):
    replicas = planned(monkeypatch, LOW, HIGH, LOW, HIGH, holders={0, 1})
    assert replicas is not None
    assert not replicas.is_shared


def test_a_box_that_nobody_has_left_makes_copies_useless(monkeypatch):
    assert planned(monkeypatch, LOW, LOW, HIGH, HIGH, holders={1}) is None
