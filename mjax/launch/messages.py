"""Messages between driver, agents and users' commands, as JSON lines over TCP.

Each line is one message, an object whose `type` names its kind. The first message of a
connection is a `Hello` or a `Command`; both carry the version of the protocol and the
token of the run. A reader accepts its own version and the previous one. It ignores
unknown fields, and new fields have defaults.
"""

import asyncio
import hmac
import re
from typing import Any

import msgspec

from mjax import printable
from mjax.processes.progress import Phase

VERSION = 2
MAX_LINE_BYTES = 16 * 2**20
"""Size limit of a message. The largest message holds the stacks of a host's ranks."""


class Message(msgspec.Struct, kw_only=True, tag_field="type"):
    """Base class of all messages."""


BEAT_S = 1.0
"""Seconds between two heartbeats of a host."""


class Divergence(msgspec.Struct, kw_only=True, frozen=True):
    """Report of a rank that gave up because its state has diverged."""

    step: int
    """Number of optimizer steps of the state."""
    ways: dict[str, list[str]]
    """Saved step -> values of `--data.skip` to resume from it, see
    `progress.Writer`."""


class Corruption(msgspec.Struct, kw_only=True, frozen=True):
    """Report of a rank that gave up because replicas of the state differ."""

    step: int
    processes: list[int]
    """Ranks that differ from the majority; without a majority, all that disagree."""
    is_sure: bool
    """Whether a majority of the replicas agrees."""


class LastWords(msgspec.Struct, kw_only=True, frozen=True):
    """A rank's reason for giving up, see `progress.Writer`."""

    diverged: Divergence | None = None
    corrupted: Corruption | None = None


class DeviceProgress(msgspec.Struct, kw_only=True):
    """Progress of a device in a step that XLA has aborted; see `thunks`."""

    device: int
    program: str
    """Name of the compiled program that the device runs, such as jit_train_step."""
    limit: str
    """Time limit of a step in XLA's format, such as 20m."""
    completed: int = 0
    total: int = 0
    """Number of operations that were launched; 0 if XLA does not track them."""
    pending: list[str] = []
    """Names of the first unfinished operations."""


class RankState(msgspec.Struct, kw_only=True, frozen=True):
    """State of a rank process, as its agent reports it."""

    rank: int
    generation: int
    pid: int
    code: int | None = None
    """Exit code, as in `subprocess.Popen.returncode`; None while the rank runs."""
    ended_ns: int | None = None
    """End of the process in nanoseconds since the epoch, by the clock of its host."""
    out_of_memory: bool = False
    """Whether the kernel's OOM killer ended a process of this host while the rank
    ran."""
    state: str = "?"
    """State letter of /proc/PID/stat: R runs, S sleeps, D waits for a disk, T is
    stopped."""
    phase: int = 0
    """Value of `mjax.processes.progress.Phase`."""
    step: int = 0
    microstep: int = 0
    age_s: float = 0.0
    """Seconds since the rank wrote its progress word, by its host's clock."""
    step_s: float | None = None
    """Duration of a recent step in seconds; None before the first."""
    saved_step: int = -1
    start_step: int = -1
    """Number of optimizer steps of the state at the rank's start; -1 if unknown."""
    spent_s: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(Phase))
    """Seconds in each `Phase` since the rank's start was requested."""
    first_step_s: float | None = None
    """Seconds from the rank's start request to the end of its first step; None until
    then."""
    last_lines: str = ""
    """Last lines of the rank's log, once it has ended."""
    last_words: LastWords | None = None
    """Reason for giving up, for exit code 93; otherwise None."""
    devices: list[DeviceProgress] = []
    """Progress of the rank's devices, if XLA has aborted its step."""


class Match(msgspec.Struct, kw_only=True, frozen=True):
    """A line of a rank's or the kernel's log that matches a rule of `log_rules`."""

    rule: str
    line: str
    rank: int | None = None
    """Rank whose log has the line; None for the kernel's log."""


class Hello(Message, tag="hello"):
    """First message of an agent on every connection."""

    version: int
    token: str
    host: str
    address: str
    """Address at which other hosts reach this host."""
    pid: int
    facts: dict[str, str]
    """Name -> text about hardware and software of the host, for the journal."""
    ranks: list[RankState] = []
    id: str = ""
    """Random word of the agent process; "" before version 2. In containers many agents
    have the same pid."""


class Beat(Message, tag="beat"):
    """Heartbeat of a host, sent every second and when a rank ends."""

    ranks: list[RankState]
    leaving: str = ""
    """Why the host is about to leave; "" if it stays."""
    matches: list[Match] = []
    """Matches of log rules since the previous heartbeat."""
    rdma_bytes: dict[str, list[int]] = {}
    """Device/port -> [bytes sent, bytes received] since the host started."""


class Ports(Message, tag="ports"):
    """Answer to `FindPorts`."""

    generation: int
    coordinator: int
    """Port that was free a moment ago; if the coordinator was requested, the port on
    which it listens, or 0 if it could not start."""


class Stacks(Message, tag="stacks"):
    """Stacks of the ranks of a host that answered."""

    generation: int
    stacks: dict[int, str]
    spied: dict[int, str] = {}
    """Rank -> output of py-spy, if installed, for ranks that did not answer."""
    nccl: str = ""
    """Report of NCCL's RAS service of the host; "" if there is none."""


class RankSpec(msgspec.Struct, kw_only=True, frozen=True):
    """Description of a rank process to start."""

    rank: int
    argv: list[str]
    environment: dict[str, str]
    """Environment variables to add to those of the agent."""
    folder: str
    """Folder for the rank's progress word, stacks and log."""


class Refused(Message, tag="refused"):
    """The driver refuses the agent or the command."""

    reason: str


class FindPorts(Message, tag="find_ports"):
    """Request a port for the coordinator of a generation."""

    generation: int
    coordinator: list[str] = []
    """Command of the coordinator, without host:port; empty if rank 0 coordinates."""
    folder: str = ""
    """Folder for the coordinator's log."""
    timeout_s: float = 60.0
    """Time limit for the coordinator to listen, in seconds."""


class Prepare(Message, tag="prepare"):
    """Import a module in advance, so ranks start warm."""

    module: str
    """Module, as for `python -m`; "" ends the fork server."""


class Start(Message, tag="start"):
    """Start ranks, after killing those of older generations."""

    generation: int
    ranks: list[RankSpec]


class Signal(Message, tag="signal"):
    """Send a signal to all ranks of this and older generations."""

    generation: int
    number: int


class Dump(Message, tag="dump"):
    """Collect the stacks of the ranks of a generation."""

    generation: int


class Check(Message, tag="check"):
    """Run a command that checks whether the host is healthy."""

    number: int
    command: list[str]
    timeout_s: float


class Checked(Message, tag="checked"):
    """Result of the check command."""

    number: int
    """Number of the `Check` that this answers."""
    is_healthy: bool
    text: str
    """Reasons why the host is not healthy; may be empty if it is."""


class Quit(Message, tag="quit"):
    """End the agent; its ranks are killed first."""


class Command(Message, tag="command"):
    """A user's command, see `python -m mjax.launch --help`."""

    version: int
    token: str
    name: str
    host: str = ""
    reason: str = ""
    actor: str = ""
    flags: list[str] = []
    """Trainer flags with new values."""


class Answer(Message, tag="answer"):
    """Answer to a user's command."""

    text: str
    data: dict[str, object]


First = Hello | Command
"""First message of a connection to the driver."""
FromAgent = Beat | Ports | Stacks | Checked
"""Later messages of an agent."""
ToAgent = Refused | FindPorts | Prepare | Start | Signal | Dump | Check | Quit
"""Messages of a driver to an agent."""
ToPerson = Answer | Refused
"""Messages of a driver to a command."""

_CLEAN = re.compile(rb'(?:[^\x00-\x1f\x7f-\xff\\]|\\["\\/])*')
"""A line of JSON that surely has no character to escape."""
_EXACT = {"token", "flags"}
"""Fields whose values are used as they are."""
_ONE_LINE = {"host", "address", "leaving", "reason", "actor", "line"}
_encoder = msgspec.json.Encoder()


def encode(message: Message) -> bytes:
    """Return a message as a line of JSON."""
    return _encoder.encode(message) + b"\n"


def decode[M](decoder: msgspec.json.Decoder[M], line: bytes) -> M:
    """Return a message to the driver, whose texts others have written.

    Characters that a terminal interprets are escaped, so that the driver can print,
    log and store names, reasons and lines.

    Raises:
      msgspec.DecodeError: the line is not a message of these types.
    """
    try:
        if _CLEAN.fullmatch(line):
            return decoder.decode(line)
        value = _escaped(msgspec.json.decode(line))
        return msgspec.convert(value, decoder.type, str_keys=True)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from None


def _escaped(value: Any, kept: str = "\t\n") -> Any:
    match value:
        case str():
            return printable(value, kept)
        case list():
            return [_escaped(one) for one in value]
        case dict():
            return {
                printable(name, ""): one
                if name in _EXACT
                else _escaped(one, "" if name in _ONE_LINE else kept)
                for name, one in value.items()
            }
    return value


async def receive[M](
    reader: asyncio.StreamReader, decoder: msgspec.json.Decoder[M]
) -> M:
    """Return the next message of a connection.

    Raises:
      EOFError: the connection has ended, or received an invalid message.
    """
    try:
        line = await reader.readline()
    except ValueError as error:
        raise EOFError(f"a line of more than {MAX_LINE_BYTES} bytes") from error
    if not line.endswith(b"\n"):
        raise EOFError("the connection ended")
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        raise EOFError(f"not a message of this protocol: {error}") from error


def has_token(given: str, expected: str) -> bool:
    """Return whether two tokens are equal, in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())


def version_problem(version: int) -> str | None:
    """Return why a protocol version is not supported; None if it is."""
    if VERSION - 1 <= version <= VERSION:
        return None
    return (
        f"protocol version {version} is not supported, only {VERSION - 1} and "
        f"{VERSION}; install the same version of mjax on all hosts"
    )
