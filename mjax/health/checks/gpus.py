"""Checks of the GPUs of a host: number, model, versions.

Input: the output of `nvidia-smi -q -x`. Output: verdicts. Each GPU is compared with
the value of the majority; if no value has a majority, all GPUs are named.
Sources: nvidia-smi manual, https://docs.nvidia.com/deploy/nvidia-smi/index.html, for
fields and exit statuses.
"""

import collections
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from mjax.health.checks.nvidia_smi import (
    CORRUPTED_INFOROM,
    Gpu,
    Seen,
    gpus,
    judge_gpus,
    parse,
    smi_check,
)
from mjax.health.findings import UnreadableError, Verdict, failed, ok, unknown
from mjax.health.settings import Settings

_FAILING: Mapping[int, str] = MappingProxyType(
    {
        6: "it finds no GPU",
        8: "a GPU's external power cables are not attached",
        9: "the NVIDIA driver is not loaded",
        10: "the kernel has an interrupt problem with a GPU",
        15: "a GPU has fallen off the bus",
        16: "a GPU must be reset before it can be used again",
        18: "the driver and its library have different versions",
        255: "an internal error of the driver",
    }
)
"""Meanings of exit statuses: 6 to 15 and 255 as in the manual, 16 and 18 as
nvmlReturn_t of NVML, https://docs.nvidia.com/deploy/nvml-api/index.html."""


_REPLACE = "Drain the host; power it off and on; if the problem stays, replace the GPU."


def _expected_version(settings: Settings, name: str) -> str | None:
    versions = settings.expect.get("versions", {})
    return str(versions[name]) if name in versions else None


def _odd(values: Sequence[str]) -> str | None:
    """Return the value that more than half of the GPUs have; None if there is none."""
    value, number = collections.Counter(values).most_common()[0]
    return value if 2 * number > len(values) else None


@smi_check(
    "gpu.answers",
    action="If nvidia-smi is absent, install it; if it fails or its output ends "
    f"early, look for Xid 79 in dmesg. {_REPLACE}",
    device="gpu",
    failing=_FAILING,
)
def answers(text: str, settings: Settings) -> Verdict:
    """Every GPU that is attached to the driver responds."""
    del settings
    smi = parse(text)
    listed, attached = len(smi.gpus), smi.num_attached
    if listed != attached:
        reason = f"{attached} GPUs are attached, {listed} answer"
        return failed(reason, listed, attached)
    if not listed:
        raise UnreadableError("it lists no GPU")
    return ok(f"{listed} GPUs", attached)


@smi_check(
    "gpu.count",
    action="Compare bus ids with `lspci -d 10de:`; reseat or replace the GPU.",
)
def count(text: str, settings: Settings) -> Verdict:
    """The host has as many GPUs as expected."""
    has, wanted = len(parse(text).gpus), settings.expect.get("gpus")
    if wanted is None:
        return unknown(f"{has} GPUs; gpus is not in the expectations")
    if has != wanted:
        ids = ", ".join(gpu.bus_id for gpu in parse(text).gpus)
        reason = f"{has} GPUs, not {wanted}; there are {ids or 'none'}"
        return failed(reason, has, wanted)
    return ok(has, wanted)


@smi_check("gpu.name", action="Correct gpu_name, or remove the host from this pool.")
def model(text: str, settings: Settings) -> Verdict:
    """Each GPU is of the expected model."""
    wanted = settings.expect.get("gpu_name")
    if wanted is None:
        names = sorted({gpu.text("product_name") for gpu in gpus(text)})
        return unknown(f"{', '.join(names)}; gpu_name is not in the expectations")

    def look(gpu: Gpu) -> Seen:
        has = gpu.text("product_name")
        return Seen(value=has, bad="" if has == wanted else f"is a {has}")

    return judge_gpus(text, look, wanted)


@smi_check("gpu.same", action="Compare the VBIOS; replace the GPU that differs.")
def same(text: str, settings: Settings) -> Verdict:
    """All GPUs have the same model, memory and maximum clocks."""
    del settings
    bad = []
    for path in (
        "product_name",
        "fb_memory_usage/total",
        "max_clocks/sm_clock",
        "max_clocks/mem_clock",
    ):
        values = [gpu.text(path) for gpu in gpus(text)]
        most = _odd(values)
        bad += [
            f"{gpu.label}: {path} is {value}"
            for gpu, value in zip(gpus(text), values, strict=True)
            if value != most
        ]
    if bad:
        return failed("; ".join(bad), "different", "the same")
    return ok(f"{len(gpus(text))} alike", limit="the same")


@smi_check(
    "gpu.driver", action="Install the expected driver; reboot to unload the old one."
)
def driver(text: str, settings: Settings) -> Verdict:
    """The driver has the expected version, and GPUs run its firmware."""
    has = parse(text).driver_version
    wanted = _expected_version(settings, "nvidia_driver")

    def look(gpu: Gpu) -> Seen:
        firmware = gpu.fields.get("gsp_firmware_version")
        if firmware not in (None, "N/A", has):
            return Seen(value=has, bad=f"its firmware is {firmware}, the driver {has}")
        if wanted is not None and has != wanted:
            return Seen(value=has, bad=f"the driver is {has}, not {wanted}")
        return Seen(value=has)

    verdict = judge_gpus(text, look, wanted or "")
    if wanted is None and not verdict.reason:
        return unknown(f"{has}; versions.nvidia_driver is not in the expectations")
    return verdict


@smi_check(
    "gpu.vbios",
    action="Flash the VBIOS with the vendor's tool; power the host off and on.",
)
def vbios(text: str, settings: Settings) -> Verdict:
    """All GPUs have the same VBIOS, the expected one."""
    values = [gpu.text("vbios_version") for gpu in gpus(text)]
    wanted = _expected_version(settings, "vbios") or _odd(values)

    def look(gpu: Gpu) -> Seen:
        has = gpu.text("vbios_version")
        bad = "" if has == wanted else f"its VBIOS is {has}, not {wanted or 'the same'}"
        return Seen(value=has, bad=bad)

    return judge_gpus(text, look, wanted or "the same")


@smi_check(
    "gpu.inforom",
    action="Reboot; if the problem stays, replace the GPU (RMA).",
    failing={CORRUPTED_INFOROM: "the infoROM of a GPU is corrupted"},
)
def inforom(text: str, settings: Settings) -> Verdict:
    """No GPU's infoROM is corrupted."""
    del settings
    corrupted = parse(text).corrupted
    if corrupted:
        reason = f"the infoROM of {', '.join(corrupted)} is corrupted"
        return failed(reason, f"{len(corrupted)} corrupted", "none")

    def look(gpu: Gpu) -> Seen:
        gpu.text("inforom_version/oem_object")
        return Seen(value=gpu.text("inforom_version/img_version"))

    return judge_gpus(text, look)


CHECKS = (
    answers,
    count,
    model,
    same,
    driver,
    vbios,
    inforom,
)
