"""Axis sizes: what resolves, and what is refused with which advice."""

import re
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from mjax.mesh.axes import AXES, AxisSizes, MeshConfig, resolve, tp_chunks

sizes = st.integers(min_value=1, max_value=12)


def test_dp_takes_all_devices_by_default():
    assert resolve(MeshConfig(), 8) == AxisSizes(pp=1, dp_replicate=1, dp_shard=8, tp=1)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MeshConfig(tp=2), (1, 1, 1, 4, 2)),
        (MeshConfig(tp=-1, dp=2), (1, 1, 1, 2, 4)),
        (MeshConfig(pp=-1, dp=2, tp=2), (2, 1, 1, 2, 2)),
        (MeshConfig(dp_shard=4), (1, 2, 1, 4, 1)),
        (MeshConfig(dp_shard=1, tp=2), (1, 4, 1, 1, 2)),
        (MeshConfig(pp=2, dp=2, tp=2), (2, 1, 1, 2, 2)),
        (MeshConfig(dp_shard_per_node=4), (1, 1, 2, 4, 1)),
        (MeshConfig(dp_shard=4, dp_shard_per_node=2), (1, 2, 2, 2, 1)),
    ],
)
def test_sizes_on_eight_devices(config: MeshConfig, expected: tuple[int, ...]):
    assert resolve(config, 8).as_tuple() == expected


@hypothesis.given(pp=sizes, replicate=sizes, shard=sizes, tp=sizes, data=st.data())
def test_open_axis_is_recovered_and_the_product_is_the_number_of_devices(
    pp: int, replicate: int, shard: int, tp: int, data: st.DataObject
):
    wanted: dict[str, Any] = {"pp": pp, "dp": replicate * shard, "tp": tp}
    num_devices = pp * replicate * shard * tp
    open_axis = data.draw(st.sampled_from([None, *wanted]))
    asked: dict[str, Any] = wanted | {"dp_shard": shard}
    if open_axis is not None:
        asked[open_axis] = -1
    got = resolve(MeshConfig(**asked), num_devices)
    assert got.as_tuple() == (pp, replicate, 1, shard, tp)
    assert len(got.as_tuple()) == len(AXES)
    assert got.num_devices == num_devices


@hypothesis.given(
    pp=sizes, dp=sizes | st.just(-1), tp=sizes, num_devices=st.integers(1, 200)
)
def test_a_mesh_uses_all_devices_or_is_refused_with_the_number(
    pp: int, dp: int, tp: int, num_devices: int
):
    config = MeshConfig(pp=pp, dp=dp, tp=tp)
    fits = num_devices % (pp * tp) == 0 if dp == -1 else num_devices == pp * dp * tp
    if fits:
        assert resolve(config, num_devices).num_devices == num_devices
    else:
        with pytest.raises(ValueError, match=rf"\b{num_devices}\b"):
            resolve(config, num_devices)


@pytest.mark.parametrize(
    ("config", "num_devices", "message"),
    [
        (
            MeshConfig(dp=4, tp=4),
            8,
            "the number of devices must be --mesh.pp 1 x --mesh.dp 4 x --mesh.tp 4 = "
            "16, got 8",
        ),
        (
            MeshConfig(tp=3),
            8,
            "the number of devices must be a multiple of --mesh.pp 1 x --mesh.tp 3 = "
            "3, got 8",
        ),
        (
            MeshConfig(dp_shard=3),
            8,
            "--mesh.dp-shard must be a divisor of dp, which is 8 on 8 devices, got 3",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_rule(
    config: MeshConfig, num_devices: int, message: str
):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        resolve(config, num_devices)


@pytest.mark.parametrize("axis", ["pp", "dp", "tp"])
@pytest.mark.parametrize("size", [0, -2])
def test_sizes_below_one_are_refused(axis: str, size: int):
    asked: dict[str, Any] = {axis: size}
    with pytest.raises(ValueError, match=rf"--mesh.{axis} must be .*got {size}"):
        MeshConfig(**asked)


def test_an_axis_may_fill_the_mesh_only_if_no_other_does():
    with pytest.raises(ValueError, match="or -1 for the remaining devices, got 0"):
        MeshConfig(dp=0)
    with pytest.raises(ValueError, match=r"--mesh\.tp must be at least 1, got 0"):
        MeshConfig(tp=0)


def test_two_open_axes_are_refused():
    with pytest.raises(ValueError, match="only one mesh axis can be -1, got dp and tp"):
        MeshConfig(tp=-1)


@pytest.mark.parametrize("size", [0, -1])
def test_dp_shard_below_one_is_refused(size: int):
    with pytest.raises(ValueError, match=rf"dp-shard .*got {size}; leave it out"):
        MeshConfig(dp_shard=size)


@pytest.mark.parametrize(
    ("chunks", "tp", "expected"), [(None, 8, 8), (4, 8, 4), (2, 2, 2), (4, 1, 1)]
)
def test_activations_cross_tp_in_as_many_chunks(chunks, tp, expected):
    config = MeshConfig(tp_overlap="chunks", tp_chunks=chunks)
    assert tp_chunks(config, tp) == expected
    assert tp_chunks(MeshConfig(), tp) == 1


def test_more_chunks_than_tp_are_refused():
    config = MeshConfig(tp_overlap="chunks", tp_chunks=16)
    with pytest.raises(ValueError, match=r"must be at most --mesh\.tp 8, got 16$"):
        tp_chunks(config, 8)


@pytest.mark.parametrize("overlap", ["off", "chunks"])
@pytest.mark.parametrize("chunks", [1, 0, -5])
def test_fewer_than_two_chunks_are_refused_on_any_mesh(overlap: Any, chunks: int):
    message = f"--mesh.tp-chunks must be at least 2, got {chunks}"
    with pytest.raises(ValueError, match=message):
        MeshConfig(tp_overlap=overlap, tp_chunks=chunks)


def test_chunks_need_the_overlap():
    with pytest.raises(ValueError, match=r"needs --mesh\.tp-overlap chunks"):
        MeshConfig(tp_chunks=4)


@pytest.mark.parametrize("per_node", [3, 8, 16])
def test_shards_of_a_node_must_be_a_part_of_all_shards(per_node: int):
    with pytest.raises(
        ValueError,
        match=rf"--mesh.dp-shard-per-node .* got {per_node} with dp_shard 8; leave",
    ):
        resolve(MeshConfig(dp_shard_per_node=per_node), 8)


@pytest.mark.parametrize("per_node", [-1, 0, 1])
def test_one_shard_on_a_node_has_no_second_step(per_node: int):
    with pytest.raises(
        ValueError, match=rf"--mesh.dp-shard-per-node .* got {per_node}; leave it out"
    ):
        MeshConfig(dp_shard_per_node=per_node)
