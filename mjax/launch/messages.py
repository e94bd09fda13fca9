"""What driver, agents and people's commands say to each other: JSON lines over TCP.

Each line is one message, an object whose `type` says which. The first message of a
connection is a `Hello` or a `Command`; both carry the version of the protocol and the
token of the run. A reader accepts its own version and the one before. Fields that it
does not know are ignored; new ones have defaults.
"""

import asyncio
import hmac

import msgspec

from mjax.processes.progress import Phase

VERSION = 1
MAX_LINE_BYTES = 16 * 2**20
"""Of one message: the stacks of the ranks of a host are the largest."""


class Message(msgspec.Struct, kw_only=True, tag_field="type"):
    """What all messages are."""


BEAT_S = 1.0
"""Between heartbeats of a host."""


class Divergence(msgspec.Struct, kw_only=True, frozen=True):
    """Why a rank gave up: what the steps have made of its state."""

    step: int
    """Optimizer steps that the state has seen."""
    ways: dict[str, list[str]]
    """From steps that were saved to values of `--data.skip`, see `progress.Writer`."""


class Corruption(msgspec.Struct, kw_only=True, frozen=True):
    """Why a rank gave up: replicas of the state differ."""

    step: int
    processes: list[int]
    """Ranks whose devices hold other bits than most, or all that disagree."""
    is_sure: bool
    """Whether most replicas agree."""


class LastWords(msgspec.Struct, kw_only=True, frozen=True):
    """What a rank says of why it gave up; see `progress.Writer`."""

    diverged: Divergence | None = None
    corrupted: Corruption | None = None


class DeviceProgress(msgspec.Struct, kw_only=True):
    """How far a device is in a step that XLA has given up; see `thunks`."""

    device: int
    limit: str
    """Of a step, as XLA writes it: 20m."""
    completed: int = 0
    total: int = 0
    """Operations that were launched; 0 if XLA does not track them."""
    pending: list[str] = []
    """The first that are not done."""


class RankState(msgspec.Struct, kw_only=True, frozen=True):
    """A rank process, as its agent sees it."""

    rank: int
    generation: int
    pid: int
    code: int | None = None
    """As of `subprocess.Popen.returncode`; None while it runs."""
    ended_ns: int | None = None
    """By the clock of its host, since the epoch."""
    out_of_memory: bool = False
    """The kernel killed a process of this host for its memory meanwhile."""
    state: str = "?"
    """Letter of /proc/PID/stat: R runs, S sleeps, D waits for a disk, T is stopped."""
    phase: int = 0
    """Of `mjax.processes.progress.Phase`."""
    step: int = 0
    microstep: int = 0
    age_s: float = 0.0
    """Since its progress word was written, by the clock of its host."""
    step_s: float | None = None
    """Seconds a step lately took."""
    saved_step: int = -1
    start_step: int = -1
    """Steps that the state had seen when it began."""
    spent_s: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(Phase))
    """Seconds in each phase since it was to be started."""
    first_step_s: float | None = None
    """Seconds since then until its first step ended."""
    last_lines: str = ""
    """Of its log, once it has ended."""
    last_words: LastWords | None = None
    """Of a rank that has ended with 93."""
    devices: list[DeviceProgress] = []
    """Of a rank whose step XLA has given up."""


class Match(msgspec.Struct, kw_only=True, frozen=True):
    """A line of a log that matches one of `log_rules.RULES`."""

    rule: str
    line: str
    rank: int | None = None
    """In whose log; None: in the kernel's."""


class Hello(Message, tag="hello"):
    """An agent introduces itself, also when it comes back to a new driver."""

    version: int
    token: str
    host: str
    address: str
    """At which other hosts reach this one."""
    pid: int
    facts: dict[str, str]
    """Hardware and software of the host, for the journal."""
    ranks: list[RankState] = []


class Beat(Message, tag="beat"):
    """Heartbeat of a host, once a second and when a rank ends."""

    ranks: list[RankState]
    leaving: str = ""
    """Why the host is about to go; empty: it stays."""
    matches: list[Match] = []
    """Since the heartbeat before."""
    rdma_bytes: dict[str, list[int]] = {}
    """From device/port to bytes sent and received since the host was started."""


class Ports(Message, tag="ports"):
    """Ports of this host that were free a moment ago."""

    generation: int
    coordinator: int
    """At which one listens, if it was asked for; 0: it could not be started."""


class Stacks(Message, tag="stacks"):
    """Stacks of the ranks of a host; a rank that did not answer is absent."""

    generation: int
    stacks: dict[int, str]
    spied: dict[int, str] = {}
    """What py-spy says of those that did not answer, where it is installed."""
    nccl: str = ""
    """What NCCL's RAS service of the host says, if there is one."""


class RankSpec(msgspec.Struct, kw_only=True, frozen=True):
    """A rank process to start."""

    rank: int
    argv: list[str]
    environment: dict[str, str]
    """In addition to that of the agent."""
    folder: str
    """For its progress word, its stacks and its log."""


class Refused(Message, tag="refused"):
    """The driver does not take the agent or the command."""

    reason: str


class FindPorts(Message, tag="find_ports"):
    """Ask for ports for the ranks of a generation, and for their coordinator."""

    generation: int
    coordinator: list[str] = []
    """Its command, to which host:port is added; empty: rank 0 is the coordinator."""
    folder: str = ""
    """For its log."""
    timeout_s: float = 60.0
    """That the coordinator may take to listen."""


class Prepare(Message, tag="prepare"):
    """Import what ranks will need, so that they start warm."""

    module: str
    """That `python -m` names; empty: no longer."""


class Start(Message, tag="start"):
    """Start ranks. Those of older generations are killed before."""

    generation: int
    ranks: list[RankSpec]


class Signal(Message, tag="signal"):
    """Send a signal to all ranks of a generation and older ones."""

    generation: int
    number: int


class Dump(Message, tag="dump"):
    """Collect the stacks of the ranks of a generation."""

    generation: int


class Check(Message, tag="check"):
    """Run a command that says whether the host is healthy."""

    number: int
    command: list[str]
    timeout_s: float


class Checked(Message, tag="checked"):
    """What the command said."""

    number: int
    """Of the order."""
    is_healthy: bool
    text: str
    """Why it is not."""


class Quit(Message, tag="quit"):
    """End the agent; its ranks are killed first."""


class Command(Message, tag="command"):
    """A person asks for something, see `python -m mjax.launch --help`."""

    version: int
    token: str
    name: str
    host: str = ""
    reason: str = ""
    actor: str = ""
    flags: list[str] = []
    """Of the trainer, with other values than before."""


class Answer(Message, tag="answer"):
    """What a person is told."""

    text: str
    data: dict[str, object]


First = Hello | Command
"""What a connection to the driver begins with."""
FromAgent = Beat | Ports | Stacks | Checked
"""What an agent says after its hello."""
ToAgent = Refused | FindPorts | Prepare | Start | Signal | Dump | Check | Quit
"""What a driver says to an agent."""
ToPerson = Answer | Refused
"""What a driver says to a command."""

_encoder = msgspec.json.Encoder()


def encode(message: Message) -> bytes:
    """Return the line of a message."""
    return _encoder.encode(message) + b"\n"


async def receive[M](
    reader: asyncio.StreamReader, decoder: msgspec.json.Decoder[M]
) -> M:
    """Return the next message.

    Raises:
      EOFError: the connection has ended, or what came is no message.
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
        raise EOFError(f"no message of this protocol: {error}") from error


def has_token(given: str, expected: str) -> bool:
    """Compare tokens in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode(), expected.encode())


def version_problem(version: int) -> str | None:
    """Say why a peer of this version cannot be talked to; None if it can."""
    if VERSION - 1 <= version <= VERSION:
        return None
    return (
        f"protocol version {version}; this one speaks {VERSION} and reads "
        f"{VERSION - 1}; install the same version of mjax on all hosts"
    )
