"""Checks that judge what `mjax.doctor.probe` has found.

Enters: a kind of fact and its words. Leaves: a check of `mjax.health`, so that its
runner reads the probe with a time limit, and each probe once.
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
"""Exit codes of a probe that are a fault of the host."""
Facts = Mapping[str, Any]


def probe(kind: str, *words: str) -> Command:
    """Return the source that finds the facts of a kind."""
    return Command((sys.executable, "-m", "mjax.doctor.probe", kind, *words))


def check(
    name: str,
    what: str,
    source: Command,
    judge: Callable[[Facts], Verdict],
    action: str,
    failing: Mapping[int, str] = _FAILING,
) -> Check:
    """Return a check of facts.

    Args:
      name: group.what, in lower case.
      what: true of a host on which a run can be started, in one line.
      source: a `probe`.
      judge: of its facts; pure.
      action: what a person does when it fails.
      failing: exit codes that mean another fault of the host than for most probes.
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
