"""Make checks that judge the facts collected by `mjax.doctor.probe`.

Input: a kind of facts and its arguments. Output: a check for the runner of
`mjax.health`, which runs each probe once, with a time limit.
"""

import json
import signal
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mjax.health.check import Check
from mjax.health.findings import UnreadableError, Verdict
from mjax.health.settings import Settings
from mjax.health.sources import Command

_FAILING: Mapping[int, str] = MappingProxyType(
    {
        -number: f"it crashed with {number.name}"
        for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
    }
    | {-signal.SIGKILL: "it was killed, for example because memory ran out"}
    | {1: "it raised an error"}
)
"""Maps each exit code of a probe that shows a fault of the host to the reason."""
Facts = Mapping[str, Any]


def probe(kind: str, *words: str) -> Command:
    """Return the command that prints the facts of a kind."""
    return Command((sys.executable, "-m", "mjax.doctor.probe", kind, *words))


def check(
    name: str,
    what: str,
    source: Command,
    judge: Callable[[Facts], Verdict],
    action: str,
    failing: Mapping[int, str] = _FAILING,
) -> Check:
    """Return a check that judges facts.

    Args:
      name: `group.what`, in lower case.
      what: one-line statement that is true if a run can start on the host.
      source: result of `probe`.
      judge: pure function that judges the facts.
      action: text that says what to do if the check fails.
      failing: maps exit codes to reasons; these add to or replace `_FAILING`.
    """

    def judged(text: str, settings: Settings) -> Verdict:
        del settings  # the limits of the doctor are flags
        try:
            facts = json.loads(text)
        except ValueError as error:
            raise UnreadableError(f"it is not JSON: {error}") from error
        return judge(facts)

    return Check(
        name=name,
        what=what,
        source=source,
        judge=judged,
        action=action,
        failing={**_FAILING, **failing},
    )
