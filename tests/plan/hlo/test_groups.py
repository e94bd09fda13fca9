"""The notations of groups say the same, and give the mesh axes they run along."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.mesh.axes import AXES, AxisSizes
from mjax.plan.hlo.groups import Groups, read_groups, read_pairs


def mesh_of(sizes: tuple[int, ...]) -> AxisSizes:
    return AxisSizes(**dict(zip(AXES, sizes, strict=True)))


def mesh_text(sizes: AxisSizes) -> str:
    named = zip(AXES, sizes.as_tuple(), strict=True)
    return "mesh[" + ",".join(f"'{axis}'={size}" for axis, size in named) + "]"


def as_sets(groups: Groups) -> set[frozenset[int]]:
    return {frozenset(row.tolist()) for row in groups.members}


meshes = st.tuples(*[st.integers(1, 4)] * len(AXES)).map(mesh_of)
some_axes = st.lists(st.sampled_from(AXES), unique=True, min_size=1)


def groups_along(sizes: AxisSizes, axes: list[str]) -> list[list[int]]:
    """List the devices whose other coordinates are equal, one by one."""
    found: dict[tuple[int, ...], list[int]] = {}
    places = itertools.product(*map(range, sizes.as_tuple()))
    for device, place in enumerate(places):
        rest = [at for axis, at in zip(AXES, place, strict=True) if axis not in axes]
        found.setdefault(tuple(rest), []).append(device)
    return list(found.values())


@given(meshes, some_axes)
def test_mesh_listed_and_iota_forms_agree(sizes: AxisSizes, axes: list[str]):
    expected = groups_along(sizes, axes)
    named = ",".join(f"'{axis}'" for axis in axes)
    listed = ",".join("{" + ",".join(map(str, row)) + "}" for row in expected)
    kept = [i for i, axis in enumerate(AXES) if axis in axes]
    order = [i for i in range(len(AXES)) if i not in kept] + kept
    iota = (
        f"[{len(expected)},{len(expected[0])}]"
        f"<=[{','.join(map(str, sizes.as_tuple()))}]T({','.join(map(str, order))})"
    )
    for text in (f"{mesh_text(sizes)} {{{named}}}", f"{{{listed}}}", iota):
        groups = read_groups(text)
        assert as_sets(groups) == {frozenset(row) for row in expected}
        varying = tuple(
            axis
            for axis, size in zip(AXES, sizes.as_tuple(), strict=True)
            if axis in axes and size > 1
        )
        assert groups.axes(sizes) == varying
        assert groups.partition(sizes) == read_groups(iota).partition(sizes)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_a_part_of_an_axis_is_that_axis_of_a_finer_mesh(
    before: int, part: int, rest: int, other: int
):
    whole = before * part * rest
    coarse = f"mesh['a'={whole},'b'={other}] {{'a':({before}){part}}}"
    fine = f"mesh['x'={before},'y'={part},'z'={rest},'b'={other}] {{'y'}}"
    assert as_sets(read_groups(coarse)) == as_sets(read_groups(fine))


@given(st.permutations(range(12)))
def test_device_ids_rename_the_devices_of_a_mesh(devices: list[int]):
    listed = ",".join(map(str, devices))
    renamed = read_groups(f"mesh['a'=3,'b'=4], device_ids=({listed}) {{'a'}}")
    plain = read_groups("mesh['a'=3,'b'=4] {'a'}")
    np.testing.assert_array_equal(np.array(devices)[plain.members], renamed.members)


def test_device_ids_may_be_a_transposed_array():
    groups = read_groups("mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'b'}")
    assert groups.members.tolist() == [[0, 2, 4], [1, 3, 5]]


def test_empty_groups_are_all_devices():
    assert read_groups("{}", 4).members.tolist() == [[0, 1, 2, 3]]


@given(meshes, st.sampled_from(AXES), st.integers(1, 3))
def test_pairs_run_along_the_axis_they_shift(sizes: AxisSizes, axis: str, shift: int):
    index = AXES.index(axis)
    size = sizes.as_tuple()[index]
    devices = np.arange(sizes.num_devices).reshape(sizes.as_tuple())
    targets = np.roll(devices, -shift, axis=index)
    pairs = zip(devices.ravel(), targets.ravel(), strict=True)
    text = "{" + ",".join(f"{{{a},{b}}}" for a, b in pairs) + "}"
    groups = read_pairs(text)
    assert groups.are_pairs
    assert groups.axes(sizes) == ((axis,) if shift % size else ())
    whole = read_groups(f"{mesh_text(sizes)} {{'{axis}'}}")
    if shift % size:
        # A permute communicates like a collective over the whole of its axis.
        assert groups.partition(sizes) == whole.partition(sizes)


@given(meshes, some_axes, st.integers(1, 16))
def test_nodes_are_runs_of_devices(sizes: AxisSizes, axes: list[str], node: int):
    named = ",".join(f"'{axis}'" for axis in axes)
    groups = read_groups(f"{mesh_text(sizes)} {{{named}}}")
    nodes = [[d // node for d in row] for row in groups.members.tolist()]
    assert groups.crosses_nodes(node) == any(len(set(row)) > 1 for row in nodes)
    together = min(row.count(n) for row in nodes for n in row)
    assert groups.size_in_node(node) == together


def test_groups_of_a_cluster_are_read_from_a_few_words():
    sizes = AxisSizes(pp=8, dp_replicate=24, dp_shard=8, tp=8)
    groups = read_groups(f"{mesh_text(sizes)} {{'dp_replicate','dp_shard'}}")
    assert groups.members.shape == (64, 192)
    assert groups.axes(sizes) == ("dp_replicate", "dp_shard")
    assert (groups.crosses_nodes(8), groups.size_in_node(8)) == (True, 1)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "not understood"),
        ("{{0,1},{2}}", "differ in size"),
        ("{{0,1},{1,2}}", "a device twice"),
        ("{{0,1},{2,x}}", "not understood"),
        ("[2,4]<=[9]", "not understood"),
        ("[2,4]<=[2,4]T(0,0)", "not understood"),
        ("mesh['a'=2,'b'=4] {'c'}", "not understood"),
        ("mesh['a'=2,'b'=4] {b}", "not understood"),
        ("mesh['a'=2,b=4] {'a'}", "not understood"),
        ("mesh['a'=2,'b'=4] {'b':(3)2}", "cannot be split"),
        ("mesh['a'=2,'b'=4], device_ids=(0,1,2) {'b'}", "do not fill the mesh"),
        ("@mesh<a=2,b=4> {a}", "not understood"),
    ],
)
def test_groups_of_another_form_are_refused(text: str, error: str):
    with pytest.raises(ValueError, match=error):
        read_groups(text)


@pytest.mark.parametrize("text", ["{}", "{0,1}", "{{0,1,2}}", "{{0,a}}"])
def test_pairs_of_another_form_are_refused(text: str):
    with pytest.raises(ValueError, match="source_target_pairs are not understood"):
        read_pairs(text)


def test_a_device_outside_the_mesh_is_refused():
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=2)
    groups = read_groups("{{0,1},{2,3}}")
    with pytest.raises(ValueError, match=r"a group has device 3.*2 devices"):
        groups.axes(sizes)
