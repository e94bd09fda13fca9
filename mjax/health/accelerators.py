"""Tell training hosts, which have or should have a GPU or RDMA, from plain hosts.

Input: the PCI devices of the host, the devices that the NVIDIA driver and the RDMA
drivers list in /proc and /sys, and the expectations.
Output: `is_plain` and `signs`. A laptop, a login node or a container without devices is
plain. A check that only a training host must pass (`Check.for_training`) cannot fail a
plain host: where it would fail, it is unknown. Signs are the other direction: a host
with a GPU that nothing can question is not healthy (`Check.device`).

If one of the files cannot be read, the host is not plain; if none of them exists, it is
plain. The PCI class shows a GPU whose driver is not loaded; /proc/driver/nvidia shows a
GPU in a container.

Sources: include/linux/pci_ids.h for the classes and vendors, and
Documentation/PCI/sysfs-pci.rst for the files, at https://github.com/torvalds/linux.
"""

import re

from mjax.health.settings import Settings
from mjax.health.several import Called
from mjax.health.sources import Files, Reading

_PCI = "/sys/bus/pci/devices"
SOURCE = Called(
    "GPUs and RDMA devices",
    Files(
        (
            f"{_PCI}/*/class",
            f"{_PCI}/*/vendor",
            "/proc/driver/nvidia/gpus/*/information",
            "/sys/class/infiniband/*/node_type",
        ),
        present=("/dev/nvidia[0-9]*", "/dev/infiniband/uverbs[0-9]*"),
    ),
)
_EXPECTED = (
    *("gpus", "gpu_name", "gpu_pcie_gen", "gpu_pcie_width", "nvlinks"),
    *("ports", "port_rate_gbps", "hcas", "link_layer", "roce_priority"),
    "roce_traffic_class",
)
"""Keys of settings.EXPECTED that imply a GPU or RDMA."""
_LINE = re.compile(rf"{_PCI}/([^/\t]+)/(class|vendor)\t(0x[0-9a-f]{{4,6}})")
_NVIDIA, _MELLANOX, _INTEL = "0x10de", "0x15b3", "0x8086"
_DISPLAY, _NETWORK = "0x03", "0x02"
_INFINIBAND = "0x0207"
_ALWAYS = ("0x0302", _INFINIBAND)
"""PCI classes of 3D controllers and InfiniBand adapters, of any vendor."""
_NOT_INTEL = ("0x0380", "0x1200")
"""PCI classes of other displays and accelerators, such as AMD GPUs. Intel is
excluded: its devices of these classes are part of laptop processors."""


def is_plain(reading: Reading, settings: Settings) -> bool:
    """Return whether a host has no GPU and no RDMA device, and none is expected.

    Args:
      reading: reading of `SOURCE`.
      settings: settings with the expectations of the host.
    """
    if any(settings.expect.get(key) for key in _EXPECTED):
        return False
    if reading.absent:
        return True
    if reading.cut:
        return False
    classes, vendors, others = _parsed(reading)
    # Another line is a device that a driver shows, or a file that is not readable.
    return (
        not others
        and classes.keys() == vendors.keys()
        and not any(_trains(classes[device], vendors[device]) for device in classes)
    )


def signs(reading: Reading) -> dict[str, str]:
    """Return why a host has NVIDIA GPUs ("gpu") and RDMA devices ("rdma").

    Args:
      reading: reading of `SOURCE`.
    Returns:
      Kind of device -> the first sign of one: a PCI device, or a file of a driver. An
      Ethernet card is no sign of RDMA, although it may be capable of it.
    """
    classes, vendors, others = _parsed(reading)
    result = {}
    for device, kind in classes.items():
        if vendors.get(device) == _NVIDIA and kind.startswith(_DISPLAY):
            result.setdefault("gpu", f"the NVIDIA GPU {device} on PCI")
        if kind.startswith(_INFINIBAND):
            result.setdefault("rdma", f"the InfiniBand adapter {device} on PCI")
    for path in others:
        if path.startswith(("/proc/driver/nvidia/gpus/", "/dev/nvidia")):
            result.setdefault("gpu", path)
        if path.startswith(("/sys/class/infiniband/", "/dev/infiniband/")):
            result.setdefault("rdma", path)
    return result


def _parsed(reading: Reading) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return PCI address -> class and -> vendor, and the paths of other lines."""
    classes: dict[str, str] = {}
    vendors: dict[str, str] = {}
    others = []
    for line in reading.text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            others.append(line.partition("\t")[0])
        else:
            known = classes if match[2] == "class" else vendors
            known[match[1]] = match[3]
    return classes, vendors, others


def _trains(kind: str, vendor: str) -> bool:
    """Return whether a PCI device is a GPU, an accelerator or an RDMA adapter."""
    return (
        kind.startswith(_ALWAYS)
        or (vendor != _INTEL and kind.startswith(_NOT_INTEL))
        or (vendor == _NVIDIA and kind.startswith(_DISPLAY))
        or (vendor == _MELLANOX and kind.startswith(_NETWORK))
    )
