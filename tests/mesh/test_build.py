"""Device order: tp inside hosts, dp between near hosts, pp between far ones."""

import dataclasses
import itertools
import random

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from mjax.mesh.axes import AXES, AxisSizes, MeshConfig, resolve
from mjax.mesh.build import FIRST_ROWS, build_mesh, describe


@dataclasses.dataclass(frozen=True)
class FakeClient:
    num_local: int = 1

    def local_device_count(self) -> int:
        return self.num_local


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """As much of a device as the mesh looks at."""

    id: int
    process_index: int
    partition_index: int
    client: FakeClient = FakeClient()
    platform: str = "gpu"
    device_kind: str = "Fake"


def cluster(hosts: int, per_host: int, *, processes_per_host: int) -> list[FakeDevice]:
    """Devices of a run, numbered by process as jax does, in a random order."""
    per_process = per_host // processes_per_host
    devices = [
        FakeDevice(id=i, process_index=i // per_process, partition_index=i // per_host)
        for i in range(hosts * per_host)
    ]
    random.Random(0).shuffle(devices)
    return devices


def axis_sizes(pp: int = 1, dp: int = 1, tp: int = 1) -> AxisSizes:
    return AxisSizes(pp=pp, dp_replicate=1, dp_shard=dp, tp=tp)


@pytest.mark.parametrize("processes_per_host", [1, 2, 8])
def test_tp_stays_on_a_host_and_pipeline_stages_are_furthest_apart(
    processes_per_host: int,
):
    devices = cluster(4, 8, processes_per_host=processes_per_host)
    sizes = AxisSizes(pp=2, dp_replicate=2, dp_shard=2, tp=4)
    mesh = build_mesh(sizes, devices)
    assert mesh.axis_names == AXES
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    # Neighbours in tp are neighbours in number; then dp, then pp.
    np.testing.assert_array_equal(ids, np.arange(32).reshape(2, 2, 1, 2, 4))
    hosts = np.vectorize(lambda d: d.partition_index)(mesh.devices)
    assert (hosts == hosts[..., :1]).all()
    # Both shards of a replica share a host; the stages share none.
    assert (hosts == hosts[:, :, :, :1, :1]).all()
    assert not set(hosts[0].flat) & set(hosts[1].flat)


def test_two_hosts_of_eight_run_tp_8_with_one_stage_per_host():
    devices = cluster(2, 8, processes_per_host=8)
    mesh = build_mesh(axis_sizes(pp=2, tp=8), devices)
    for stage in range(2):
        assert {d.partition_index for d in mesh.devices[stage].flat} == {stage}


def test_hosts_count_before_processes():
    # Process numbers may be dealt out to the hosts in turn.
    devices = [
        FakeDevice(id=i, process_index=i, partition_index=i % 2) for i in range(8)
    ]
    mesh = build_mesh(axis_sizes(dp=2, tp=4), devices)
    ids = np.vectorize(lambda d: d.id)(mesh.devices).reshape(2, 4)
    np.testing.assert_array_equal(ids, [[0, 2, 4, 6], [1, 3, 5, 7]])


def test_tp_across_hosts_is_refused_unless_asked_for():
    devices = cluster(2, 8, processes_per_host=1)
    sizes = axis_sizes(tp=16)
    with pytest.raises(
        ValueError,
        match=r"--mesh.tp 16 .* hosts 0, 1: .* has 8 devices; .* divides 8, .*"
        r"--mesh.tp-across-hosts",
    ):
        build_mesh(sizes, devices)
    mesh = build_mesh(sizes, devices, tp_across_hosts=True)
    assert mesh.devices.shape == (1, 1, 1, 1, 16)


def test_tp_that_does_not_divide_a_host_is_refused():
    devices = cluster(2, 6, processes_per_host=1)
    with pytest.raises(ValueError, match=r"--mesh.tp 4 .* divides 6"):
        build_mesh(axis_sizes(dp=3, tp=4), devices)


def test_the_steps_of_shards_are_between_hosts_and_inside_them():
    devices = cluster(4, 8, processes_per_host=8)
    sizes = AxisSizes(pp=1, dp_replicate=2, dp_node=2, dp_shard=4, tp=2)
    mesh = build_mesh(sizes, devices)
    hosts = np.vectorize(lambda d: d.partition_index)(mesh.devices)
    np.testing.assert_array_equal(hosts[0, :, :, 0, 0], [[0, 1], [2, 3]])
    assert (hosts == hosts[..., :1, :1]).all()


@pytest.mark.parametrize(
    ("nodes", "per_node", "tp", "remedy"),
    [
        (4, 4, 1, "use 8"),
        (8, 2, 1, "use 8"),
        (8, 2, 2, "use 4"),
        (2, 2, 8, "leave it out"),
        (2, 16, 1, "use 8"),
    ],
)
def test_shards_per_node_that_are_not_those_of_a_host_are_refused(
    nodes: int, per_node: int, tp: int, remedy: str
):
    num_hosts = nodes * per_node * tp // 8
    devices = cluster(num_hosts, 8, processes_per_host=1)
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_node=nodes, dp_shard=per_node, tp=tp)
    with pytest.raises(
        ValueError,
        match=rf"--mesh.dp-shard-per-node {per_node} must .* has 8 devices, and tp is "
        rf"{tp}; {remedy}",
    ):
        build_mesh(sizes, devices)


def test_nodes_of_simulated_devices_are_what_the_sizes_say():
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_node=4, dp_shard=2, tp=1)
    assert build_mesh(sizes).shape["dp_node"] == 4


def test_a_topology_without_hardware_has_a_host_per_process():
    devices = [
        FakeDevice(i, process_index=i // 4, partition_index=0, client=FakeClient(0))
        for i in range(8)
    ]
    mesh = build_mesh(axis_sizes(dp=2, tp=4), devices)
    assert "hosts: 2, processes: 2" in describe(mesh)
    with pytest.raises(ValueError, match=r"--mesh.tp 8 .* has 4 devices"):
        build_mesh(axis_sizes(tp=8), devices)


def test_wrong_number_of_devices_is_refused():
    with pytest.raises(ValueError, match="tp 4 needs 4 devices, got 8"):
        build_mesh(axis_sizes(tp=4))


def test_mesh_of_real_devices_has_auto_axes_and_all_devices():
    mesh = build_mesh(resolve(MeshConfig(tp=2, dp_shard=2), 8))
    assert mesh.axis_types == (AxisType.Auto,) * len(AXES)
    assert list(mesh.devices.flat) == jax.devices()
    sizes = {"pp": 1, "dp_replicate": 2, "dp_node": 1, "dp_shard": 2, "tp": 2}
    assert dict(mesh.shape) == sizes


def test_description_has_the_place_of_every_device():
    devices = cluster(2, 4, processes_per_host=4)
    sizes = AxisSizes(pp=2, dp_replicate=1, dp_shard=2, tp=2)
    mesh = build_mesh(sizes, devices)
    first, header, *rows = describe(mesh).splitlines()
    assert "dp_replicate 1 x dp_node 1 x dp_shard 2 x tp 2 = 8 devices (Fake)" in first
    assert "hosts: 2, processes: 8" in first
    assert header.split() == ["host", "process", "device", *AXES, "tp", "group"]
    places = itertools.product(*map(range, (2, 1, 1, 2, 2)))
    assert [tuple(map(int, row.split())) for row in rows] == [
        (i // 4, i, i, *place, i // 2) for i, place in enumerate(places)
    ]


def test_description_of_a_large_mesh_is_cut():
    devices = cluster(32, 8, processes_per_host=8)
    lines = describe(build_mesh(axis_sizes(pp=4, dp=8, tp=8), devices)).splitlines()
    assert len(lines) == 2 + FIRST_ROWS + 1
    assert lines[-1] == f"... and {256 - FIRST_ROWS} more devices"
    assert "hosts: 32" in lines[0]
