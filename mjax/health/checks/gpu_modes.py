"""Checks that GPUs are in the right modes, and that no process uses them.

Input: the output of `nvidia-smi -q -x`. Output: verdicts on modes, reset requests of
GPUs, processes, used memory, and the memory that other devices can map.
Source: nvidia-smi manual, https://docs.nvidia.com/deploy/nvidia-smi/index.html
"""

from collections.abc import Sequence

from mjax.health.checks.nvidia_smi import (
    Gpu,
    Seen,
    judge_gpus,
    limit_of,
    smi_check,
)
from mjax.health.findings import UnreadableError, Verdict
from mjax.health.settings import Settings


def _must(gpu: Gpu, wanted: str, others: Sequence[str], path: str) -> Seen:
    word = gpu.word((wanted, *others), path)
    if word != wanted:
        return Seen(value=word, bad=f"{path} is {word}, not {wanted}")
    return Seen(value=word)


@smi_check("gpu.recovery", action="Drain the host and carry out the requested action.")
def recovery(text: str, settings: Settings) -> Verdict:
    """No GPU requests a reset, a drain or a reboot.

    Drivers before 560 report it in `gpu_reset_status`, later ones in
    `gpu_recovery_action`.
    """
    del settings

    def look(gpu: Gpu) -> Seen:
        if "gpu_recovery_action" in gpu.fields:
            action = gpu.text("gpu_recovery_action")
            bad = "" if action == "None" else f"it asks for: {action}"
            return Seen(value=action, bad=bad)
        words = ("No", "Yes")
        if gpu.word(words, "gpu_reset_status/reset_required") == "Yes":
            return Seen(value="reset", bad="it must be reset")
        drain = gpu.fields.get("gpu_reset_status/drain_and_reset_recommended")
        if drain == "Yes":
            return Seen(value="drain and reset", bad="it should be drained and reset")
        return Seen(value="None")

    return judge_gpus(text, look, limit="None")


@smi_check(
    "gpu.persistence", action="Start nvidia-persistenced, or run `nvidia-smi -pm 1`."
)
def persistence(text: str, settings: Settings) -> Verdict:
    """Persistence mode is on."""
    del settings

    def look(gpu: Gpu) -> Seen:
        return _must(gpu, "Enabled", ("Disabled",), "persistence_mode")

    return judge_gpus(text, look, limit="Enabled")


@smi_check("gpu.mig", action="Run `nvidia-smi -mig 0`, then reset the GPU.")
def mig(text: str, settings: Settings) -> Verdict:
    """No GPU is divided by MIG."""
    del settings

    def look(gpu: Gpu) -> Seen:
        now = _must(gpu, "Disabled", ("Enabled",), "mig_mode/current_mig")
        later = _must(gpu, "Disabled", ("Enabled",), "mig_mode/pending_mig")
        return now if now.bad else later

    return judge_gpus(text, look, limit="Disabled")


@smi_check("gpu.compute_mode", action="Run `nvidia-smi -c 0`.")
def compute_mode(text: str, settings: Settings) -> Verdict:
    """Any process may use each GPU."""
    del settings
    others = ("Exclusive_Process", "Exclusive_Thread", "Prohibited")

    def look(gpu: Gpu) -> Seen:
        return _must(gpu, "Default", others, "compute_mode")

    return judge_gpus(text, look, limit="Default")


@smi_check(
    "gpu.foreign_processes",
    needs_idle=True,
    action="End the process; if it cannot be ended (state D), reboot.",
)
def foreign_processes(text: str, settings: Settings) -> Verdict:
    """Before a run no process uses a GPU.

    In a container, nvidia-smi does not see processes outside it; gpu.memory_used sees
    their memory.
    """
    allowed = settings.limit("gpu.foreign_processes", "allowed")

    def look(gpu: Gpu) -> Seen:
        if gpu.processes is None:
            raise UnreadableError(f"{gpu.label}: it does not list processes")
        foreign = [
            f"{process.name} (pid {process.pid}, {process.memory})"
            for process in gpu.processes
            if process.name.rpartition("/")[2] not in allowed
        ]
        value = f"{len(foreign)} processes"
        return Seen(value=value, bad=", ".join(foreign), rank=len(foreign))

    return judge_gpus(text, look, limit="none")


@smi_check(
    "gpu.memory_used",
    needs_idle=True,
    action="Find the process with `fuser -v /dev/nvidia*` and end it, or reboot.",
)
def memory_used(text: str, settings: Settings) -> Verdict:
    """Before a run the memory of each GPU is free."""
    most = limit_of(settings, "gpu.memory_used", "max_mib")

    def look(gpu: Gpu) -> Seen:
        used = gpu.number("MiB", "fb_memory_usage/used")
        value = f"{used:g} MiB"
        if used > most:
            return Seen(value=value, bad=f"{value} are in use", rank=used)
        return Seen(value=value, rank=used)

    return judge_gpus(text, look, limit=f"at most {most:g} MiB")


@smi_check(
    "gpu.bar1", action="Turn on Above 4G Decoding and Resizable BAR in the BIOS."
)
def bar1(text: str, settings: Settings) -> Verdict:
    """Other devices can map the whole memory of each GPU."""
    least = limit_of(settings, "gpu.bar1", "min_fraction")

    def look(gpu: Gpu) -> Seen:
        has = gpu.number("MiB", "bar1_memory_usage/total")
        memory = gpu.number("MiB", "fb_memory_usage/total")
        if has < least * memory:
            bad = f"BAR1 has {has:g} MiB, the memory {memory:g} MiB"
            return Seen(value=f"{has:g} MiB", bad=bad, rank=-has)
        return Seen(value=f"{has:g} MiB", rank=-has)

    return judge_gpus(text, look, limit=f"at least {least:g} of the memory")


CHECKS = (
    recovery,
    persistence,
    mig,
    compute_mode,
    foreign_processes,
    memory_used,
    bar1,
)
