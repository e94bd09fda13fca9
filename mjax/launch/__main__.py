"""Launch a run that recovers from failures: `python -m mjax.launch -- <train's flags>`.

Without a command, everything runs on this machine, with simulated hosts (`--hosts`).
See docs/resilience.md.
"""

if __name__ == "__main__":
    from mjax.cli import environment

    environment.check(["msgspec"])  # before the imports of packages

import asyncio
import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mjax.cli import flags, interrupts
from mjax.launch import client, elastic, kubernetes, local, slurm
from mjax.launch.agent import Agent
from mjax.launch.config import KubernetesConfig, RunConfig
from mjax.launch.driver import TRAINER, Driver
from mjax.launch.first_error import describe, first_error
from mjax.launch.journal import read_ending, read_events
from mjax.launch.messages import Answer
from mjax.processes.config import split_address
from mjax.processes.lock import driving

_PROG = "python -m mjax.launch"
_OWN_FLAGS = (
    "--distributed.coordinator",
    "--distributed.num-processes",
    "--distributed.process-id",
    "--distributed.serves",
    "--distributed.no-serves",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriverFlags(RunConfig):
    """Drive a run whose agents are started elsewhere."""

    bind: str = "0.0.0.0:0"
    """Address and port to listen on; port 0: the previous port, or any free one."""
    token_file: Path
    """File of mode 0600 with a long random word, the same on all hosts."""
    kubernetes: KubernetesConfig = dataclasses.field(default_factory=KubernetesConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentFlags:
    """Run the ranks of this host under a driver."""

    driver: str
    """host:port of the driver."""
    token_file: Path
    """File of mode 0600 with the token of the run."""
    host: str = dataclasses.field(
        default_factory=lambda: os.environ.get("SLURMD_NODENAME", socket.gethostname())
    )
    """Name of this host in the run."""
    address: str | None = None
    """Address at which other hosts reach this one; absent: its host name."""
    orphan_s: float = 3600.0
    """Seconds without a driver after which the agent stops its ranks and exits."""
    log_mib: float = 256.0
    """Size in MiB at which a rank's log is rotated; one old log is kept."""

    def __post_init__(self) -> None:
        if not 0 < self.log_mib < float("inf"):
            raise ValueError(f"--log-mib must be positive, got {self.log_mib:g}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Send a command to a run."""

    work_dir: Path
    """Work dir of the run."""
    driver: str | None = None
    """host:port of its driver; absent: read from the work dir."""
    token_file: Path | None = None
    """File with the token of the run; absent: launch/token in the work dir."""
    json: bool = False
    """Print one JSON object and nothing else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvictFlags(RunFlags):
    """Take a host out of a run."""

    host: str
    """Name of the host."""
    reason: str
    """Reason, recorded in the journal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstErrorFlags(RunFlags):
    """Show which rank failed first and which failures follow from it."""

    generation: int | None = None
    """Generation that failed; absent: the last one that failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrainFlags(EvictFlags):
    """Take a host out of a run after a save."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateFlags(RunFlags):
    """Let a run save and restart with new code and the flags after `--`."""

    reason: str
    """Reason, recorded in the journal."""
    check_s: float = 120.0
    """Seconds that the trainer may take to check the flags."""


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code of the run, or 2 after bad input."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if words and words[0] in COMMANDS:
            return COMMANDS[words[0]](words[1:])
        if words and not words[0].startswith("-"):
            raise ValueError(
                f"unknown command {words[0]}; the nearest is "
                f"{flags.nearest(words[0], COMMANDS)}"
            )
        return _local(words)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _local(words: list[str]) -> int:
    own, train = _split(words)
    lines = {name: _summary(command) for name, command in COMMANDS.items()}
    config: RunConfig = _read(RunConfig, own, "", __doc__ or "", lines)
    train, work_dir = _train_flags(train)
    _ask_trainer(config, train, work_dir)
    return asyncio.run(local.run(config, train, work_dir))


def _summary(command: Callable[[list[str]], int]) -> str:
    """Return the first line of the docstring of a command."""
    return (command.__doc__ or "").partition("\n")[0]


def _slurm(words: list[str]) -> int:
    """Run on the nodes of a Slurm allocation."""
    own, train = _split(words)
    config: RunConfig = _read(RunConfig, own, " slurm")
    train, work_dir = _train_flags(train)
    _ask_trainer(config, train, work_dir)
    return asyncio.run(slurm.run(config, train, work_dir))


def _driver(words: list[str]) -> int:
    """Run the driver: one process per run, started by hand or in Kubernetes."""
    own, train = _split(words)
    config: DriverFlags = _read(DriverFlags, own, " driver")
    train, work_dir = _train_flags(train)
    has_pods = config.kubernetes.namespace is not None
    bind = split_address(config.bind, "--bind", least_port=0)
    api = kubernetes.connect(config.kubernetes) if has_pods else None
    with driving(work_dir):  # after the checks of the flags, since it makes a folder
        driver = Driver(
            config,
            train,
            work_dir=work_dir,
            token=client.read_token(config.token_file),
            bind=bind,
            api=api,
        )
        return asyncio.run(driver.run())


def _agent(words: list[str]) -> int:
    """Run the agent of a host, which starts and watches its ranks."""
    config: AgentFlags = _read(AgentFlags, words, " agent")
    agent = Agent(
        driver=split_address(config.driver, "--driver"),
        token=client.read_token(config.token_file),
        host=config.host,
        address=config.address or socket.gethostname(),
        orphan_s=config.orphan_s,
        log_bytes=int(config.log_mib * 2**20),
    )
    return asyncio.run(agent.run())


def _status(words: list[str]) -> int:
    """Print the hosts, the ranks and the phase of a run, or how it ended."""
    config: RunFlags = _read(RunFlags, words, " status")
    ending = read_ending(config.work_dir) if config.driver is None else None
    if ending is None:
        return _ask(config, "status")
    facts = {"state": "ended", **dataclasses.asdict(ending)}
    print(json.dumps(facts) if config.json else f"{config.work_dir}: {ending}")
    return 0


def _stop(words: list[str]) -> int:
    """Save and end a run."""
    return _ask(_read(RunFlags, words, " stop"), "stop")


def _evict(words: list[str]) -> int:
    """Take a host out of a run."""
    config: EvictFlags = _read(EvictFlags, words, " evict")
    return _ask(config, "evict", host=config.host, reason=config.reason)


def _drain(words: list[str]) -> int:
    """Take a host out of a run after a save."""
    config: DrainFlags = _read(DrainFlags, words, " drain")
    return _ask(config, "drain", host=config.host, reason=config.reason)


def _update(words: list[str]) -> int:
    """Save a run and restart it with other flags, which are checked first."""
    own, train = _split(words) if "--" in words else (words, [])
    config: UpdateFlags = _read(UpdateFlags, own, " update")
    _check_train_flags(train)
    if flags.given(train, "--work-dir") is not None:
        raise ValueError("--work-dir cannot change in an update; leave it out after --")
    status: Any = _answer(config, "status").data
    command = [
        *status["trainer"],
        *flags.with_flags(status["flags"], flags.values(train)),
    ]
    elastic.trainer_config(command, config.check_s)
    return _ask(config, "update", reason=config.reason, flags=train)


def _journal(words: list[str]) -> int:
    """Print the events of a run. Needs no driver."""
    config: RunFlags = _read(RunFlags, words, " journal")
    events = read_events(config.work_dir)
    if config.json:
        print(json.dumps({"events": events}))
        return 0
    for event in events:
        when = time.strftime("%H:%M:%S", time.localtime(event["time_ns"] / 1e9))
        print(f"{when}  {event['generation']:>3}  {event['kind']:<10}  {event['text']}")
    return 0


def _first_error(words: list[str]) -> int:
    """Print why a generation failed. Needs no driver."""
    config: FirstErrorFlags = _read(FirstErrorFlags, words, " first-error")
    found = first_error(read_events(config.work_dir), config.generation)
    print(json.dumps(found) if config.json else describe(found))
    return 0


def _ask(config: RunFlags, name: str, **facts: Any) -> int:
    """Send a command to the driver, print the answer, and return the exit code."""
    answer = _answer(config, name, **facts)
    print(json.dumps(answer.data) if config.json else answer.text)
    return 0


def _answer(config: RunFlags, name: str, **facts: Any) -> Answer:
    return client.ask(
        config.work_dir,
        name,
        driver=split_address(config.driver, "--driver") if config.driver else None,
        token_file=config.token_file,
        **facts,
    )


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the launch's flags, and the trainer's flags, which follow `--`."""
    if "--" not in words:
        if {"-h", "--help"} & set(words):
            return words, []
        raise ValueError(
            f"the trainer's flags are missing; write {_PROG} --hosts 2 -- --recipe "
            "debug --work-dir runs/a"
        )
    cut = words.index("--")
    return words[:cut], words[cut + 1 :]


def _train_flags(words: list[str]) -> tuple[list[str], Path]:
    """Check the trainer's flags; return them with --work-dir, and the work dir."""
    _check_train_flags(words)
    work_dir = flags.given(words, "--work-dir")
    if not work_dir:
        work_dir = f"runs/launch-{time.strftime('%Y%m%d-%H%M%S')}"
        words = [*words, "--work-dir", work_dir]
    if "://" in work_dir:
        raise ValueError(f"--work-dir must be a folder, got the URL {work_dir}")
    return words, Path(work_dir)


def _ask_trainer(config: RunConfig, words: list[str], work_dir: Path) -> None:
    """Let the trainer refuse its flags before any rank starts, with its own message.

    An unfinished run is left alone: it continues with the flags in its journal, which
    an update may have changed. So is `driver`, which may run on a host without the
    files that the flags name.

    Raises:
      ValueError: the trainer refuses a flag, or, with simulated devices, a model or a
        batch that does not fit them.
    """
    try:
        is_unfinished = read_ending(work_dir) is None
    except ValueError:  # no launch has run there
        is_unfinished = False
    if not is_unfinished:
        rank = elastic.of_one_rank(config.hosts * config.ranks_per_host)
        elastic.trainer_config([*TRAINER, *words, *rank], config.limits.import_s)


def _check_train_flags(words: list[str]) -> None:
    """Refuse trainer flags that a launch cannot pass on.

    Raises:
      ValueError: a flag is one that the launch sets, or that restarts cannot repeat.
    """
    if {"-h", "--help"} & {*words}:
        raise ValueError(
            "-h after -- would start a run; for the trainer's flags, run python -m "
            "mjax.train -h"
        )
    for flag in _OWN_FLAGS:
        if flags.given(words, flag) is not None:
            raise ValueError(f"{flag} is set by the launch; leave it out")
    if flags.given(words, "--restart-from-scratch") is not None:
        raise ValueError(
            "--restart-from-scratch would discard the run at every restart; give "
            "another --work-dir, or move the old work dir aside"
        )


def _read(
    cls: Any,
    words: list[str],
    command: str,
    description: str = "",
    commands: Mapping[str, str] | None = None,
) -> Any:
    return flags.read(
        cls,
        words,
        prog=_PROG + command,
        guide=flags.Guide(description=description, commands=commands or {}),
    )


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "driver": _driver,
    "agent": _agent,
    "slurm": _slurm,
    "status": _status,
    "evict": _evict,
    "drain": _drain,
    "update": _update,
    "stop": _stop,
    "journal": _journal,
    "first-error": _first_error,
}
"""First word -> command. Without a command, the run is on this machine."""


if __name__ == "__main__":
    code = interrupts.with_cleanup(main)
    try:
        sys.stdout.flush()
    except OSError:  # the exit code counts, not a full disk
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    sys.exit(code)
