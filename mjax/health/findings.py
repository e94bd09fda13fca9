"""The result of a check: one of four states, with the value, the limit and the reason.

A device or tool that is absent is `unknown`, never `ok`. It fails the host only if the
expectations require the check.
"""

import dataclasses
import enum
from collections.abc import Iterable

KEPT_TEXTS = 4
"""Number of parsed outputs that a parser caches. Several checks read each output."""
MOST_NAMED = 8
"""Maximum number of devices in a reason. A host has eight GPUs."""
_QUOTED_CHARS = 60


class State(enum.StrEnum):
    """How a check ended."""

    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "unknown"
    """The tool or the device is absent, or its output is in a format we cannot read."""
    INCOMPLETE = "incomplete"
    """The time limit passed, or the output was truncated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of judging an output."""

    state: State
    value: str = ""
    """The value read, with its unit; the worst of several devices."""
    limit: str = ""
    """The limit that the value was compared with."""
    reason: str = ""
    """Why the state is not ok, with the name of the device; if the state is ok, a
    warning."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding(Verdict):
    """A verdict with the name of its check."""

    name: str


class UnreadableError(ValueError):
    """The output is not in a format that the parser knows."""


def quoted(text: str) -> str:
    """Return the beginning of a text in quotes, to quote it in a reason."""
    return repr(text[:_QUOTED_CHARS])


def ok(value: object = "", limit: object = "") -> Verdict:
    """Return the verdict of a healthy host."""
    return Verdict(state=State.OK, value=str(value), limit=str(limit))


def warned(reason: str, value: object = "", limit: object = "") -> Verdict:
    """Return the verdict of a host that may be used, with a warning for a person."""
    return dataclasses.replace(ok(value, limit), reason=reason)


def failed(reason: str, value: object = "", limit: object = "") -> Verdict:
    """Return the verdict of a host that should not be used."""
    return Verdict(
        state=State.FAILED, value=str(value), limit=str(limit), reason=reason
    )


def unknown(reason: str) -> Verdict:
    """Return the verdict if nothing can be judged."""
    return Verdict(state=State.UNKNOWN, reason=reason)


def incomplete(reason: str) -> Verdict:
    """Return the verdict on a late or truncated output."""
    return Verdict(state=State.INCOMPLETE, reason=reason)


def judge_each(
    problems: Iterable[tuple[str, str]], value: object = "", limit: object = ""
) -> Verdict:
    """Return ok if there is no problem, otherwise failed with all of them.

    Args:
      problems: (device, what is wrong with it).
      value: the worst value read.
      limit: the limit that it was compared with.
    """
    texts = [f"{device}: {text}" if device else text for device, text in problems]
    if texts:
        return failed("; ".join(texts), value, limit)
    return ok(value, limit)
