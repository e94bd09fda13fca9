"""The inventory of a host, which is compared with the cluster file."""

import json

from mjax.health.cluster import host_reports
from mjax.health.inventory import inventory
from mjax.health.sources import Reading
from tests.health import cases

ROOT = "/sys/class/infiniband"
ADAPTERS = f"""{ROOT}/mlx5_0/node_guid\t946d:ae03:0012:3456
{ROOT}/mlx5_0/ports/1/rate\t400 Gb/sec (4X NDR)
{ROOT}/mlx5_1/node_guid\t946d:ae03:0012:3457
{ROOT}/mlx5_1/ports/1/rate\t200 Gb/sec (4X HDR)
"""
NOTHING = Reading(absent="there is nothing")


def test_gpus_adapters_and_driver_are_told_as_a_cluster_file_is_compared_with():
    smi = Reading(text=cases.fixture("gpu", "h100.xml"))
    found = inventory(smi, Reading(text=ADAPTERS))
    report = {"host": "gpu1", "checks": [], "inventory": found}
    said = host_reports.read(json.dumps(report))
    assert said.gpus is not None
    assert said.gpus[0].pci == "00000000:1b:00.0"
    assert said.nics is not None
    assert [(n.name, n.guid, n.rate_gbps) for n in said.nics] == [
        ("mlx5_0", "0x946dae0300123456", 400.0),
        ("mlx5_1", "0x946dae0300123457", 200.0),
    ]
    assert set(said.versions or {}) == {"nvidia_driver"}


def test_what_cannot_be_read_is_absent():
    assert inventory(NOTHING, NOTHING) == {}
    late = Reading(text=cases.fixture("gpu", "h100.xml"), status=None)
    assert inventory(late, Reading(text=ADAPTERS.replace("400", "?"))) == {}
    assert inventory(Reading(text="no XML"), Reading(text=ADAPTERS[:40])) == {}
