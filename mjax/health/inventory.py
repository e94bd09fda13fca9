"""Inventory of a host: GPUs, InfiniBand adapters, versions; for the cluster file.

Input: the output of nvidia-smi, and files of /sys/class/infiniband. Output: a JSON
object that `health cluster check --reports` compares with the cluster file. A value
that cannot be read is absent, and is unknown in the comparison.
"""

from typing import Any

from mjax.health.checks import nvidia_smi, ports, sysfs
from mjax.health.findings import UnreadableError
from mjax.health.sources import Files, Reading

ADAPTERS = Files((f"{ports.ROOT}/*/node_guid", f"{ports.ROOT}/*/ports/1/rate"))


def inventory(smi: Reading, adapters: Reading) -> dict[str, Any]:
    """Return the inventory of a host.

    Args:
      smi: reading of `nvidia_smi.SMI`.
      adapters: reading of `ADAPTERS`.
    Returns:
      gpus (for each: pci, the address); versions (nvidia_driver); nics (for each: name,
      guid, rate_gbps). A key is absent if its source cannot be read.
    """
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
