"""What a launch is told: hosts, limits, and how often it tries."""

import dataclasses
import shlex


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitsConfig:
    """Seconds without progress after which a rank hangs, by phase.

    A step may also take `factor` times the 99th percentile of the steps before.
    """

    import_s: float = 120.0
    """From its start until a rank has imported its modules."""
    init_s: float = 330.0
    """To meet the other ranks; longer than the trainer's --distributed.timeout-s."""
    build_s: float = 1800.0
    """To tokenize the data and trace the step."""
    compile_s: float = 3600.0
    """To compile the step."""
    restore_s: float = 1800.0
    """To restore or draw the state."""
    first_step_s: float = 900.0
    """For the first step of a generation, which connects all devices, until it ends."""
    step_s: float = 30.0
    """At least, for a step."""
    factor: float = 5.0
    """Of the 99th percentile of the steps lately taken."""
    eval_s: float = 300.0
    """For a batch of an evaluation."""
    save_s: float = 630.0
    """To save; longer than the trainer's --ckpt.timeout-s."""
    sample_s: float = 600.0
    """For the sample at the end."""
    exit_s: float = 60.0
    """To end, and for the other ranks once one has ended."""

    def __post_init__(self) -> None:
        _check_positive(self, "limits")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartConfig:
    """How a run is started again."""

    max_fruitless: int = 3
    """Generations in a row without a new saved step after which the run gives up."""
    pause_s: float = 1.0
    """Before the first restart without a new saved step; doubled for each further."""
    max_pause_s: float = 60.0
    """The longest pause."""
    wait_s: float = 600.0
    """Seconds to wait for hosts before the run gives up."""
    shrink_s: float = 10.0
    """Seconds to wait for a spare before a run goes on with fewer hosts."""
    lost_s: float = 4.0
    """Seconds without a heartbeat after which a host is lost."""
    stacks_s: float = 3.0
    """Seconds that hanging ranks have to show their stacks."""
    kill_s: float = 20.0
    """Seconds that killed ranks have to end before their host counts as lost."""
    check_s: float = 120.0
    """Seconds that the check of a host may take; the pause before it is repeated."""
    stop_s: float = 120.0
    """Seconds that ranks have to save and end after SIGTERM."""
    rollback_saves: int = 1
    """Saves to go back when the run diverges; again as many if it does so again."""
    max_rollbacks: int = 3
    """End the run when it diverges more often."""
    warm: bool = True
    """Import the trainer ahead on each host, in a process that forks the ranks."""

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
    """Which pods run the agents; without a namespace the API is not used."""

    namespace: str | None = None
    """Of the pods of the agents."""
    selector: str | None = None
    """Label selector of the pods of the agents of this run."""
    cordon: bool = False
    """Also cordon the node of a host that is evicted."""
    poll_s: float = 30.0
    """Seconds between complete lists of the pods; in between they are watched."""
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
    """A run as its driver sees it: so many hosts, and the trainer's flags."""

    hosts: int = 1
    """Hosts that train."""
    spares: int = 0
    """Hosts that wait to replace one."""
    min_hosts: int | None = None
    """Go on with as few when no spare is left, with more microbatches; None: hosts."""
    ranks_per_host: int = 1
    """Processes of the trainer on each host."""
    check_command: str = ""
    """Run on a host that may be broken: exit code 0 if it is healthy."""
    check_every_s: float | None = None
    """Run it on all hosts that train, too; one that does not pass is replaced after a
    save. None: only where something has failed."""
    return_command: str = ""
    """Run on a host that was put aside, until it passes and is a spare again; empty:
    check_command. With it hosts whose hardware has failed may return, too."""
    history: str = ""
    """File with the faults of hosts in all runs; of the spares the one with the fewest
    is taken. Empty: the first by name."""
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
                    f"{flag} {command!r} is no command: {error}"
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
    """Refuse what is no time.

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
