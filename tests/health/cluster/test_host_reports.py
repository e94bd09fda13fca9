"""Reports of hosts, compared with a cluster file."""

import json
from typing import Any

import pytest

from mjax.health.cluster import host_reports
from mjax.health.cluster.parts import Port
from tests.health.cluster.fabrics import cluster

FILE = """
name = "small"
require = ["gpu.count", "infiniband.*"]
[versions]
nvidia_driver = "580.65.06"
[[hosts]]
names = "gpu[1-2]"
gpus = 2
gpu_pci = ["0000:1b:00.0", "0000:43:00.0"]
nics = [{ name = "mlx5_0", rate_gbps = 400 }]
[guids]
"gpu1:mlx5_0" = "0x946dae03005a3c10"
"gpu2:mlx5_0" = "0x946dae03005a3c20"
"""


def report(host: str = "gpu1", **inventory: Any) -> dict[str, Any]:
    guid = {"gpu1": "0x946dae03005a3c10", "gpu2": "946d:ae03:005a:3c20"}.get(host)
    return {
        "ok": True,
        "host": host,
        "checks": [
            {"name": "gpu.count", "state": "ok", "value": "2", "reason": ""},
            {"name": "infiniband.ports", "state": "ok", "value": "1", "reason": ""},
            {"name": "disk.free", "state": "unknown", "reason": "no df"},
        ],
        "inventory": {
            "gpus": [{"pci": "00000000:1B:00.0"}, {"pci": "00000000:43:00.0"}],
            "nics": [{"name": "mlx5_0", "guid": guid, "rate_gbps": 400, "mtu": 4096}],
            "versions": {"nvidia_driver": "580.65.06"},
            **inventory,
        },
    }


def compared(*reports: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the differences, as kind and text, and the problems."""
    read = [host_reports.read(json.dumps(one)) for one in reports]
    findings, problems = host_reports.compare(cluster(FILE), read)
    return [f"{one.kind}: {one.text}" for one in findings], problems


def test_hosts_as_in_the_file_differ_in_nothing():
    assert compared(report("gpu1"), report("gpu2")) == ([], [])


def with_check(name: str, /, **fields: Any) -> dict[str, Any]:
    found = report()
    found["checks"] = [
        one | fields if one["name"] == name else one for one in found["checks"]
    ]
    return found


CASES = {
    "a GPU less": (
        report(gpus=[{"pci": "00000000:1B:00.0"}]),
        [
            "gpu count: gpu1: 1 GPUs, but the file says 2",
            "gpu address: gpu1: no GPU at 0000:43:00.0",
        ],
    ),
    "a GPU at another place": (
        report(gpus=[{"pci": "0000:1b:00.0"}, {"pci": "0000:44:00.0"}]),
        [
            "gpu address: gpu1: no GPU at 0000:43:00.0",
            "gpu address: gpu1: a GPU at 0000:44:00.0, which the file does not name",
        ],
    ),
    "no NIC": (report(nics=[]), ["nic absent: gpu1: no NIC mlx5_0"]),
    "the NIC of another host": (
        report(nics=[{"name": "mlx5_0", "guid": "0x946dae03005a3c20"}]),
        ["guid: gpu1: mlx5_0 has 0x946dae03005a3c20, but the file 0x946dae03005a3c10"],
    ),
    "a NIC without a GUID": (
        report(nics=[{"name": "mlx5_0"}]),
        ["guid: gpu1: the GUID of mlx5_0 is unknown"],
    ),
    "a GUID that is none": (
        report(nics=[{"name": "mlx5_0", "guid": "N/A"}]),
        ["guid: gpu1: mlx5_0 has N/A, but the file 0x946dae03005a3c10"],
    ),
    "another version": (
        report(versions={"nvidia_driver": "570.1"}),
        ["version: gpu1: nvidia_driver is 570.1, but the file says 580.65.06"],
    ),
    "no version": (
        report(versions={}),
        ["version: gpu1: nvidia_driver is unknown, but the file says 580.65.06"],
    ),
    "a required check that is unknown": (
        with_check("gpu.count", state="unknown", reason="no nvidia-smi"),
        ["required check: gpu1: gpu.count is unknown: no nvidia-smi"],
    ),
    "a required check that was cut off": (
        with_check("infiniband.ports", state="incomplete", reason="60 s"),
        ["required check: gpu1: infiniband.ports is incomplete: 60 s"],
    ),
    "a required check that was not made": (
        with_check("infiniband.ports", name="ib.ports"),
        ["required check: gpu1: infiniband.* is required, but was not run"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_differs_is_told_with_host_and_values(name: str):
    one, expected = CASES[name]
    assert compared(one, report("gpu2")) == (expected, [])


def test_a_host_without_a_report_is_named():
    found, _ = compared(report("gpu2"))
    assert found == ["no report: 1 hosts have no report: gpu1"]


def test_a_host_that_the_file_does_not_know_is_named():
    found, _ = compared(report("gpu1"), report("gpu2"), report("cpu1"))
    assert found == ["unknown host: cpu1 sent a report, but the file has no such host"]


def test_two_reports_of_a_host_are_a_problem():
    _, problems = compared(report("gpu1"), report("gpu1"), report("gpu2"))
    assert problems == ["there are two reports of gpu1; keep the newer"]


def test_without_an_inventory_the_check_counts_and_the_rest_is_not_known():
    one = report()
    del one["inventory"]
    found, problems = compared(one, report("gpu2"))
    assert found == [
        "version: gpu1: nvidia_driver is unknown, but the file says 580.65.06"
    ]
    assert problems == [
        "the report of gpu1 does not say where its GPUs are",
        "the report of gpu1 does not name the GUIDs of NICs",
    ]
    one["checks"][0]["value"] = "many"
    assert (
        "the report of gpu1 does not say how many GPUs it has"
        in compared(one, report("gpu2"))[1]
    )


def test_rates_of_links_are_taken_from_the_inventory():
    read = host_reports.read(json.dumps(report()))
    assert host_reports.rates([read]) == {Port(node="gpu1", name="mlx5_0"): 400.0}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not JSON"),
        ("[]", "must be an object"),
        ("{}", "host must be text"),
        ('{"host": "gpu1"}', "checks must be a list"),
        ('{"host": "gpu1", "checks": [{}]}', r"checks\[0\] must be an object with"),
        ('{"host": "gpu1", "checks": [], "inventory": {"gpus": 8}}', "gpus must be"),
        ('{"host": "gpu1", "checks": [], "inventory": []}', "must be an object"),
    ],
)
def test_what_is_no_report_is_refused(text: str, told: str):
    with pytest.raises(ValueError, match=told):
        host_reports.read(text)


def test_no_beginning_of_a_report_is_read():
    text = json.dumps(report())
    for size in range(len(text)):
        with pytest.raises(ValueError, match="not JSON"):
            host_reports.read(text[:size])
