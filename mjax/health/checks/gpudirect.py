"""Checks of GPUDirect: GPUs can exchange data with network cards directly.

Input: /proc/modules, and the IOMMU group of each GPU in /sys. Output: verdicts.
GPUDirect RDMA needs the module nvidia_peermem, or DMA-BUF in the kernel and an NCCL
that uses it. So a host without the module is unknown, unless the expectation `modules`
names the module.
Sources: for the columns of /proc/modules
https://docs.redhat.com/it/documentation/red_hat_enterprise_linux/6/html/deployment_guide/s2-proc-modules
and for the types of groups
https://git.zx2c4.com/laptop-kernel/tree/Documentation/ABI/testing/sysfs-kernel-iommu_groups
"""

import functools
import re
from collections.abc import Mapping

from mjax.health.check import check
from mjax.health.findings import UnreadableError, Verdict, failed, ok, unknown
from mjax.health.settings import Settings
from mjax.health.sources import File, Files

MODULES = File("/proc/modules")
_GPUS = "/sys/bus/pci/drivers/nvidia"
IOMMU = Files((f"{_GPUS}/*/vendor", f"{_GPUS}/*/iommu_group/type"))

_MODULE = re.compile(r"([A-Za-z0-9_]+) [0-9]+ \S+ \S+ (Live|Loading|Unloading) 0x\S+.*")
_FILE = re.compile(
    rf"{_GPUS}/([0-9a-f]{{4,8}}:[0-9a-f]{{2}}:[0-9a-f]{{2}}\.[0-7])"
    r"/(vendor|iommu_group/type)\t(.{1,60})"
)
_NVIDIA = "0x10de"
_TYPES = ("identity", "DMA", "DMA-FQ", "blocked", "unmanaged")


@functools.lru_cache
def modules(text: str) -> Mapping[str, str]:
    """Return the state of each kernel module, by name.

    Raises:
      UnreadableError: a line is not a module.
    """
    found = {}
    for line in text.splitlines():
        match = _MODULE.fullmatch(line)
        if match is None or match[1] in found:
            raise UnreadableError(f"expected a module, got {line!r:.60}")
        found[match[1]] = match[2]
    if not found or not text.endswith("\n"):
        raise UnreadableError("it lists no module, or ends early")
    return found


def _loaded(text: str, settings: Settings, names: tuple[str, ...]) -> Verdict:
    states = {name: modules(text).get(name) for name in names}
    live = [name for name, state in states.items() if state == "Live"]
    if live:
        return ok(live[0], limit="loaded")
    shown = " or ".join(names)
    if any(states.values()):
        return failed(f"{shown} is being loaded or unloaded", "not live", "loaded")
    if any(name in settings.expect.get("modules", ()) for name in names):
        return failed(f"{shown} is not loaded", "not loaded", "loaded")
    return unknown(
        f"{shown} is not loaded, and modules of the expectations does not name it"
    )


@check(
    "gpudirect.peermem",
    source=MODULES,
    action="Run `modprobe nvidia-peermem`; load it at boot.",
)
def peermem(text: str, settings: Settings) -> Verdict:
    """Network cards can read and write the memory of GPUs."""
    return _loaded(text, settings, ("nvidia_peermem", "nv_peer_mem"))


@check(
    "gpudirect.gdrcopy",
    source=MODULES,
    action="Run `modprobe gdrdrv`; load it at boot.",
)
def gdrcopy(text: str, settings: Settings) -> Verdict:
    """The kernel module of GDRCopy is loaded."""
    return _loaded(text, settings, ("gdrdrv",))


@check(
    "gpudirect.iommu",
    source=IOMMU,
    action="Boot with iommu=pt, or turn the IOMMU off in the BIOS.",
)
def iommu(text: str, settings: Settings) -> Verdict:
    """No IOMMU translates addresses between GPUs and other devices."""
    allowed = settings.limit("gpudirect.iommu", "allowed")
    vendors, types = {}, {}
    for line in text.splitlines():
        found = _FILE.fullmatch(line)
        known = vendors if found and found[2] == "vendor" else types
        if found is None or found[1] in known:
            raise UnreadableError(f"expected a file of a GPU, got {line!r:.80}")
        known[found[1]] = found[3]
    if not vendors or set(vendors.values()) != {_NVIDIA}:
        raise UnreadableError("it lists no GPU, or another device")
    if not types:
        return ok("off", " or ".join(["off", *allowed]))
    is_known = all(kind in _TYPES for kind in types.values())
    if types.keys() != vendors.keys() or not is_known:
        raise UnreadableError("it does not have the IOMMU group of each GPU")
    bad = [f"{gpu}: {kind}" for gpu, kind in types.items() if kind not in allowed]
    worst = next((kind for kind in types.values() if kind not in allowed), "identity")
    if bad:
        return failed("; ".join(bad), worst, " or ".join(["off", *allowed]))
    return ok(worst, " or ".join(["off", *allowed]))


CHECKS = (
    peermem,
    gdrcopy,
    iommu,
)
