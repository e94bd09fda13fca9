"""The config of a launch: hosts, limits and restarts."""

import dataclasses
import shlex


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """Seconds without progress after which a rank counts as hung, for each phase.

    A step may also take `factor` times the 99th percentile of the recent steps.
    """

    import_s: float = 120.0
    """Limit for a rank to import its modules."""
    init_s: float = 330.0
    """Limit to join the other ranks; keep it above --distributed.timeout-s."""
    build_s: float = 1800.0
    """Limit to tokenize the data and trace the step."""
    compile_s: float = 3600.0
    """Limit to compile the step."""
    restore_s: float = 1800.0
    """Limit to restore or initialise the state."""
    first_step_s: float = 900.0
    """Limit of the first step of a generation, which connects all devices."""
    step_s: float = 30.0
    """Minimum limit of a step, however short the recent steps."""
    factor: float = 5.0
    """Limit of a step as a multiple of the 99th percentile of the recent steps."""
    eval_s: float = 300.0
    """Limit of each evaluation batch."""
    save_s: float = 630.0
    """Limit of a save; keep it above --ckpt.timeout-s."""
    sample_s: float = 600.0
    """Limit to generate the sample at the end."""
    exit_s: float = 60.0
    """Limit to exit; also the time that other ranks have to end after the first."""

    def __post_init__(self) -> None:
        _check_positive(self, "limits")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartConfig:
    """How a run is restarted."""

    max_fruitless: int = 3
    """Consecutive generations without a new saved step after which the run gives up."""
    pause_s: float = 1.0
    """Seconds to pause before a restart if the last generation saved no new step;
    doubled for each such generation in a row."""
    max_pause_s: float = 60.0
    """Longest pause before a restart, in seconds."""
    wait_s: float = 600.0
    """Seconds to wait for hosts before the run gives up."""
    shrink_s: float = 10.0
    """Seconds to wait for a spare before the run goes on with fewer hosts."""
    lost_s: float = 4.0
    """Seconds without a heartbeat after which a host is lost."""
    stacks_s: float = 3.0
    """Seconds that hung ranks have to write their stacks."""
    kill_s: float = 20.0
    """Seconds that killed ranks have to exit before their host counts as lost."""
    check_s: float = 120.0
    """Seconds that the check of a host may take, and seconds until it is repeated."""
    stop_s: float = 120.0
    """Seconds that ranks have to save and exit after SIGTERM."""
    rollback_saves: int = 1
    """Number of saves to go back when the run diverges; twice, three times as many if
    it diverges again before it has passed the step of the earlier divergence."""
    max_rollbacks: int = 3
    """Number of times that a diverged run goes back; after these it gives up."""
    warm: bool = True
    """Import the trainer in advance on each host, in a process that forks the ranks."""

    coordinator: bool = True
    """Run jax's coordinator in a process of its own, instead of in rank 0."""

    def __post_init__(self) -> None:
        if self.max_fruitless < 1:
            raise ValueError(
                "--restart.max-fruitless must be at least 1, got "
                f"{self.max_fruitless}; 1 gives up at the first failure without a new "
                "saved step"
            )
        _check_positive(self, "restart")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KubernetesConfig:
    """The pods of the agents. Without a namespace, the Kubernetes API is not used."""

    namespace: str | None = None
    """Namespace of the pods of the agents."""
    selector: str | None = None
    """Label selector for the pods of the agents of this run."""
    cordon: bool = False
    """Also cordon the node of an evicted host."""
    poll_s: float = 30.0
    """Seconds between complete lists of the pods, which are watched in between."""
    timeout_s: float = 10.0
    """Seconds that the API may take to answer."""

    def __post_init__(self) -> None:
        if self.namespace is None and (self.selector is not None or self.cordon):
            raise ValueError(
                "--kubernetes.selector and --kubernetes.cordon need "
                "--kubernetes.namespace"
            )
        if self.namespace is not None and not self.selector:
            raise ValueError(
                "--kubernetes.namespace needs --kubernetes.selector, the labels of the "
                "pods of the agents, for example jobset.sigs.k8s.io/jobset-name=mjax"
            )
        _check_positive(self, "kubernetes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run as its driver sees it: its hosts and how they are checked."""

    hosts: int = 1
    """Number of hosts that train."""
    spares: int = 0
    """Number of spare hosts."""
    min_hosts: int | None = None
    """Minimum number of hosts to continue on, with more microbatches, when no spare is
    left; None: --hosts."""
    ranks_per_host: int = 1
    """Trainer processes per host."""
    check_command: str = ""
    """Command that checks a suspect host: exit code 0 if it is healthy."""
    check_every_s: float | None = None
    """Seconds between checks of all training hosts; a host that does not pass is
    replaced after a save. None: only suspect hosts are checked."""
    return_command: str = ""
    """Command that is repeated on an excluded host until it passes; the host is then a
    spare again. Empty: --check-command. If given, hosts with failed hardware may
    return too."""
    history: str = ""
    """File that records the faults of hosts in all runs; the spare with the fewest
    faults is used first. Empty: no record; the first spare by name is used first."""
    limits: LimitsConfig = dataclasses.field(default_factory=LimitsConfig)
    restart: RestartConfig = dataclasses.field(default_factory=RestartConfig)

    def __post_init__(self) -> None:
        for name, least in (("hosts", 1), ("spares", 0), ("ranks_per_host", 1)):
            number = getattr(self, name)
            if number < least:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} must be at least {least}, got {number}")
        if self.min_hosts is not None and not 1 <= self.min_hosts <= self.hosts:
            raise ValueError(
                f"--min-hosts must be from 1 to --hosts {self.hosts}, got "
                f"{self.min_hosts}"
            )
        for name in ("check_command", "return_command"):
            command, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            try:
                shlex.split(command)
            except ValueError as error:
                raise ValueError(
                    f"{flag} {command!r} is not a command: {error}"
                ) from error
        if self.check_every_s is not None:
            if not 0 < self.check_every_s < float("inf"):
                raise ValueError(
                    "--check-every-s must be positive and finite, got "
                    f"{self.check_every_s}"
                )
            if not self.check_command:
                raise ValueError(
                    "--check-every-s needs --check-command, for example "
                    "'python -m mjax.health check --json --in-use'"
                )


def _check_positive(
    config: "LimitsConfig | RestartConfig | KubernetesConfig", group: str
) -> None:
    """Refuse numbers that are not positive and finite.

    Raises:
      ValueError: a number is not positive, or not finite.
    """
    for field in dataclasses.fields(config):
        number = getattr(config, field.name)
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        if not 0 < number < float("inf"):
            flag = f"--{group}.{field.name.replace('_', '-')}"
            raise ValueError(f"{flag} must be positive and finite, got {number}")
