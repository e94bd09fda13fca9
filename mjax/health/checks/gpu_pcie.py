"""Checks of the PCIe links of GPUs: lanes, generation, replays.

Input: the output of `nvidia-smi -q -x`. Output: verdicts. nvidia-smi gives the maximum
of GPU and slot together (max_link_gen, max_link_width), so only the expectations
gpu_pcie_gen and gpu_pcie_width reveal a GPU in a slower slot. Counters start at 0 when
the GPU is reset.
Source: https://docs.nvidia.com/deploy/nvidia-smi/index.html
"""

import re

from mjax.health.checks.nvidia_smi import (
    Gpu,
    Seen,
    judge_gpus,
    limit_of,
    smi_check,
)
from mjax.health.findings import UnreadableError, Verdict
from mjax.health.settings import Settings

_LINK = "pci/pci_gpu_link_info"


def _lanes(gpu: Gpu, path: str) -> int:
    found = re.fullmatch(r"([0-9]{1,2})x", gpu.text(path))
    if found is None:
        raise UnreadableError(f"{gpu.label}: {path} is {gpu.text(path)!r:.60}")
    return int(found[1])


@smi_check(
    "pcie.gpu_width",
    action="Power the host off and on; reseat the GPU or its riser and cables.",
)
def width(text: str, settings: Settings) -> Verdict:
    """The PCIe link of each GPU has all its lanes."""
    expected = settings.expect.get("gpu_pcie_width")

    def look(gpu: Gpu) -> Seen:
        has = _lanes(gpu, f"{_LINK}/link_widths/current_link_width")
        can = _lanes(gpu, f"{_LINK}/link_widths/max_link_width")
        wanted = can if expected is None else expected
        if has < wanted:
            bad = f"its link has {has} of {wanted} lanes"
            return Seen(value=f"{has} lanes", bad=bad, rank=-has)
        return Seen(value=f"{has} lanes", rank=-has)

    return judge_gpus(text, look, expected or "all lanes")


@smi_check(
    "pcie.gpu_gen",
    action="Power the host off and on; set the link speed in the BIOS; reseat.",
)
def generation(text: str, settings: Settings) -> Verdict:
    """The PCIe link of each GPU runs at its full speed.

    A link may be slower while the GPU saves power. Data-centre GPUs stay in P0, where
    the link must have full speed. In any other state a slow link gives no information.
    """
    expected = settings.expect.get("gpu_pcie_gen")

    def look(gpu: Gpu) -> Seen:
        has = gpu.count(f"{_LINK}/pcie_gen/current_link_gen")
        can = gpu.count(f"{_LINK}/pcie_gen/max_link_gen")
        wanted = can if expected is None else expected
        if can < wanted:
            bad = f"GPU and slot together can do generation {can}, not {wanted}"
            return Seen(value=f"generation {can}", bad=bad, rank=-can)
        if has < wanted:
            state = gpu.text("performance_state")
            if state != "P0":
                raise UnreadableError(
                    f"{gpu.label}: generation {has} of {wanted} while it idles in "
                    f"{state:.60}"
                )
            bad = f"its link runs at generation {has}, not {wanted}"
            return Seen(value=f"generation {has}", bad=bad, rank=-has)
        return Seen(value=f"generation {has}", rank=-has)

    return judge_gpus(text, look, expected or "the maximum")


@smi_check(
    "pcie.gpu_replays",
    action="Look for AER errors in dmesg; reseat the GPU, its riser and cables.",
)
def replays(text: str, settings: Settings) -> Verdict:
    """Few PCIe packets of GPUs were resent."""
    most = limit_of(settings, "pcie.gpu_replays", "max_replays")
    most_rollovers = limit_of(settings, "pcie.gpu_replays", "max_rollovers")

    def look(gpu: Gpu) -> Seen:
        number = gpu.count("pci/replay_counter")
        rollovers = gpu.count("pci/replay_rollover_counter")
        if number > most or rollovers > most_rollovers:
            bad = f"{number} replays and {rollovers} rollovers since its last reset"
            return Seen(value=f"{number}", bad=bad, rank=number)
        return Seen(value=f"{number}", rank=number)

    return judge_gpus(text, look, limit=f"at most {most:g}")


CHECKS = (
    width,
    generation,
    replays,
)
