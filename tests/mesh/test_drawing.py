"""The drawing of a mesh: every device once, in the box of its group."""

import re
import xml.etree.ElementTree as ET

import pytest

from mjax.mesh import drawing
from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh
from tests.mesh.test_build import cluster

SVG = "{http://www.w3.org/2000/svg}"


def mesh_of(hosts: int, per_host: int, **sizes: int):
    axes = AxisSizes(**{"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1} | sizes)
    return build_mesh(axes, cluster(hosts, per_host, processes_per_host=1))


def test_stages_are_columns_and_places_of_data_parallelism_rows() -> None:
    assert drawing.text(mesh_of(2, 4, pp=2, dp_shard=2, tp=2)).splitlines() == [
        "pp 2 x dp_shard 2 x tp 2: 8 devices on 2 hosts",
        "a box is a tensor-parallel group of 2",
        "a column is a pipeline stage, a row a place along data parallelism",
        "",
        "             stage 0    stage 1",
        "            ┌───────┐  ┌───────┐",
        "dp_shard 0  │  0  1 │  │  4  5 │",
        "            └───────┘  └───────┘",
        "            ┌───────┐  ┌───────┐",
        "dp_shard 1  │  2  3 │  │  6  7 │",
        "            └───────┘  └───────┘",
    ]


def test_a_mesh_of_one_device_is_drawn() -> None:
    text = drawing.text(mesh_of(1, 1))
    assert text.startswith("one device: 1 devices on 1 host\n")
    assert re.findall(r"│ +(\d+) +│", text) == ["0"]


def test_what_is_too_large_is_counted() -> None:
    text = drawing.text(mesh_of(10, 32, pp=10, tp=32))
    assert text.splitlines()[-2:] == [
        "... and 9 more stages",
        "... and 24 more devices of each box",
    ]
    rows = drawing.text(mesh_of(3, 8, dp_replicate=3, dp_shard=8))
    assert rows.endswith("... and 8 more rows of data parallelism")
    assert "dp_replicate 1, dp_shard 7" in rows
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_the_image_has_every_device_inside_its_box_and_a_colour_for_each_host(
    tp: int,
) -> None:
    image = ET.fromstring(drawing.svg(mesh_of(2, 8, dp_shard=16 // tp, tp=tp)))
    devices = image.findall(f"{SVG}g")
    labels = [device.findtext(f"{SVG}text") for device in devices]
    assert labels == [str(number) for number in range(16)]
    groups = [r for r in image.findall(f"{SVG}rect") if r.get("class") == "group"]
    assert len(groups) == 16 // tp
    fills = []
    for number, device in enumerate(devices):
        rect, group = device.find(f"{SVG}rect"), groups[number // tp]
        assert rect is not None
        for at, size in (("x", "width"), ("y", "height")):
            begin, outer = float(rect.get(at, "")), float(group.get(at, ""))
            assert outer <= begin
            end = begin + float(rect.get(size, ""))
            assert end <= outer + float(group.get(size, ""))
        fills.append(rect.get("fill"))
    assert len({*fills[:8]}) == len({*fills[8:]}) == 1
    assert fills[0] != fills[8]
    assert float(image.get("width", "")) >= max(
        float(g.get("x", "")) + float(g.get("width", "")) for g in groups
    )
