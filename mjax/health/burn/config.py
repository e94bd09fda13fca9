"""Flags of `python -m mjax.health burn`.

Input: values. Output: a validated config.
"""

import dataclasses
import os
import socket
from pathlib import Path
from typing import Any, Literal

from mjax.cli import flags
from mjax.health.burn import limits as burn_limits
from mjax.health.burn.measurements import KINDS, Form, is_within


def _host_name() -> str:
    """Return the name that a launch gave this host, or its host name."""
    return os.environ.get("MJAX_HOST") or socket.gethostname()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BurnConfig:
    """Measure this host, and judge it."""

    quick: bool = False
    """Repeat each measurement only 3 times."""
    minutes: float | None = None
    """Repeat rounds for this many minutes; absent: run one round."""
    state: Path | None = None
    """File for completed rounds; the same command resumes from it."""
    out: Path | None = None
    """File for the result, as JSON."""
    json: bool = False
    """Print one JSON object and nothing else."""
    host: str = dataclasses.field(default_factory=_host_name)
    """Name of this host in the result; absent: MJAX_HOST (set by a launch), or the host
    name."""
    only: tuple[str, ...] = ()
    """Measurements to make, such as gemm, gemm.int8 or disk; absent: all."""
    require: tuple[str, ...] = ()
    """Measurements that must be ok; an unknown one makes the burn fail too."""
    baselines: Path = burn_limits.BASELINES
    """TOML file of baselines: the performance that each model of device must reach."""
    compare: tuple[Path, ...] = ()
    """Results of other hosts, written by --out; at least 3 with this hardware."""
    compare_fraction: float = 0.9
    """Required fraction of the median of the other hosts."""
    platform: Literal["cpu", "cuda"] | None = None
    """Devices for jax to use; absent: cuda if this host has NVIDIA GPUs."""
    simulate_devices: int | None = None
    """Number of CPU devices to simulate."""
    expect_devices: int | None = None
    """Required number of devices; absent: the number in /dev/nvidia*."""
    disk_dir: Path | None = None
    """Folder on the disk to measure; absent: measure no disk."""
    disk_mib: int = 64
    """MiB to write and read; a multiple of 8."""
    memory_mib: int | None = None
    """MiB of memory to test; absent: a quarter of the free memory, at most 256."""
    limit_s: float = 120.0
    """Time limit in seconds of one measurement, and of the start of jax; a process that
    takes longer counts as hung."""
    join_s: int = 600
    """Seconds to wait for the other processes of --num-processes."""
    coordinator: str | None = None
    """host:port of process 0, to measure together with other hosts."""
    num_processes: int | None = None
    """Number of processes that measure together, one per host."""
    process_id: int | None = None
    """Index of this process, from 0."""

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_names(self)
        _check_processes(self)
        if self.simulate_devices is not None and self.platform == "cuda":
            raise ValueError(
                "--simulate-devices needs --platform cpu, got cuda; omit one of them"
            )
        if self.disk_dir is not None and not self.disk_dir.is_dir():
            raise ValueError(
                f"--disk-dir {self.disk_dir} is not a folder; make it first"
            )

    @property
    def form(self) -> Form:
        """Form of the burn, which decides how long a measurement is repeated."""
        return "quick" if self.quick else "short" if self.minutes is None else "long"

    @property
    def settings(self) -> dict[str, Any]:
        """Flags that must be the same when a burn is resumed."""
        names = ("only", "platform", "simulate_devices", "disk_dir", "disk_mib")
        names += ("memory_mib", "num_processes", "process_id")
        values = {name: getattr(self, name) for name in names}
        disk_dir = None if self.disk_dir is None else str(self.disk_dir)
        return values | {"form": self.form, "only": [*self.only], "disk_dir": disk_dir}


def _check_numbers(config: BurnConfig) -> None:
    """Refuse numbers that are out of range."""
    for flag, value, least in (
        ("--simulate-devices", config.simulate_devices, 1),
        ("--expect-devices", config.expect_devices, 1),
        ("--disk-mib", config.disk_mib, 8),
        ("--memory-mib", config.memory_mib, 1),
        ("--join-s", config.join_s, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{flag} must be at least {least}, got {value}")
    if config.disk_mib % 8:
        raise ValueError(
            f"--disk-mib must be a multiple of 8, got {config.disk_mib}; the nearest "
            f"is {8 * round(config.disk_mib / 8)}"
        )
    for flag, value in (("--minutes", config.minutes), ("--limit-s", config.limit_s)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{flag} must be positive, got {value:g}")
    if not 0 < config.compare_fraction <= 1:
        raise ValueError(
            f"--compare-fraction must be in (0, 1], got {config.compare_fraction:g}"
        )


def _check_names(config: BurnConfig) -> None:
    """Refuse unknown measurements."""
    for flag, names in (("--only", config.only), ("--require", config.require)):
        for name in names:
            is_known = any(is_within(kind, name) for kind in KINDS)
            is_part = flag == "--require" and any(is_within(name, k) for k in KINDS)
            if not (is_known or is_part):
                near = flags.nearest(name, KINDS)
                raise ValueError(f"unknown {flag} {name}; the nearest is {near}")


def _check_processes(config: BurnConfig) -> None:
    """Check the flags of a measurement together with other hosts."""
    address, number, index = (
        config.coordinator,
        config.num_processes,
        config.process_id,
    )
    if address is None and number is None and index is None:
        return
    if address is None or number is None or index is None:
        raise ValueError(
            "--coordinator, --num-processes and --process-id go together; give all "
            "three or none"
        )
    if number < 2:
        raise ValueError(
            f"--num-processes must be at least 2, got {number}; omit all three flags "
            "to measure one host alone"
        )
    if not 0 <= index < number:
        raise ValueError(f"--process-id must be 0 to {number - 1}, got {index}")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--coordinator must be HOST:PORT, got {address}")
