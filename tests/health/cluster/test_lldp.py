"""Links from LLDP, compared with a cluster file.

Written after lldpd/lldpd, src/client/json_writer.c and tests/integration/
test_lldpcli.py; no text is of a real host.
"""

import copy
import json
from typing import Any

import pytest

from mjax.health.cluster import lldp
from mjax.health.cluster.cabling import compare
from mjax.health.cluster.links import Observation
from mjax.health.cluster.parts import Port
from tests.health.cluster.fabrics import cluster

FILE = """
name = "ethernet"
[[hosts]]
names = "gpu[1-2]"
gpus = 8
wiring = "host"
nics = [{ name = "eth2", fabric = "ethernet" }, { name = "eth3", fabric = "ethernet" }]
[[switches]]
names = "tor1"
tier = "leaf"
fabric = "ethernet"
ports = 4
port_names = "swp[1-4]"
[[cables]]
ends = ["gpu[1-2]:eth2", "tor1:swp[1-2]"]
[[cables]]
ends = ["gpu[1-2]:eth3", "tor1:swp[3-4]"]
"""


def neighbour(port: str, switch: str = "tor1") -> dict[str, Any]:
    """Return the output of lldpcli for an interface, in the form json."""
    return {
        "via": "LLDP",
        "rid": "1",
        "age": "0 day, 00:12:03",
        "chassis": {
            switch: {
                "id": {"type": "mac", "value": "04:3f:72:aa:00:01"},
                "descr": "Debian GNU/Linux 12 (bookworm)",
                "mgmt-ip": "10.0.0.1",
                "capability": [{"type": "Bridge", "enabled": True}],
            }
        },
        "port": {"id": {"type": "ifname", "value": port}, "descr": port, "ttl": "120"},
    }


def text_of(interfaces: dict[str, Any]) -> bytes:
    """Return the output of -f json: a list of one item is the item."""
    items = [{name: fields} for name, fields in interfaces.items()]
    found = items[0] if len(items) == 1 else items
    return json.dumps({"lldp": {"interface": found}}).encode()


def text_of_json0(interfaces: dict[str, Any]) -> bytes:
    """Return the output of -f json0: all lists, and text as {"value": ...}."""
    rows = []
    for name, fields in interfaces.items():
        switch, port = next(iter(fields["chassis"])), fields["port"]
        row: dict[str, Any] = {"name": name, "via": "LLDP"}
        row["chassis"] = [{"id": [{"type": "mac", "value": "04:3f:72:aa:00:01"}]}]
        row["chassis"][0]["name"] = [{"value": switch}]
        row["port"] = [{"id": [port["id"]], "descr": [{"value": port["descr"]}]}]
        rows.append(row)
    return json.dumps({"lldp": [{"interface": rows}]}).encode()


def healthy() -> dict[str, dict[str, Any]]:
    return {
        "gpu1": {"eth2": neighbour("swp1"), "eth3": neighbour("swp3")},
        "gpu2": {"eth2": neighbour("swp2"), "eth3": neighbour("swp4")},
    }


def seen(hosts: dict[str, dict[str, Any]], write=text_of) -> list[Observation]:
    return [lldp.read(write(found), host, host) for host, found in hosts.items()]


@pytest.mark.parametrize("write", [text_of, text_of_json0])
def test_neighbours_as_in_the_file_are_ok(write):
    found = compare(cluster(FILE), seen(healthy(), write))
    assert (found.verdict, found.num_matched) == ("ok", 4)


def test_a_host_with_one_neighbour_is_read():
    one = lldp.read(text_of({"eth2": neighbour("swp1")}), "gpu1", "gpu1")
    assert [str(s.end) for s in one.sightings] == ['"gpu1"[eth2]']


def test_two_exchanged_cables_are_named():
    hosts = healthy()
    hosts["gpu1"]["eth2"], hosts["gpu2"]["eth3"] = (
        hosts["gpu2"]["eth3"],
        hosts["gpu1"]["eth2"],
    )
    found = compare(cluster(FILE), seen(hosts))
    assert [one.kind for one in found.findings] == ["exchanged"]
    assert "gpu1:eth2 goes to tor1:swp4" in found.findings[0].text


def test_ports_may_be_named_in_their_descriptions():
    hosts = copy.deepcopy(healthy())
    port = hosts["gpu1"]["eth2"]["port"]
    port["id"] = {"type": "mac", "value": "04:3f:72:aa:00:11"}
    assert compare(cluster(FILE), seen(hosts)).verdict == "ok"


def test_a_host_that_does_not_report_is_never_ok():
    hosts = healthy()
    del hosts["gpu2"]
    found = compare(cluster(FILE), seen(hosts))
    assert found.verdict == "incomplete"
    assert [one.nodes for one in found.findings] == [("gpu2",)]
    assert "no source reports either end of 2 cables" in found.problems[0]


def test_an_interface_without_a_neighbour_is_missing():
    hosts = healthy()
    del hosts["gpu2"]["eth3"]
    found = compare(cluster(FILE), seen(hosts))
    assert (found.verdict, [one.kind for one in found.findings]) == (
        "failed",
        ["missing"],
    )


def test_two_neighbours_of_an_interface_are_never_ok():
    one, other = neighbour("swp1"), neighbour("swp9", "other")
    text = json.dumps({"lldp": {"interface": [{"eth2": one}, {"eth2": other}]}})
    read = lldp.read(text.encode(), "gpu1", "gpu1")
    assert compare(cluster(FILE), [read]).verdict == "incomplete"


def test_the_same_report_twice_contradicts_nothing():
    hosts = healthy()
    hosts["gpu1"]["eth9"] = neighbour("swp1", "other")
    found = compare(cluster(FILE), [*seen(hosts), *seen(hosts)])
    assert (found.verdict, [one.kind for one in found.findings]) == (
        "failed",
        ["extra"],
    )


def test_rates_that_the_file_names_must_come_from_elsewhere():
    text = FILE.replace('"eth2", ', '"eth2", rate_gbps = 100, ')
    made = cluster(text)
    found = compare(made, seen(healthy()))
    assert found.verdict == "incomplete"
    assert "the rates of 2 cables are not known" in found.problems[0]
    rates = {Port(node=f"gpu{n}", name="eth2"): 100.0 for n in (1, 2)}
    assert compare(made, seen(healthy()), rates=rates).verdict == "ok"
    rates[Port(node="gpu2", name="eth2")] = 25.0
    found = compare(made, seen(healthy()), rates=rates)
    assert [one.kind for one in found.findings] == ["slow"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"lldp": 3}',
        b'{"lldp": {"interface": 3}}',
        b'{"lldp": {"interface": {"eth2": 3}}}',
        b'{"lldp": {"interface": {"eth2": {}}}}',
        b'{"lldp": {"interface": {"eth2": {"chassis": {}, "port": {}}}}}',
        b'{"lldp": {}}',
        b'{"lldp": {"interface": []}}',
    ],
)
def test_what_is_no_output_of_lldpcli_is_a_problem(text: bytes):
    found = lldp.read(text, "gpu1", "gpu1.json")
    assert found.sightings == ()
    assert found.problems[0].startswith("gpu1.json ")


def test_a_chassis_without_a_name_is_not_called_after_a_key():
    one = neighbour("swp1")
    one["chassis"] = {"id": {"type": "mac", "value": "04:3f:72:aa:00:01"}}
    found = lldp.read(text_of({"eth2": one}), "gpu1", "gpu1.json")
    assert found.sightings == ()
    assert "has no name or no port" in found.problems[0]


def test_no_beginning_of_a_text_is_read():
    text = text_of(healthy()["gpu1"])
    for size in range(len(text)):
        found = lldp.read(text[:size], "gpu1", "gpu1.json")
        assert found.problems
        assert not found.sightings
