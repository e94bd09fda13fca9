"""The measurements of `health burn`: names, units, and outcomes.

Output: the names and types shared by `burn` and the processes that it starts. A name is
a kind (`gemm.bfloat16`), or a kind and its part: a device (`gemm.bfloat16.gpu0`), two
devices (`pair.gpu0.gpu1`), a number of devices (`all_reduce.8`), or a direction
(`disk.write`).
"""

import dataclasses
import math
from typing import Literal

DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
"""Dtypes of the factors of a GEMM, as jax names them."""

DEVICE_KINDS = (
    "devices",
    *(f"gemm.{dtype}" for dtype in DTYPES),
    *(f"bits.{dtype}" for dtype in DTYPES),
    "device_memory",
    "host_to_device",
    "device_to_host",
    "pair",
    "all_to_all",
    "all_reduce",
)
"""Kinds measured through jax on the devices of one host, in this order."""
HOST_KINDS = ("memory.copy", "memory.pattern", "disk")
"""Kinds measured without jax."""
NETWORK_KINDS = ("all_reduce_hosts",)
"""Kinds measured by all processes of --num-processes together."""
KINDS = (*DEVICE_KINDS, *HOST_KINDS, *NETWORK_KINDS)

Group = Literal["devices", "host", "network"]
"""Kinds that a single process measures."""
GROUPS: dict[Group, tuple[str, ...]] = {
    "devices": DEVICE_KINDS,
    "host": HOST_KINDS,
    "network": NETWORK_KINDS,
}

Form = Literal["quick", "short", "long"]
"""Form of a burn, which decides how long a measurement is repeated. Sizes are the same
in all forms, so that their results can be compared."""
BUDGET_S: dict[Form, float] = {"quick": 0.1, "short": 1.0, "long": 10.0}
"""Time budget in seconds for the repeats of one kind, shared by its parts. A short
round of all kinds takes well below a minute, and a long one keeps GPUs warm for
minutes."""
LEAST_REPEATS = 3
"""Minimum number of repeats of every part, whatever the budget. A median needs at least
three."""

Outcome = Literal["value", "right", "wrong", "absent", "error", "incomplete"]
"""value: a number, to be judged. right, wrong: result of comparing bytes. absent: not
measured because a device, a flag, software or free space is missing. error: it failed.
incomplete: it exceeded its time limit, or an earlier failure prevented it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Result of one measurement in one round."""

    name: str
    outcome: Outcome
    value: float | None = None
    """Value in `unit`; larger is better."""
    unit: str = ""
    note: str = ""
    """For a person: the error, or why there is no value."""

    def __post_init__(self) -> None:
        value = self.value
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{self.name} must be a positive number, got {value}")
        if self.outcome == "value" and value is None:
            raise ValueError(f"{self.name} has the outcome value but no value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The task of a measuring process."""

    kinds: tuple[str, ...]
    form: Form
    report_fd: int = -1
    """File descriptor to which the process writes one `Report` per line."""
    disk_dir: str | None = None
    disk_mib: int = 64
    memory_mib: int | None = None
    """Memory to test; None: derived from the free memory."""
    coordinator: str | None = None
    num_processes: int = 1
    process_id: int = 0
    elapsed_s: float = 0.0
    """Seconds that this host has burned; the processes agree on the largest value."""
    join_s: int = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One line from a measuring process."""

    event: Literal["hardware", "begin", "end", "agreed"]
    kind: str = ""
    results: tuple[Measured, ...] = ()
    hardware: str = ""
    elapsed_s: float | None = None
    """Largest `Task.elapsed_s` of all processes that measure together."""


def unit_of(kind: str) -> str:
    """Return the unit of a kind's values: 10^12 operations or 10^9 bytes per second."""
    return "TFLOP/s" if is_within(kind, "gemm") else "GB/s"


def is_within(name: str, prefix: str) -> bool:
    """Return whether a name is the prefix or below it: gemm.int8.cpu0 is in gemm."""
    return name == prefix or name.startswith(f"{prefix}.")
