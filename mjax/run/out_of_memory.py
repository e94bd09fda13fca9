"""Turn an out-of-memory error into a message with remedies.

Input: an error that JAX, XLA or Python raised while a run was compiled, started or
trained. Output: an `OutOfMemoryError` that names the memory, the run's flags that need
less of it, and the planner's command for this run and these GPUs.
"""

import contextlib
import dataclasses
import os
import re
import shlex
from collections.abc import Iterator, Sequence

import jax

from mjax.config import fixes
from mjax.config.command_line import Command
from mjax.config.sizes import as_flags, smaller, with_fields
from mjax.config.train import TrainConfig
from mjax.estimate import memory
from mjax.hardware.gpus import GPUS
from mjax.mesh.axes import AxisSizes
from mjax.run import report
from mjax.run.prepare import Run

_MEMORY = re.compile("out of memory|allocat", re.IGNORECASE)
"""Distinguishes out of memory from other errors that XLA calls RESOURCE_EXHAUSTED, such
as too much shared memory in a kernel or too long a message between processes."""
_SHOWN_CHARS = 200
_OTHER_GPU = "h200"
"""GPU in the planner's command if the planner does not describe the GPU of the run."""


class OutOfMemoryError(RuntimeError):
    """The memory of a device or of its host is full."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
    """A run and its devices, for the remedies."""

    config: TrainConfig
    sizes: AxisSizes
    estimate: memory.Estimate
    """Estimated memory of one device."""
    device_kind: str
    """`jax.Device.device_kind`."""
    is_cpu: bool
    """Whether the devices are in the memory of the host."""
    num_nodes: int
    per_node: int
    """Devices of a node."""
    available_bytes: int | None
    """Memory of one device that the run may use; None if unknown."""
    host_bytes: int
    """Memory of the host, which CPU devices share."""
    flags: Sequence[str]
    """Flags from which the planner reads the run."""


def needs_of(
    run: Run,
    devices: fixes.Devices,
    command: Command,
    argv: Sequence[str],
    *,
    is_resumed: bool,
) -> Needs:
    """Collect what the messages need.

    Args:
      run: the run.
      devices: devices of its mesh.
      command: options of the command; a dry run writes no config.json.
      argv: the flags of this start.
      is_resumed: whether config.json of the work dir supplied the missing flags.
    """
    flags: list[str] = []
    if is_resumed or not command.dry_run:
        flags = ["--config", str(run.work_dir / "config.json")]
    device, per_node = jax.local_devices()[0], devices.per_host or devices.count
    return Needs(
        config=run.config,
        sizes=run.sizes,
        estimate=run.memory,
        device_kind=device.device_kind,
        is_cpu=device.platform == "cpu",
        num_nodes=devices.count // per_node,
        per_node=per_node,
        available_bytes=report.device_memory_bytes(run.config),
        host_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        flags=[*flags, *argv] if command.dry_run else flags,
    )


@contextlib.contextmanager
def explained(needs: Needs, what: str) -> Iterator[None]:
    """Replace out-of-memory errors inside a with statement; pass on all other errors.

    Args:
      needs: the run and its devices.
      what: what the run does inside, for the message.
    Raises:
      OutOfMemoryError: the memory of a device or of the host is full.
    """
    try:
        yield
    except MemoryError as error:
        raise _host_is_full(needs, what, _first_line(error)) from error
    except RuntimeError as error:  # raised by XLA, or reported by another process
        text = _first_line(error)
        if "RESOURCE_EXHAUSTED" not in text or not _MEMORY.search(text):
            raise
        if needs.is_cpu:
            raise _host_is_full(needs, what, text) from error
        raise _device_is_full(needs, what, text) from error


def planner_command(needs: Needs) -> str:
    """Return the planner's command that searches layouts with which the run fits."""
    kind = needs.device_kind
    described = (x for x in GPUS if x.partition("-")[0].upper() in kind)
    words = ["python", "-m", "mjax.plan", *needs.flags]
    words += ["--gpu", next(described, _OTHER_GPU), "--nodes", str(needs.num_nodes)]
    words += ["--gpus-per-node", str(needs.per_node)]
    if needs.available_bytes is not None:
        gib = max(1, needs.available_bytes // 2**30)
        words += ["--device-memory-gib", str(gib)]
    return shlex.join([*words, "--search"])


def _device_is_full(needs: Needs, what: str, text: str) -> OutOfMemoryError:
    available = needs.available_bytes
    of = "" if available is None else f" of {memory.in_units(available)}"
    return OutOfMemoryError(
        f"the memory of a GPU is full during {what} ({text}); a step was estimated to "
        f"need {memory.in_units(needs.estimate.total)}{of}; {_remedies(needs)}; "
        f"the planner finds layouts that fit: {planner_command(needs)}"
    )


def _host_is_full(needs: Needs, what: str, text: str) -> OutOfMemoryError:
    pinned = needs.estimate.host_state + needs.estimate.host_activations
    if needs.is_cpu:
        remedy = (
            f"the host has {memory.in_units(needs.host_bytes)}, and each of its "
            f"{needs.per_node} devices needs an estimated "
            f"{memory.in_units(needs.estimate.total)}; {_remedies(needs)}"
        )
    elif pinned:
        remedy = (
            f"each GPU needs {memory.in_units(pinned)} of pinned memory there; use "
            "--optim.state-memory device, or another --model.remat than offload"
        )
    else:
        remedy = (
            "each process copies its part of a checkpoint there before it is written; "
            "use fewer processes on a host, or hosts with more memory"
        )
    return OutOfMemoryError(
        f"the memory of the host is full during {what} ({text}); {remedy}"
    )


def _remedies(needs: Needs) -> str:
    """List flags that reduce the memory; the first flags change the run the least."""
    config, words = needs.config, dict[str, str]()
    if (problem := _state_problem(needs)) is not None:
        return problem
    for change, changed in smaller(config, needs.sizes):
        # A CPU device uses the host's memory, so offload frees nothing.
        if needs.is_cpu and changed.model.remat == "offload":
            continue
        if change.count("--") == 1:
            words.setdefault(change.partition(" ")[0], change)
    if needs.sizes.shards > 1 and config.zero < 3:
        with contextlib.suppress(ValueError):  # level 3 needs remat and no pipeline
            with_fields(config, {"zero": config.zero + 1})
            words["--zero"] = as_flags({"zero": config.zero + 1})
    if config.optim.state_memory == "device" and not needs.is_cpu:
        words["--optim.state-memory"] = "--optim.state-memory host"
    last = "more devices by --mesh.tp, --mesh.pp or --mesh.dp-shard"
    if needs.is_cpu:
        last = "fewer simulated devices or a smaller model"
    return f"use {' or '.join([*words.values(), last])}"


def _state_problem(needs: Needs) -> str | None:
    """Return a text with remedies if the state at rest does not fit; None if it fits.

    If it does not, remat and microbatches cannot help: they change only activations.
    """
    count, available, place = 1, needs.available_bytes, "the memory of a GPU"
    if needs.is_cpu:
        count, available, place = needs.per_node, needs.host_bytes, "the host's memory"
    state = count * needs.estimate.state
    if available is None or state <= available:
        return None
    sizes = needs.sizes
    remedies = [
        "a smaller model",
        "more GPUs by --mesh.tp, --mesh.pp or --mesh.dp-shard",
    ]
    if needs.is_cpu:
        remedies[1] = "more hosts by --mesh.tp, --mesh.pp or --mesh.dp-shard"
        is_whole = needs.config.zero == 0 and sizes.dp > 1
        if is_whole or sizes.dp_replicate > 1:  # each replica has a copy of the state
            remedies.append("fewer simulated devices")
    if sizes.shards > 1 and needs.config.zero == 0:
        remedies.append("--zero 1, which shards the state over --mesh.dp-shard")
    if needs.config.optim.state_memory == "device" and not needs.is_cpu:
        remedies.append("--optim.state-memory host")
    return (
        f"the state at rest alone, {memory.in_units(state)}, exceeds {place}, "
        f"{memory.in_units(available)}; use {' or '.join(remedies)}"
    )


def _first_line(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text.strip().partition("\n")[0][:_SHOWN_CHARS]
