"""`python -m mjax.doctor`: flags, the checks of one host, and the output.

Exit codes: 0 a run can start, 1 a check failed, 2 bad input.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mjax.cli import flags
from mjax.doctor import folders, network, software
from mjax.health import check as checking
from mjax.health.check import Check, Report
from mjax.health.check_command import shown, to_json
from mjax.health.checks.table import CHECKS
from mjax.health.settings import Settings, read_expected, read_limits
from mjax.processes.config import DistributedConfig, split_address

_SOURCE_S = 60.0
"""Time limit of one probe in seconds. It is twice the time in which jax starts on eight
GPUs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorFlags:
    """Check whether a run can start on this host; with --together, on all hosts."""

    work_dir: str = "runs"
    """Work dir of the run to be started."""
    hosts: int = 1
    """Number of hosts of the run. If there are several, also check that this host's
    name is not a loopback address, and that the work dir is on a shared file system."""
    space_gb: float = 10.0
    """Required free space in the work dir, in GB."""
    ports: tuple[int, ...] = ()
    """Ports on which the run will listen on this host; they must be free."""
    connect: tuple[str, ...] = ()
    """Addresses host:port to which the run will connect; they must answer."""
    hardware: bool = True
    """Also run the checks of `python -m mjax.health check --in-use`."""
    expect: str | None = None
    """TOML file with the expected properties of this host; see docs/hosts.md."""
    together: bool = False
    """Run also the checks that need all processes of the run: they connect, compare
    their software, read each other's files, and sum a number over all devices. Start
    this command in every process, as a launcher starts the run."""
    distributed: DistributedConfig = dataclasses.field(
        default_factory=DistributedConfig
    )
    seconds: float = 180.0
    """Time limit in seconds of all checks of a host, and of each step of --together."""
    json: bool = False
    """Print only one JSON object."""
    all: bool = False
    """Also list ok and unknown checks."""

    def __post_init__(self) -> None:
        if self.hosts < 1:
            raise ValueError(f"--hosts must be at least 1, got {self.hosts}")
        if not 0 <= self.space_gb < float("inf"):
            raise ValueError(f"--space-gb must be at least 0, got {self.space_gb:g}")
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"--seconds must be positive, got {self.seconds:g}")
        for port in self.ports:
            if not 0 < port < 65_536:
                raise ValueError(f"--ports must be from 1 to 65535, got {port}")
        for address in self.connect:
            split_address(address, "--connect")
        if self.distributed != DistributedConfig() and not self.together:
            raise ValueError("--distributed flags need --together")


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    try:
        asked = flags.read(DoctorFlags, argv, prog="python -m mjax.doctor")
        checks = checks_of(asked)
        settings = _settings(asked, checks)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = checking.run(checks, settings, source_s=_SOURCE_S, total_s=asked.seconds)
    if asked.together:
        from mjax.doctor import together  # it imports jax

        return together.main(
            to_json(report),
            asked.distributed,
            hosts=asked.hosts,
            work_dir=Path(asked.work_dir),
            limit_s=asked.seconds,
            is_json=asked.json,
        )
    print(_printed(report, checks, asked))
    sys.stdout.flush()
    return 0 if report.is_ok else 1


def checks_of(asked: DoctorFlags) -> list[Check]:
    """Return the checks to run on this host, in display order."""
    mine = [
        *software.CHECKS,
        *network.checks(asked.hosts, asked.ports, asked.connect),
        *folders.checks(asked.work_dir, asked.hosts, asked.space_gb),
    ]
    if asked.hardware:
        mine += [_for_start(check) for check in CHECKS if not check.needs_idle]
    return mine


def _for_start(check: Check) -> Check:
    return dataclasses.replace(check, judge=check.judge_for_start or check.judge)


def _settings(asked: DoctorFlags, checks: Sequence[Check]) -> Settings:
    expect = {}
    if asked.expect is not None:
        expect = read_expected(Path(asked.expect), [check.name for check in checks])
    return Settings(limits=read_limits(None), expect=expect)


def _printed(report: Report, checks: Sequence[Check], asked: DoctorFlags) -> str:
    if asked.json:
        return json.dumps(to_json(report))
    known = {check.name: check for check in checks}
    return shown(report, is_all=asked.all, checks=known)
