"""How the processes of a run find each other."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How processes find each other. Default: through the launcher, or one process."""

    coordinator: str | None = None
    """Address host:port of process 0, or of a separate coordinator."""
    num_processes: int | None = None
    """Number of processes in the run; 1 without the other flags ignores the
    launcher."""
    process_id: int | None = None
    """Index of this process, from 0."""
    serves: bool = True
    """Whether process 0 is the coordinator; otherwise `mjax.processes.coordinator` runs
    at the address."""
    timeout_s: int = 300
    """Seconds to wait until all processes have connected."""

    def __post_init__(self) -> None:
        if self.timeout_s < 1:
            raise ValueError(
                f"--distributed.timeout-s must be at least 1, got {self.timeout_s}"
            )
        if self.coordinator is not None:
            split_address(self.coordinator)
        if self.num_processes is not None and self.num_processes < 1:
            raise ValueError(
                "--distributed.num-processes must be at least 1, got "
                f"{self.num_processes}"
            )
        if self.process_id is not None and self.process_id < 0:
            raise ValueError(
                f"--distributed.process-id must be at least 0, got {self.process_id}"
            )
        flags = {
            "--distributed.coordinator": self.coordinator,
            "--distributed.num-processes": self.num_processes,
            "--distributed.process-id": self.process_id,
        }
        missing = [flag for flag, value in flags.items() if value is None]
        given = [
            f"{flag} {value}" for flag, value in flags.items() if value is not None
        ]
        if given and missing and given != ["--distributed.num-processes 1"]:
            raise ValueError(
                f"got {' '.join(given)} without {' and '.join(missing)}; give all "
                "three, or none to use the launcher's environment"
            )
        if not self.serves and self.coordinator is None:
            raise ValueError(
                "--distributed.no-serves needs --distributed.coordinator, the address "
                "of the separate coordinator"
            )
        if self.process_id is None or self.num_processes is None:
            return
        if self.process_id >= self.num_processes:
            raise ValueError(
                "--distributed.process-id must be below --distributed.num-processes "
                f"{self.num_processes}, got {self.process_id}"
            )


def may_have_others(config: DistributedConfig, environment: Mapping[str, str]) -> bool:
    """Return whether a run may have other processes, decided without JAX.

    Args:
      config: the flags.
      environment: environment variables of the process.
    """
    if config.num_processes is not None:
        return config.num_processes > 1
    launchers = ("SLURM_", "OMPI_", "JOB_COMPLETION_INDEX")
    return any(name.startswith(launchers) for name in environment)


def split_address(
    address: str, flag: str = "--distributed.coordinator", *, least_port: int = 1
) -> tuple[str, int]:
    """Split host:port; an IPv6 host needs brackets.

    Raises:
      ValueError: it is not an address; the message names `flag`.
    """
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and least_port <= int(port) < 65536
    if not host or not is_port or (":" in host and not host.startswith("[")):
        raise ValueError(
            f"{flag} must be host:port with a port from {least_port} to 65535, "
            f"got {address!r}; for example 10.0.0.1:12355"
        )
    return host.strip("[]"), int(port)
