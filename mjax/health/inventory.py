"""Inventory of a host: GPUs, InfiniBand adapters, versions; for the cluster file.

Input: output of nvidia-smi and /sys/class/infiniband. Output: JSON that `health
cluster check --reports` compares with the file. A value that cannot be read is absent;
the comparison then gives unknown.
"""

from typing import Any

from mjax.health.checks import nvidia_smi, ports, sysfs
from mjax.health.findings import UnreadableError
from mjax.health.sources import Files, Reading

ADAPTERS = Files((f"{ports.ROOT}/*/node_guid", f"{ports.ROOT}/*/ports/1/rate"))


def inventory(smi: Reading, adapters: Reading) -> dict[str, Any]:
    """Return the inventory in the readings of `nvidia_smi.SMI` and `ADAPTERS`."""
    return _gpus(smi) | _nics(adapters)


def _gpus(reading: Reading) -> dict[str, Any]:
    if reading.absent or reading.cut:
        return {}
    try:
        found = nvidia_smi.parse(reading.text)
    except UnreadableError:
        return {}
    return {
        "gpus": [{"pci": gpu.bus_id.lower()} for gpu in found.gpus],
        "versions": {"nvidia_driver": found.driver_version},
    }


def _nics(reading: Reading) -> dict[str, Any]:
    if reading.absent or reading.cut:
        return {}
    try:
        files = sysfs.tree(reading.text)
        nics = []
        for port in ports.all_ports(files):
            path = f"{ports.ROOT}/{port.device}/node_guid"
            guid = "0x" + files.read(path).replace(":", "")
            rate = port.rate.gbps
            nics.append({"name": port.device, "guid": guid, "rate_gbps": rate})
    except UnreadableError:
        return {}
    return {"nics": nics}
