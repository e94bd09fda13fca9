"""What a launch is told: hosts, limits, and how often it tries."""

import dataclasses


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
    first_step_s: float = 300.0
    """For the first step of a generation."""
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
    lost_s: float = 4.0
    """Seconds without a heartbeat after which a host is lost."""
    stacks_s: float = 3.0
    """Seconds that hanging ranks have to show their stacks."""
    kill_s: float = 20.0
    """Seconds that killed ranks have to end before their host counts as lost."""
    stop_s: float = 120.0
    """Seconds that ranks have to save and end after SIGTERM."""
    warm: bool = True
    """Import the trainer ahead on each host, in a process that forks the ranks."""

    def __post_init__(self) -> None:
        if self.max_fruitless < 1:
            raise ValueError(
                "--restart.max-fruitless must be at least 1, got "
                f"{self.max_fruitless}; 1 gives up at the first failure without a new "
                "saved step"
            )
        _check_positive(self, "restart")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run as its driver sees it: so many hosts, and the trainer's flags."""

    hosts: int = 1
    """Hosts that train."""
    spares: int = 0
    """Hosts that wait to replace one."""
    ranks_per_host: int = 1
    """Processes of the trainer on each host."""
    limits: LimitsConfig = dataclasses.field(default_factory=LimitsConfig)
    restart: RestartConfig = dataclasses.field(default_factory=RestartConfig)

    def __post_init__(self) -> None:
        for name, least in (("hosts", 1), ("spares", 0), ("ranks_per_host", 1)):
            number = getattr(self, name)
            if number < least:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} must be at least {least}, got {number}")

    @property
    def num_ranks(self) -> int:
        """Processes of the trainer on all hosts."""
        return self.hosts * self.ranks_per_host


def _check_positive(config: "LimitsConfig | RestartConfig", group: str) -> None:
    """Refuse what is no time.

    Raises:
      ValueError: a field is not positive, or not finite.
    """
    for field in dataclasses.fields(config):
        number = getattr(config, field.name)
        if isinstance(number, bool):
            continue
        if not 0 < number < float("inf"):
            flag = f"--{group}.{field.name.replace('_', '-')}"
            raise ValueError(f"{flag} must be positive and finite, got {number}")
