"""Lines of iblinkinfo and ibnetdiscover, one at a time.

Written after the public formats: linux-rdma/rdma-core, infiniband-diags/iblinkinfo.c,
ibnetdiscover.c and the man page ibnetdiscover(8). No line is of a real fabric.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.health.cluster import fabric_dump
from mjax.health.cluster.cabling import compare
from mjax.health.cluster.links import End, Observation
from tests.health.cluster.fabrics import Fabric, cluster, links_of

HEAD = '0x0c42a10300aa0001 "                   gpu001 mlx5_0"     12    1[  ] =='
SWITCH = '0x0c42a10300bb0001 "                           leaf1"      3   17[  ] =='
PEER = '==>  0x0c42a10300bb0001      3   17[  ] "leaf1" ( )'
DOWN = '==>             [  ] "" ( )'


def read(*lines: str) -> Observation:
    return fabric_dump.read([f"{line}\n".encode() for line in lines], "dump")


def test_a_line_of_iblinkinfo_has_both_ends():
    found = read(f"{HEAD}( 4X        106.25 Gbps Active/  LinkUp){PEER}")
    assert found.problems == ()
    (one,) = found.sightings
    guid, far = 0x0C42A10300AA0001, 0x0C42A10300BB0001
    assert one.end == End(description="gpu001 mlx5_0", guids=(guid,), ports=("1",))
    assert one.peer == End(description="leaf1", guids=(far,), ports=("17",))
    assert (one.rate_gbps, one.state, one.place) == (400.0, "Active", "dump:1")


@pytest.mark.parametrize(
    ("link", "rate_gbps", "state"),
    [
        ("( 4X        106.25 Gbps Active/  LinkUp)", 400.0, "Active"),
        ("( 2X        106.25 Gbps Active/  LinkUp)", 200.0, "Active"),
        ("( 4X         212.5 Gbps Active/  LinkUp)", 800.0, "Active"),
        ("( 4X        53.125 Gbps Active/  LinkUp)", 200.0, "Active"),
        ("( 4X      25.78125 Gbps Active/  LinkUp)", 100.0, "Active"),
        ("( 4X 25.78 Gbps Active/  LinkUp)", 100.0, "Active"),
        ("( 4X       14.0625 Gbps Active/  LinkUp)", 56.0, "Active"),
        ("( 4X 10.0 Gbps (FDR10) Active/  LinkUp)", 40.0, "Active"),
        ("( 4X          10.0 Gbps Active/  LinkUp)", 40.0, "Active"),
        ("( 4X           5.0 Gbps Active/  LinkUp)", 20.0, "Active"),
        ("( 1X           2.5 Gbps Active/  LinkUp)", 2.5, "Active"),
        ("(12X           2.5 Gbps Active/  LinkUp)", 30.0, "Active"),
        ("( 4X        106.25 Gbps Initialize/  LinkUp)", 400.0, "Initialize"),
        ("( 4X          99.9 Gbps Active/  LinkUp)", None, "Active"),
    ],
)
def test_widths_and_speeds_become_rates(link: str, rate_gbps: float, state: str):
    (one,) = read(HEAD + link + PEER).sightings
    assert (one.rate_gbps, one.state) == (rate_gbps, state)


@pytest.mark.parametrize(
    "line",
    [
        f"{SWITCH}(                Down/ Polling){DOWN}",
        f"{SWITCH}(                Down/Disabled){DOWN}",
        f"{SWITCH}(                Down/PortConfigurationTraining){DOWN}",
    ],
)
def test_a_port_that_is_down_has_no_other_end(line: str):
    found = read(line)
    (one,) = found.sightings
    assert (one.peer, one.state, one.rate_gbps) == (None, "Down", None)
    assert found.counts == {0x0C42A10300BB0001: 1}


@pytest.mark.parametrize(
    "line",
    [
        f"{HEAD}( 4X 106.25 Gbps Active/  LinkUp) (HOQ:18 VL_Stall:7){PEER}",
        f"{HEAD}( 4X 53.125 Gbps Active/  LinkUp)"
        '==>  0x0c42a10300bb0001      3   17[  ] "leaf1" (Could be 4X Could be 106.25 '
        "Gbps)",
        f"{HEAD}( 4X 106.25 Gbps Active/  LinkUp)"
        '==>  0x0c42a10300bb0001      3   17[ 9] "leaf1" ( )',
        f'{HEAD}( 4X 106.25 Gbps Active/  LinkUp)==>      "Port not available"',
    ],
)
def test_other_forms_of_a_line_are_read(line: str):
    found = read(line)
    assert (len(found.sightings), found.problems) == (1, ())


@pytest.mark.parametrize(
    "line",
    [
        "CA: gpu001 mlx5_0:",
        "Switch: 0x0c42a10300bb0001 leaf1:",
        "      0x0c42a10300aa0001     12    1[  ] ==( 4X 106.25 Gbps Active/  LinkUp)",
        f"{HEAD}( 4X 106.25 Gbps Active/  LinkUp)==>",
        f"{HEAD}( 4X 106.25 Gbps){PEER}",
        f"{HEAD}(undefined (3) 106.25 Gbps Active/  LinkUp){PEER}",
        "ibwarn: [4711] mad_rpc_open_port: can't open UMAD port",
        '[1](946dae03005a3c10) "S-0c42a10300bb0001"[17] # lid 3 "leaf1" lid 4 4xNDR',
        '[1](946dae03005a3c10) "S-0c42a10300bb0001"[17] # lid 3 lmc 0 "leaf1" lid 4',
    ],
)
def test_a_line_of_another_form_is_a_problem(line: str):
    good = f"{HEAD}( 4X 106.25 Gbps Active/  LinkUp){PEER}"
    found = read(good, line)
    assert len(found.sightings) == 1
    assert found.problems[0].startswith("dump:2: not a line of iblinkinfo --line or")


# ------------------------------------------------------------------------ ibnetdiscover

NET = """\
#
# Topology file: generated on Tue Jun  2 14:15:10 2026
#
# Reported max hops discovered: 4
# Initiated from node 946dae03005a3c10 port 946dae03005a3c10

vendid=0x2c9
devid=0xd2f2
sysimgguid=0xc42a10300bb0000
switchguid=0xc42a10300bb0001(c42a10300bb0009)
Switch\t65 "S-0c42a10300bb0001"\t\t# "MF0;leaf1:MQM9700/U1" enhanced port 0 lid 4 lmc 0
[17]\t"H-946dae03005a3c0f"[1](946dae03005a3c10) \t\t# "gpu001 mlx5_0" lid 3 4xNDR
[33]\t"S-0c42a10300cc0001"[2]\t\t# "spine1" lid 5 4xNDR s=4 w=2 v=4

vendid=0x2c9
devid=0x1021
sysimgguid=0x946dae03005a3c0f
caguid=0x946dae03005a3c0f
Ca\t1 "H-946dae03005a3c0f"\t\t# "gpu001 mlx5_0"
[1](946dae03005a3c10) \t"S-0c42a10300bb0001"[17]\t\t# lid 3 lmc 0 "leaf1" lid 4 2xHDR
"""


def test_a_topology_of_ibnetdiscover_is_read():
    found = read(*NET.splitlines())
    assert found.problems == ()
    down, up, nic = found.sightings
    guids = (0x0C42A10300BB0009, 0x0C42A10300BB0001)
    leaf = End(description="MF0;leaf1:MQM9700/U1", guids=guids, ports=("17",))
    port = End(
        description="gpu001 mlx5_0",
        guids=(0x946DAE03005A3C10, 0x946DAE03005A3C0F),
        ports=("1",),
    )
    assert (down.end, down.peer, down.rate_gbps) == (leaf, port, 400.0)
    assert up.peer == End(
        description="spine1", guids=(0x0C42A10300CC0001,), ports=("2",)
    )
    assert (nic.end, nic.rate_gbps, nic.state) == (port, 100.0, "")


def test_a_port_without_its_node_is_a_problem():
    lines = NET.splitlines()
    found = read(*lines[:-2], lines[-1])
    assert len(found.sightings) == 2
    assert "not a line of" in found.problems[0]


def test_a_port_is_never_given_to_the_node_before():
    """Its own node was cut out: the wrong node would have a link too many."""
    lines = NET.splitlines()
    found = read(*[line for line in lines if not line.startswith("Ca\t")])
    assert len(found.sightings) == 2
    assert found.problems


@pytest.mark.parametrize(
    ("speed", "rate_gbps"),
    [
        ("4xSDR", 10.0),
        ("4xDDR", 20.0),
        ("4xQDR", 40.0),
        ("4xFDR10", 40.0),
        ("4xFDR", 56.0),
        ("4xEDR", 100.0),
        ("4xHDR", 200.0),
        ("4xNDR", 400.0),
        ("4xXDR", 800.0),
        ("12xSDR", 30.0),
    ],
)
def test_generations_become_rates(speed: str, rate_gbps: float):
    nic = read(*NET.replace("2xHDR", speed).splitlines()).sightings[2]
    assert nic.rate_gbps == rate_gbps


@pytest.mark.parametrize("speed", ["4x???", "4xZDR"])
def test_an_unknown_speed_is_no_rate(speed: str):
    found = read(*NET.replace("2xHDR", speed).splitlines())
    assert [one.rate_gbps for one in found.sightings] == [400.0, 400.0, None]
    assert found.problems == ()


def test_an_unknown_width_is_a_problem():
    found = read(*NET.replace("2xHDR", "??NDR").splitlines())
    assert len(found.sightings) == 2
    assert found.problems[0].startswith("dump:20: not a line of iblinkinfo --line or")


# ------------------------------------------------------------------------------- limits


def test_a_long_line_is_a_problem_in_bounded_memory(tmp_path):
    path = tmp_path / "dump"
    path.write_bytes(b"x" * (10 * fabric_dump.MAX_LINE_BYTES) + b"\n")
    with path.open("rb") as file:
        lines = [*fabric_dump.lines_of(file)]
    assert max(map(len, lines)) == fabric_dump.MAX_LINE_BYTES
    found = fabric_dump.read(lines, "dump")
    assert len(found.problems) == 7  # five lines, how many more, and no port


@given(st.lists(st.binary(max_size=80), max_size=5))
def test_no_bytes_are_ok_or_an_exception(lines: list[bytes]):
    found = fabric_dump.read(lines, "dump")
    assert found.problems
    assert compare(cluster(), [found]).verdict == "incomplete"


@given(st.data())
def test_a_dump_with_a_byte_changed_is_no_exception(data: st.DataObject):
    """Whether it is ok depends on the byte: a lid, say, is not compared."""
    made = cluster()
    fabric = Fabric(cluster=made, links=links_of(made))
    form = data.draw(st.sampled_from(["iblinkinfo", "ibnetdiscover"]))
    lines = getattr(fabric, form)()[:40]
    text = bytearray(b"".join(lines))
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    found = fabric_dump.read(bytes(text).splitlines(keepends=True), "dump")
    assert compare(made, [found]).verdict == "incomplete"  # half of it is absent
