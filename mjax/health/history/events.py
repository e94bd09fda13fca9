"""Events of a host: the rows of the history of hosts.

Enters: nothing. Leaves: the kinds of events, and what each says about a host: its
weight in the score, and whether the host must pass a burn before it is used again.
"""

import dataclasses
import enum
import hashlib

MAX_TEXT_CHARS = 2000
"""Of a text that is kept. Chosen: a failure may carry the last lines of a log."""


class Kind(enum.StrEnum):
    """Kind of an event."""

    CHECK_OK = "check_ok"
    CHECK_FAILED = "check_failed"
    FAULT = "fault"
    EVICTED = "evicted"
    RETURNED = "returned"
    BURN_PASSED = "burn_passed"
    BURN_FAILED = "burn_failed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meaning:
    """The meaning of an event for its host."""

    weight: float
    """Weight in the score; 0: it does not count."""
    must_burn: bool
    """Whether the host must pass a burn before it is used again."""
    reason: str
    """Why, for people."""


KINDS: dict[Kind, Meaning] = {
    Kind.CHECK_OK: Meaning(
        weight=0.0,
        must_burn=False,
        reason="a check finds only faults that it knows; the score decays with time",
    ),
    Kind.CHECK_FAILED: Meaning(
        weight=4.0, must_burn=True, reason="a check of this host alone found something"
    ),
    # Of a fault, its cause says more: see CAUSES.
    Kind.FAULT: Meaning(
        weight=1.0, must_burn=True, reason="a cause that is not known here"
    ),
    Kind.EVICTED: Meaning(
        weight=0.0, must_burn=True, reason="the fault before it is counted already"
    ),
    Kind.RETURNED: Meaning(
        weight=0.0, must_burn=False, reason="it says nothing about the hardware"
    ),
    Kind.BURN_PASSED: Meaning(
        weight=0.0,
        must_burn=False,
        reason="it lets the host come back; the score decays with time",
    ),
    Kind.BURN_FAILED: Meaning(
        weight=8.0, must_burn=True, reason="under load the hardware was at fault"
    ),
}

CAUSES: dict[str, Meaning] = {
    "GPU fault": Meaning(
        weight=8.0, must_burn=True, reason="hardware that has failed does so again"
    ),
    "host fault": Meaning(
        weight=8.0, must_burn=True, reason="hardware that has failed does so again"
    ),
    "replicas differ, most agree": Meaning(
        weight=8.0, must_burn=True, reason="what computes wrong once does so again"
    ),
    "host lost": Meaning(
        weight=4.0,
        must_burn=True,
        reason="power, kernel or network: which one is not known",
    ),
    "evicted by a person": Meaning(
        weight=4.0, must_burn=True, reason="a person knows more"
    ),
    "network error": Meaning(
        weight=3.0, must_burn=True, reason="its port, or the switch at the other end"
    ),
    "logged": Meaning(
        weight=2.0, must_burn=True, reason="the kernel or CUDA named the hardware"
    ),
    "hung": Meaning(
        weight=2.0, must_burn=False, reason="hardware or program; a check follows"
    ),
    "replicas differ": Meaning(
        weight=2.0, must_burn=False, reason="which replica is wrong is not known"
    ),
    "crashed": Meaning(
        weight=1.0, must_burn=False, reason="hardware or program; a check follows"
    ),
    "failed": Meaning(
        weight=0.25, must_burn=False, reason="mostly an error of the program"
    ),
    "killed": Meaning(
        weight=0.25, must_burn=False, reason="mostly somebody, not the host"
    ),
    "out of memory": Meaning(
        weight=0.25, must_burn=False, reason="mostly the program, or others beside it"
    ),
    "file system error": Meaning(
        weight=0.25, must_burn=False, reason="mostly the store, for all hosts at once"
    ),
}
"""From the cause of a fault to what it says. The weights are chosen, here and in KINDS:
8 if the hardware is named, half of that if only the host is named, 2 if host and
program are equally likely, and little for the rest, which only decides between hosts
that are otherwise equal. The names are those of the launcher."""

NOT_OF_HOSTS = frozenset({"done", "preempted", "gave up", "diverged", "bad input"})
"""Causes that are unrelated to the host."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostEvent:
    """Something that happened to a host."""

    host: str
    kind: Kind
    time_ns: int
    """Since the epoch; of a burn, its end."""
    text: str = ""
    cause: str = ""
    """Of a fault, as in CAUSES."""
    share: float = 1.0
    """Share of the blame: 1 / n if n hosts are blamed together."""
    started_ns: int | None = None
    """Of a burn: when it began; None: at `time_ns`."""
    run: str = ""
    """Run in which it happened; empty outside runs."""
    generation: int = 0
    """Of the run."""
    key: str = ""
    """Key that identifies the event; empty: all of the above."""

    def __post_init__(self) -> None:
        if not self.host or any(letter.isspace() for letter in self.host):
            raise ValueError(f"a host needs a name without spaces, got {self.host!r}")
        for name in ("host", "text", "cause", "run", "key"):
            try:
                getattr(self, name).encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{name} must be UTF-8, got {getattr(self, name)[:60]!r}"
                ) from error
        for name in ("time_ns", "generation"):
            if not 0 <= getattr(self, name) < 2**63:
                raise ValueError(
                    f"{name} must be 0 to 2^63 - 1, got {getattr(self, name)}"
                )
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share}")
        if self.started_ns is not None and self.started_ns > self.time_ns:
            raise ValueError(
                f"started_ns {self.started_ns} is after time_ns {self.time_ns}"
            )

    @property
    def meaning(self) -> Meaning:
        """What it says about its host."""
        if self.kind is Kind.FAULT and self.cause in CAUSES:
            return CAUSES[self.cause]
        return KINDS[self.kind]

    @property
    def weight(self) -> float:
        """In the score, without the decay."""
        return self.meaning.weight * self.share

    @property
    def identity(self) -> str:
        """The same for the same event, wherever it is read from."""
        parts = [self.run, str(self.generation), self.host, self.kind.value]
        parts += [self.key] if self.key else [str(self.time_ns), self.cause, self.text]
        # Lengths keep ("a", "bc") apart from ("ab", "c").
        whole = "".join(f"{len(part)}:{part}" for part in parts)
        return hashlib.sha256(whole.encode()).hexdigest()
