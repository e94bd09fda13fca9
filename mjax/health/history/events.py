"""Events of a host, which are the rows of the history.

Defines the kinds of events and their meaning for a host: the weight in the score, and
whether the host must pass a burn before it is used again.
"""

import dataclasses
import enum
import hashlib

MAX_TEXT_CHARS = 2000
"""Maximum length of a stored text. A failure may contain the last lines of a log."""


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
    """Weight in the score; 0: no effect."""
    must_burn: bool
    """Whether the host must pass a burn before it is used again."""
    reason: str
    """The reason, for a person."""


KINDS: dict[Kind, Meaning] = {
    Kind.CHECK_OK: Meaning(
        weight=0.0,
        must_burn=False,
        reason="a check finds only known faults; the score decays with time",
    ),
    Kind.CHECK_FAILED: Meaning(
        weight=4.0, must_burn=True, reason="a check of this host alone found a fault"
    ),
    # The meaning of a fault depends on its cause: see CAUSES.
    Kind.FAULT: Meaning(
        weight=1.0, must_burn=True, reason="the cause is not in CAUSES"
    ),
    Kind.EVICTED: Meaning(
        weight=0.0, must_burn=True, reason="the preceding fault is already counted"
    ),
    Kind.RETURNED: Meaning(
        weight=0.0, must_burn=False, reason="no information about the hardware"
    ),
    Kind.BURN_PASSED: Meaning(
        weight=0.0,
        must_burn=False,
        reason="the host may be used again; the score decays with time",
    ),
    Kind.BURN_FAILED: Meaning(
        weight=8.0, must_burn=True, reason="the hardware failed under load"
    ),
}

CAUSES: dict[str, Meaning] = {
    "GPU fault": Meaning(
        weight=8.0, must_burn=True, reason="hardware that has failed will fail again"
    ),
    "host fault": Meaning(
        weight=8.0, must_burn=True, reason="hardware that has failed will fail again"
    ),
    "replicas differ, most agree": Meaning(
        weight=8.0,
        must_burn=True,
        reason="a host that computed wrong results will do so again",
    ),
    "host lost": Meaning(
        weight=4.0,
        must_burn=True,
        reason="power, kernel or network; the cause is unknown",
    ),
    "evicted by a person": Meaning(
        weight=4.0, must_burn=True, reason="a person had a reason"
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
        weight=2.0, must_burn=False, reason="the wrong replica is unknown"
    ),
    "crashed": Meaning(
        weight=1.0, must_burn=False, reason="hardware or program; a check follows"
    ),
    "failed": Meaning(
        weight=0.25, must_burn=False, reason="usually a bug in the program"
    ),
    "killed": Meaning(
        weight=0.25, must_burn=False, reason="usually killed by a user, not by the host"
    ),
    "out of memory": Meaning(
        weight=0.25,
        must_burn=False,
        reason="usually this program, or another on the host",
    ),
    "file system error": Meaning(
        weight=0.25, must_burn=False, reason="usually the storage, for all hosts"
    ),
}
"""Maps the cause of a fault, as named by the launcher, to its meaning. The weights here
and in KINDS are not measured: 8 if the hardware is named, half of that if only
the host is named, 2 if host and program are equally likely, and small values for the
rest, which only decide between hosts that are otherwise equal."""

NOT_OF_HOSTS = frozenset(
    {"done", "preempted", "gave up", "diverged", "bad input", "unknown"}
)
"""Causes that are unrelated to the host, or that name none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostEvent:
    """An event of a host."""

    host: str
    kind: Kind
    time_ns: int
    """Time since the epoch; of a burn, its end."""
    text: str = ""
    cause: str = ""
    """Cause of a fault, as in CAUSES."""
    share: float = 1.0
    """Share of the blame: 1 / n if n hosts share it."""
    started_ns: int | None = None
    """Start of a burn; None: `time_ns`."""
    run: str = ""
    """Run in which the event happened; empty outside runs."""
    generation: int = 0
    """Generation of the run."""
    key: str = ""
    """Identifies the event among those of its run, generation, host and kind; empty:
    time, cause and text identify it."""

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
        """Meaning of the event for its host."""
        if self.kind is Kind.FAULT and self.cause in CAUSES:
            return CAUSES[self.cause]
        return KINDS[self.kind]

    @property
    def weight(self) -> float:
        """Weight in the score, without decay."""
        return self.meaning.weight * self.share

    @property
    def identity(self) -> str:
        """Identifier of the event, the same wherever the event is read from."""
        parts = [self.run, str(self.generation), self.host, self.kind.value]
        parts += [self.key] if self.key else [str(self.time_ns), self.cause, self.text]
        # Lengths keep ("a", "bc") apart from ("ab", "c").
        whole = "".join(f"{len(part)}:{part}" for part in parts)
        return hashlib.sha256(whole.encode()).hexdigest()
