"""Cables of a cluster file compared with dumps of fabrics."""

import dataclasses
import itertools
import json

import pytest

from mjax.health.cluster import fabric_dump, lldp
from mjax.health.cluster.cabling import CablingReport, compare
from mjax.health.cluster.parts import Cluster
from tests.health.cluster.fabrics import (
    FILE,
    Fabric,
    cluster,
    cut,
    exchange,
    join,
    links_of,
    port,
)

FORMATS = ("iblinkinfo", "ibnetdiscover")


def report(
    fabric: Fabric, form: str = "iblinkinfo", expected: Cluster | None = None
) -> CablingReport:
    lines = getattr(fabric, form)()
    seen = fabric_dump.read(lines, "dump")
    return compare(expected or fabric.cluster, [seen])


def healthy(text: str = FILE) -> Fabric:
    made = cluster(text)
    return Fabric(cluster=made, links=links_of(made))


def changed(**changes) -> Fabric:
    return dataclasses.replace(healthy(), **changes)


def kinds(found: CablingReport) -> list[str]:
    return [finding.kind for finding in found.findings]


@pytest.mark.parametrize("form", FORMATS)
def test_a_fabric_as_in_the_file_is_ok(form: str):
    found = report(healthy(), form)
    assert (found.verdict, found.findings, found.problems) == ("ok", (), ())
    assert found.num_matched == found.num_cables == 32


def test_a_dump_of_switches_only_is_enough_if_it_is_said_to_be_one():
    lines = healthy().iblinkinfo(switches_only=True)
    seen = fabric_dump.read(lines, "dump", switches_only=True)
    assert compare(cluster(), [seen]).verdict == "ok"
    # The same text is a dump of all nodes, cut off before the first host.
    seen = fabric_dump.read(lines, "dump")
    assert compare(cluster(), [seen]).verdict == "incomplete"


@pytest.mark.parametrize("form", FORMATS)
def test_two_exchanged_cables_are_named_as_one_exchange(form: str):
    fabric = healthy()
    exchange(dict_of(fabric), "gpu01:mlx5_0", "gpu03:mlx5_0")
    found = report(fabric, form)
    assert kinds(found) == ["exchanged"]
    assert found.verdict == "failed"
    text = found.findings[0].text
    assert "gpu01:mlx5_0 goes to leaf1:3" in text
    assert "gpu03:mlx5_0 goes to leaf1:1" in text


def dict_of(fabric: Fabric):
    """Return the links of a fabric, to change them."""
    assert isinstance(fabric.links, dict)
    return fabric.links


def test_every_exchange_of_two_cables_of_hosts_is_named():
    made = cluster()
    ends = [cable.low for cable in made.cables if cable.low.node in made.hosts]
    num = 0
    for one, other in itertools.combinations(ends, 2):
        links = links_of(made)
        exchange(links, str(one), str(other))
        found = report(Fabric(cluster=made, links=links))
        assert kinds(found) == ["exchanged"], (one, other)
        shown = found.findings[0].text
        assert f"{one} goes to {links[one]}" in shown
        assert f"{other} goes to {links[other]}" in shown
        num += 1
    assert num == 16 * 15 // 2


def test_three_cables_in_a_ring_are_named_as_one_finding():
    fabric = healthy()
    exchange(dict_of(fabric), "gpu01:mlx5_0", "gpu02:mlx5_0", "gpu06:mlx5_1")
    found = report(fabric)
    assert kinds(found) == ["exchanged in a ring"]
    assert "gpu06:mlx5_1 goes to leaf1:1" in found.findings[0].text


def test_hosts_whose_cables_are_all_exchanged_are_one_finding():
    fabric = healthy()
    for nic in ("mlx5_0", "mlx5_1"):
        exchange(dict_of(fabric), f"gpu01:{nic}", f"gpu06:{nic}")
    found = report(fabric)
    assert kinds(found) == ["exchanged hosts"]
    assert "all 2 cables of gpu01 and gpu06" in found.findings[0].text


ONE_LEAF = FILE.replace("ports = 8", "ports = 12").replace(
    "leaf2:[1-4]", "leaf1:[9-12]"
)


@pytest.mark.parametrize(
    ("text", "ends", "joined"),
    [
        (FILE, ["leaf1:5", "leaf1:6"], "leaf1 and spine1"),
        (ONE_LEAF, ["gpu01:mlx5_0", "gpu01:mlx5_1"], "gpu01 and leaf1"),
    ],
)
def test_exchanged_cables_between_the_same_nodes_are_told_as_harmless(
    text: str, ends: list[str], joined: str
):
    fabric = healthy(text)
    exchange(dict_of(fabric), *ends)
    found = report(fabric)
    assert kinds(found) == ["exchanged"]
    says = f"; all join {joined}, so routes stay the same"
    assert found.findings[0].text.endswith(says)


@pytest.mark.parametrize("form", FORMATS)
def test_a_missing_cable_is_named_with_the_state_of_its_ends(form: str):
    fabric = healthy()
    cut(dict_of(fabric), port("gpu02:mlx5_1"))
    found = report(fabric, form)
    assert kinds(found) == ["missing"]
    text = found.findings[0].text
    assert text.startswith("no link gpu02:mlx5_1 - leaf2:2")
    assert ("is Down" in text) == (form == "iblinkinfo")
    assert found.verdict == "failed"


def test_a_cable_on_a_leaf_of_another_rail_is_told_so():
    text = FILE.replace('"leaf2:[1-4]"', '"leaf2:[1-3],leaf2:8"')
    text = text.replace(
        '"leaf[1-4]:[7-8]"', '"leaf1:[7-8],leaf2:[4,7],leaf[3-4]:[7-8]"'
    )
    fabric = healthy(text)
    cut(dict_of(fabric), port("leaf2:4"))
    cut(dict_of(fabric), port("gpu01:mlx5_0"))
    join(dict_of(fabric), port("gpu01:mlx5_0"), port("leaf2:4"))
    found = report(fabric)
    assert kinds(found)[0] == "wrong rail"
    told = "gpu01:mlx5_0 is of rail 0, leaf2 of rail 1"
    assert told in found.findings[0].text


def test_a_leaf_of_storage_cards_is_of_no_other_rail():
    text = FILE.replace("ports = 8", "ports = 9")
    head, middle, tail = text.partition('names = "gpu[05-08]"')
    fabric = healthy(head + middle + tail.replace("rail = 0, ", "", 1))
    cut(dict_of(fabric), port("gpu01:mlx5_0"))
    join(dict_of(fabric), port("gpu01:mlx5_0"), port("leaf3:9"))
    found = report(fabric)
    assert kinds(found) == ["misplaced"]
    assert "rail" not in found.findings[0].text


def test_a_cable_in_a_free_port_of_its_own_leaf_is_on_no_wrong_rail():
    fabric = healthy(FILE.replace("ports = 8", "ports = 9"))
    cut(dict_of(fabric), port("gpu01:mlx5_0"))
    join(dict_of(fabric), port("gpu01:mlx5_0"), port("leaf1:9"))
    found = report(fabric)
    assert kinds(found) == ["misplaced"]
    text = found.findings[0].text
    assert "gpu01:mlx5_0 should go to leaf1:1, and goes to leaf1:9 (cables[0]" in text


def test_a_cable_whose_far_end_has_another_neighbour_is_named_from_there():
    """The host is silent; its leaf sees another host."""
    fabric = healthy()
    cut(dict_of(fabric), port("leaf1:1"))
    join(dict_of(fabric), port("leaf1:1"), port("new:1"))
    found = report(dataclasses.replace(fabric, absent=("gpu01:mlx5_0",)))
    assert kinds(found) == ["misplaced"]
    told = 'leaf1:1 should go to gpu01:mlx5_0, and goes to "new"[1]'
    assert told in found.findings[0].text


def test_a_fabric_whose_ports_are_all_down_was_seen_and_has_failed():
    found = report(changed(links={}))
    assert found.verdict == "failed"
    assert kinds(found).count("missing") == 32


def test_a_link_that_the_file_does_not_name_is_extra():
    text = FILE.replace("ports = 8", "ports = 9")
    fabric = healthy(text)
    join(dict_of(fabric), port("leaf1:9"), port("leaf2:9"))
    found = report(fabric)
    assert kinds(found) == ["extra"]
    assert "leaf1:9 is joined with leaf2:9" in found.findings[0].text


def test_a_node_that_the_file_does_not_name_is_extra_unless_ignored():
    text = FILE.replace("ports = 8", "ports = 9")
    fabric = healthy(text)
    join(dict_of(fabric), port("leaf1:9"), port("new:1"))
    assert kinds(report(fabric)) == ["extra"]
    ignoring = cluster(text.replace('"small"', '"small"\nignore = ["new"]'))
    assert report(fabric, expected=ignoring).verdict == "ok"


@pytest.mark.parametrize(
    ("form", "speed"), [("iblinkinfo", "53.125"), ("ibnetdiscover", "HDR")]
)
def test_a_slow_link_is_named_with_both_rates(form: str, speed: str):
    found = report(changed(slow={port("gpu05:mlx5_0"): speed}), form)
    assert kinds(found) == ["slow"]
    assert "runs at 200 Gb/s, but the file says 400" in found.findings[0].text


def test_hosts_that_do_not_report_are_named():
    fabric = healthy()
    for nic in ("mlx5_0", "mlx5_1"):
        cut(dict_of(fabric), port(f"gpu07:{nic}"))
    gone = ("gpu07:mlx5_0", "gpu07:mlx5_1")
    found = report(dataclasses.replace(fabric, absent=gone))
    assert kinds(found) == ["missing", "missing", "silent hosts"]
    assert found.findings[-1].nodes == ("gpu07",)


def test_switches_that_fall_apart_are_told_as_islands():
    fabric = healthy()
    for leaf in ("leaf3", "leaf4"):
        for number in (5, 6, 7, 8):
            cut(dict_of(fabric), port(f"{leaf}:{number}"))
    found = report(fabric)
    assert kinds(found).count("missing") == 8
    assert "make 3 parts" in found.findings[-1].text


# ---------------------------------------------------------------- never ok by accident


@pytest.mark.parametrize("form", FORMATS)
def test_no_beginning_of_a_dump_is_ok(form: str):
    lines = getattr(healthy(), form)()
    for num in range(len(lines)):
        seen = fabric_dump.read(lines[:num], "dump")
        found = compare(cluster(), [seen])
        assert found.verdict == "incomplete", lines[num]


@pytest.mark.parametrize("form", FORMATS)
def test_no_dump_that_ends_within_a_line_is_ok(form: str):
    lines = getattr(healthy(), form)()
    seen = fabric_dump.read([*lines[:-1], lines[-1][:-1]], "dump")
    assert compare(cluster(), [seen]).verdict == "incomplete"
    for num in (len(lines) - 1, len(lines) // 2):
        for size in range(1, len(lines[num])):
            seen = fabric_dump.read([lines[num - 1], lines[num][:size]], "dump")
            assert any("ends in the middle" in one for one in seen.problems)


@pytest.mark.parametrize("form", FORMATS)
def test_a_dump_without_any_one_of_its_lines_of_ports_is_not_ok(form: str):
    lines = getattr(healthy(), form)()
    for num, line in enumerate(lines):
        if b"[" not in line:
            continue
        seen = fabric_dump.read([*lines[:num], *lines[num + 1 :]], "dump")
        assert compare(cluster(), [seen]).verdict == "incomplete", line


@pytest.mark.parametrize(
    "text", [b"", b"\n", b"ibwarn: [1] mad_rpc_open_port: failed\n", b"#\n#\n"]
)
def test_a_dump_without_links_is_incomplete(text: bytes):
    found = compare(cluster(), [fabric_dump.read([text], "dump")])
    assert (found.verdict, found.findings) == ("incomplete", ())
    assert any("has no port" in problem for problem in found.problems)


def test_without_any_source_nothing_is_ok():
    found = compare(cluster(), [])
    assert found.verdict == "incomplete"
    assert "no source reports the cables on infiniband" in found.problems[0]


TWO_FABRICS = FILE.replace(
    "[[switches]]",
    """
[[hosts]]
names = "login1"
gpus = 0
nics = [{ name = "eth0", fabric = "ethernet" }]
[[switches]]
names = "tor1"
tier = "leaf"
ports = 4
fabric = "ethernet"
[[cables]]
ends = ["login1:eth0", "tor1:1"]
[[switches]]""",
    1,
)


def test_a_cluster_of_which_a_fabric_was_not_seen_is_incomplete():
    expected = cluster(TWO_FABRICS)
    seen = fabric_dump.read(healthy().iblinkinfo(), "dump")
    found = compare(expected, [seen])
    assert found.verdict == "incomplete"
    assert "no source reports the cables on ethernet" in found.problems[0]
    assert compare(expected, [seen], fabrics=["infiniband"]).verdict == "ok"
    found = compare(expected, [seen], fabrics=["ethernet"])
    assert found.verdict == "incomplete"


def test_two_fabrics_are_seen_by_their_own_sources():
    """Each fabric is one island; that does not make two."""
    row = {
        "chassis": {"tor1": {"id": {"type": "local", "value": "tor1"}}},
        "port": {"id": {"type": "ifname", "value": "1"}},
    }
    tor = {
        "chassis": {"login1": {"id": {"type": "local", "value": "login1"}}},
        "port": {"id": {"type": "ifname", "value": "eth0"}},
    }
    texts = {"login1": {"eth0": row}, "tor1": {"1": tor}}
    seen = [
        lldp.read(json.dumps({"lldp": {"interface": found}}).encode(), node, node)
        for node, found in texts.items()
    ]
    seen.append(fabric_dump.read(healthy().iblinkinfo(), "dump"))
    found = compare(cluster(TWO_FABRICS), seen)
    assert (found.verdict, found.findings) == ("ok", ())
    assert found.num_matched == 33


def test_of_many_problems_the_first_are_told_and_how_many_more():
    names = {f"gpu0{n}:mlx5_{r}": "gpu01 mlx5_0" for n in range(1, 9) for r in (0, 1)}
    found = report(changed(names=names))
    assert found.verdict == "incomplete"
    assert len(found.problems) == 21
    assert found.problems[-1].startswith("and ")


# ----------------------------------------------------------------------------- identity


def test_two_nodes_of_the_same_name_are_never_ok():
    fabric = changed(names={"gpu02:mlx5_0": "gpu01 mlx5_0"})
    found = report(fabric)
    assert found.verdict == "incomplete"
    assert "is reported as joined with" in found.problems[0]


def with_guids(**guids: int) -> Cluster:
    rows = "".join(f'"{name}" = "0x{guid:x}"\n' for name, guid in guids.items())
    return cluster(f"{FILE}[guids]\n{rows}")


@pytest.mark.parametrize("form", FORMATS)
def test_a_card_that_moved_to_another_host_is_found_by_its_guid(form: str):
    """Both names are right for their places; the cards were exchanged."""
    guids = {"gpu01:mlx5_0": 0xA1, "gpu02:mlx5_0": 0xA2}
    expected = with_guids(**guids)
    assert report(changed(guids=guids), form, expected).verdict == "ok"
    moved = {"gpu01:mlx5_0": 0xA2, "gpu02:mlx5_0": 0xA1}
    found = report(changed(guids=moved), form, expected)
    assert found.verdict == "failed"
    assert sorted(kinds(found)) == ["exchanged", "identity", "identity"]
    assert "calls itself gpu02:mlx5_0" in "".join(f.text for f in found.findings)


def test_a_card_of_another_guid_is_told():
    expected = with_guids(**{"gpu01:mlx5_0": 0xA1})
    found = report(changed(guids={"gpu01:mlx5_0": 0xBB}), expected=expected)
    assert kinds(found) == ["identity"]
    assert "0x00000000000000bb" in found.findings[0].text


def test_switches_without_names_are_known_by_their_guids():
    names = {f"leaf{n}": "Quantum Mellanox Technologies" for n in range(1, 5)}
    guids = {f"leaf{n}": 0xC0 + n for n in range(1, 5)}
    fabric = changed(names=names, guids=guids)
    assert report(fabric, expected=with_guids(**guids)).verdict == "ok"
    assert report(fabric).verdict != "ok"


@pytest.mark.parametrize(
    "names",
    [
        {"leaf1": "MF0;leaf1:MQM9700/U1"},
        {"leaf1": "leaf1.east.example.com"},
        {"gpu01:mlx5_0": "gpu01.east.example.com mlx5_0"},
    ],
)
def test_usual_forms_of_node_descriptions_are_understood(names: dict[str, str]):
    assert report(changed(names=names)).verdict == "ok"


def test_a_nic_may_be_known_by_another_description():
    text = FILE.replace(
        '"mlx5_0", rail = 0,', '"mlx5_0", rail = 0, node_description = "HCA-1",'
    )
    names = {f"gpu0{n}:mlx5_0": f"gpu0{n} HCA-1" for n in range(1, 9)}
    fabric = dataclasses.replace(healthy(text), names=names)
    assert report(fabric).verdict == "ok"


def test_ports_with_names_are_known_by_their_numbers():
    """A dump counts the ports of a switch from 1."""
    text = FILE.replace('"leaf1:[1-4]"', '"leaf1:L[11-14]"')
    text = text.replace(
        '[[switches]]\nnames = "leaf[1-4]"',
        '[[switches]]\nnames = "leaf1"\ntier = "leaf"\nports = 8\n'
        'port_names = "L[11-14],[5-8]"\n[[switches]]\nnames = "leaf[2-4]"',
    )
    seen = fabric_dump.read(healthy().iblinkinfo(), "dump")
    assert compare(cluster(text), [seen]).verdict == "ok"
    other = text.replace("L[11-14],[5-8]", "[5-8],L[11-14]")
    assert compare(cluster(other), [seen]).verdict != "ok"


# --------------------------------------------------------------------- only the switch


OPEN = FILE.replace('"leaf1:[1-4]"', '"leaf1:*"').replace('"leaf3:[1-4]"', '"leaf3:*"')


def test_a_cable_of_which_only_the_switch_is_known_matches_any_port():
    fabric = healthy()
    exchange(dict_of(fabric), "gpu01:mlx5_0", "gpu02:mlx5_0")
    assert report(fabric, expected=cluster(OPEN)).verdict == "ok"


def test_such_cables_are_still_exchanged_between_switches():
    fabric = healthy()
    exchange(dict_of(fabric), "gpu01:mlx5_0", "gpu06:mlx5_0")
    found = report(fabric, expected=cluster(OPEN))
    assert kinds(found) == ["exchanged"]


def test_a_link_at_a_free_port_of_such_a_switch_is_extra():
    fabric = healthy(OPEN.replace("ports = 8", "ports = 9"))
    fabric = dataclasses.replace(fabric, links=links_of(cluster()))
    join(dict_of(fabric), port("leaf1:9"), port("leaf3:9"))
    assert kinds(report(fabric)) == ["extra"]
