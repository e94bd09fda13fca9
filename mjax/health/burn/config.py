"""Flags of `python -m mjax.health burn`.

Enters: values. Leaves: a config; one wrong value refuses it.
"""

import dataclasses
import os
import socket
from pathlib import Path
from typing import Any, Literal

from mjax import flags
from mjax.health.burn import limits as burn_limits
from mjax.health.burn.measurements import KINDS, Form, is_within


def _host_name() -> str:
    """Return the name that a launch gives this host, or its own."""
    return os.environ.get("MJAX_HOST") or socket.gethostname()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BurnConfig:
    """Measure this host, and judge it."""

    quick: bool = False
    """Repeat each measurement 3 times only."""
    minutes: float | None = None
    """Repeat rounds until so many minutes were burned; absent: one round."""
    state: Path | None = None
    """File of the rounds so far; the same command resumes from it."""
    out: Path | None = None
    """File for the result, as JSON."""
    json: bool = False
    """Print one JSON object and nothing else."""
    host: str = dataclasses.field(default_factory=_host_name)
    """Name of this host in the result; absent: MJAX_HOST, which a launch sets, or the
    host name."""
    only: tuple[str, ...] = ()
    """Measurements to make: gemm, gemm.int8, disk and so on; absent: all."""
    require: tuple[str, ...] = ()
    """Measurements that must be ok: unknown fails, too."""
    baselines: Path = burn_limits.BASELINES
    """TOML with what hardware must reach."""
    compare: tuple[Path, ...] = ()
    """Results of other hosts, as --out writes them; at least 3 with this hardware."""
    compare_fraction: float = 0.9
    """Of the median of the other hosts that must be reached."""
    platform: Literal["cpu", "cuda"] | None = None
    """Devices that jax must use; absent: cuda if this host has NVIDIA GPUs."""
    simulate_devices: int | None = None
    """Number of CPU devices to simulate."""
    expect_devices: int | None = None
    """Number of devices that must be there; absent: those in /dev/nvidia*."""
    disk_dir: Path | None = None
    """Folder on the disk to measure; absent: no disk is measured."""
    disk_mib: int = 64
    """MiB that are written and read; a multiple of 8."""
    memory_mib: int | None = None
    """MiB of memory to test; absent: a quarter of what is free, at most 256."""
    limit_s: float = 120.0
    """Seconds for one measurement, and for the start of jax; longer counts as hung."""
    join_s: int = 600
    """Seconds to wait for the other processes of --num-processes."""
    coordinator: str | None = None
    """host:port of process 0, for a measurement together with other hosts."""
    num_processes: int | None = None
    """Processes that measure together, one a host."""
    process_id: int | None = None
    """Of this process, from 0."""

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_names(self)
        _check_processes(self)
        if self.simulate_devices is not None and self.platform == "cuda":
            raise ValueError(
                "--simulate-devices needs --platform cpu, got cuda; leave one out"
            )
        if self.disk_dir is not None and not self.disk_dir.is_dir():
            raise ValueError(f"--disk-dir {self.disk_dir} is no folder; make it first")

    @property
    def form(self) -> Form:
        """How long a measurement is repeated."""
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
    """Refuse numbers out of their range."""
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
            "--coordinator, --num-processes and --process-id belong together; give all "
            "three or none"
        )
    if number < 2:
        raise ValueError(
            f"--num-processes must be at least 2, got {number}; leave all three flags "
            "out to measure one host alone"
        )
    if not 0 <= index < number:
        raise ValueError(f"--process-id must be 0 to {number - 1}, got {index}")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--coordinator must be HOST:PORT, got {address}")
