"""Checks of the memory of GPUs: ECC errors, retired pages, remapped rows.

Input: the output of `nvidia-smi -q -x`. Output: verdicts.

GPUs up to Turing retire pages, later ones remap rows. nvidia-smi writes N/A for a
scheme that a GPU does not have: the GPU passes the checks of that scheme if it has the
other one, and is unknown if it shows neither (with MIG, both are hidden). Volatile
counters start at 0 when the driver is loaded. Aggregate counters last as long as the
GPU, so their limit is not zero.
Source: https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html
"""

from collections.abc import Callable

from mjax.health.checks.nvidia_smi import (
    Gpu,
    Seen,
    judge_gpus,
    limit_of,
    smi_check,
)
from mjax.health.findings import UnreadableError, Verdict
from mjax.health.settings import Settings

_YES_NO = ("No", "Yes")
_BANKS = ("max", "high", "partial", "low", "none")
_REMAPPED = "remapped_rows/remapped_row_unc"
_RETIRED = "retired_pages/double_bit_retirement/retired_count"


_RESET = "Drain the host and reset the GPU (`nvidia-smi -r -i BUS_ID`) or reboot"
_RMA = "Drain the host, run NVIDIA's field diagnostic, replace the GPU (RMA)."


def _at_most(
    text: str, read: Callable[[Gpu], int | float], most: float, what: str
) -> Verdict:
    def look(gpu: Gpu) -> Seen:
        number = read(gpu)
        if number > most:
            bad = f"{number:g} {what}, more than {most:g}"
            return Seen(value=f"{number:g}", bad=bad, rank=number)
        return Seen(value=f"{number:g}", rank=number)

    return judge_gpus(text, look, limit=f"at most {most:g}")


def _must_be_no(gpu: Gpu, path: str, *, bad: str) -> Seen:
    word = gpu.word(_YES_NO, path)
    if word != "No":
        return Seen(value=word, bad=bad)
    return Seen(value=word)


def _uncorrectable(gpu: Gpu, period: str) -> int:
    """Return the number of errors of SRAM and DRAM in a period.

    Drivers before 545 have one counter for SRAM, later ones have two.
    """
    path = f"ecc_errors/{period}"
    whole = f"{path}/sram_uncorrectable"
    parts = (whole,) if whole in gpu.fields else (f"{whole}_parity", f"{whole}_secded")
    return sum(gpu.count(part) for part in (*parts, f"{path}/dram_uncorrectable"))


def _retires_pages(gpu: Gpu) -> bool:
    """Return whether a GPU retires pages; True if it shows neither scheme."""
    return not gpu.has(_REMAPPED)


def _remaps_rows(gpu: Gpu) -> bool:
    """Return whether a GPU remaps rows; True if it shows neither scheme."""
    return gpu.has(_REMAPPED) or not gpu.has(_RETIRED)


@smi_check("gpu.ecc_mode", action="Run `nvidia-smi -e 1`, then reset the GPU.")
def ecc_mode(text: str, settings: Settings) -> Verdict:
    """ECC is on, also after the next reset."""
    del settings

    def look(gpu: Gpu) -> Seen:
        modes = ("Enabled", "Disabled")
        now = gpu.word(modes, "ecc_mode/current_ecc")
        later = gpu.word(modes, "ecc_mode/pending_ecc")
        if now != "Enabled" or later != "Enabled":
            bad = f"ECC is {now.lower()}, after a reset {later.lower()}"
            return Seen(value=now, bad=bad)
        return Seen(value=now)

    return judge_gpus(text, look, limit="Enabled")


@smi_check(
    "gpu.ecc_uncorrected_volatile",
    action=f"{_RESET}: rows are then remapped. If errors return, replace the GPU.",
)
def ecc_uncorrected_volatile(text: str, settings: Settings) -> Verdict:
    """No uncorrectable memory error since the driver was loaded."""
    most = limit_of(settings, "gpu.ecc_uncorrected_volatile", "max")

    def read(gpu: Gpu) -> int:
        return _uncorrectable(gpu, "volatile")

    return _at_most(text, read, most, "uncorrectable errors since the driver loaded")


@smi_check(
    "gpu.ecc_uncorrected_aggregate",
    action="Run a long burn; replace the GPU if the count still grows.",
)
def ecc_uncorrected_aggregate(text: str, settings: Settings) -> Verdict:
    """Few uncorrectable memory errors in the life of a GPU."""
    most = limit_of(settings, "gpu.ecc_uncorrected_aggregate", "max")

    def read(gpu: Gpu) -> int:
        return _uncorrectable(gpu, "aggregate")

    return _at_most(text, read, most, "uncorrectable errors in its life")


@smi_check(
    "gpu.ecc_corrected",
    action="Run a long burn; replace the GPU if the count grows fast.",
)
def ecc_corrected(text: str, settings: Settings) -> Verdict:
    """Few corrected memory errors since the driver was loaded."""
    most = limit_of(settings, "gpu.ecc_corrected", "max")

    def read(gpu: Gpu) -> int:
        sram = gpu.count("ecc_errors/volatile/sram_correctable")
        return sram + gpu.count("ecc_errors/volatile/dram_correctable")

    return _at_most(text, read, most, "corrected errors since the driver loaded")


@smi_check("gpu.retired_pages", action=_RMA)
def retired_pages(text: str, settings: Settings) -> Verdict:
    """Few pages of memory are retired (GPUs up to Turing)."""
    most = limit_of(settings, "gpu.retired_pages", "max")

    def read(gpu: Gpu) -> int:
        if not _retires_pages(gpu):
            return 0
        single = gpu.count("retired_pages/multiple_single_bit_retirement/retired_count")
        return single + gpu.count(_RETIRED)

    return _at_most(text, read, most, "retired pages")


@smi_check("gpu.retirement_pending", action=f"{_RESET}, which retires the page.")
def retirement_pending(text: str, settings: Settings) -> Verdict:
    """No page waits to be retired (GPUs up to Turing)."""
    del settings

    def look(gpu: Gpu) -> Seen:
        if not _retires_pages(gpu):
            return Seen(value="No")
        return _must_be_no(
            gpu, "retired_pages/pending_retirement", bad="a page waits to be retired"
        )

    return judge_gpus(text, look, limit="No")


@smi_check("gpu.remap_pending", action=f"{_RESET}, which remaps the row.")
def remap_pending(text: str, settings: Settings) -> Verdict:
    """No row of memory waits to be remapped."""
    del settings

    def look(gpu: Gpu) -> Seen:
        if not _remaps_rows(gpu):
            return Seen(value="No")
        return _must_be_no(
            gpu, "remapped_rows/remapped_row_pending", bad="a row waits to be remapped"
        )

    return judge_gpus(text, look, limit="No")


@smi_check("gpu.remap_failed", action=f"A reset does not fix this. {_RMA}")
def remap_failed(text: str, settings: Settings) -> Verdict:
    """Every bad row of memory has been remapped."""
    del settings

    def look(gpu: Gpu) -> Seen:
        if not _remaps_rows(gpu):
            return Seen(value="No")
        return _must_be_no(
            gpu, "remapped_rows/remapped_row_failure", bad="a row could not be remapped"
        )

    return judge_gpus(text, look, limit="No")


@smi_check(
    "gpu.remapped_uncorrectable",
    action="Run a long burn; replace the GPU if the count still grows.",
)
def remapped_uncorrectable(text: str, settings: Settings) -> Verdict:
    """Few rows are remapped after uncorrectable errors."""
    most = limit_of(settings, "gpu.remapped_uncorrectable", "max")

    def read(gpu: Gpu) -> int:
        return gpu.count(_REMAPPED) if _remaps_rows(gpu) else 0

    return _at_most(text, read, most, "rows are remapped")


@smi_check(
    "gpu.remap_banks",
    action=f"The next bad row of that bank cannot be remapped. {_RMA}",
)
def remap_banks(text: str, settings: Settings) -> Verdict:
    """Each bank of memory has spare rows left."""
    most = limit_of(settings, "gpu.remap_banks", "max_without_spares")

    def read(gpu: Gpu) -> float:
        if not _remaps_rows(gpu):
            return 0.0
        path = "remapped_rows/row_remapper_histogram/row_remapper_histogram_"
        banks = {name: gpu.number("bank(s)", f"{path}{name}") for name in _BANKS}
        if sum(banks.values()) <= 0:
            raise UnreadableError(f"{gpu.label}: the histogram of banks is empty")
        return banks["none"]

    return _at_most(text, read, most, "banks have no spare row")


@smi_check("gpu.sram_threshold", action=_RMA)
def sram_threshold(text: str, settings: Settings) -> Verdict:
    """Uncorrectable errors of SRAM are below NVIDIA's threshold."""
    del settings

    def look(gpu: Gpu) -> Seen:
        return _must_be_no(
            gpu,
            "ecc_errors/aggregate/sram_threshold_exceeded",
            bad="too many uncorrectable errors of SRAM",
        )

    return judge_gpus(text, look, limit="No")


@smi_check("gpu.repair_pending", action=f"{_RESET}, which repairs it.")
def repair_pending(text: str, settings: Settings) -> Verdict:
    """No memory channel or TPC waits for a repair."""
    del settings

    def look(gpu: Gpu) -> Seen:
        channel = _must_be_no(
            gpu,
            "ecc_errors/channel_repair_pending",
            bad="a memory channel waits to be repaired",
        )
        cluster = _must_be_no(
            gpu, "ecc_errors/tpc_repair_pending", bad="a TPC waits to be repaired"
        )
        return channel if channel.bad else cluster

    return judge_gpus(text, look, limit="No")


CHECKS = (
    ecc_mode,
    ecc_uncorrected_volatile,
    ecc_uncorrected_aggregate,
    ecc_corrected,
    retired_pages,
    retirement_pending,
    remap_pending,
    remap_failed,
    remapped_uncorrectable,
    remap_banks,
    sram_threshold,
    repair_pending,
)
