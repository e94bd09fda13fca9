"""Events of a run, with text for people and data for programs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from mjax.launch.facts import process_facts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """An event of a run."""

    kind: str
    text: str
    severity: str = "info"
    host: str | None = None
    rank: int | None = None
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """JSON data, for programs."""


def teller(record: Callable[[Event], None]) -> Callable[..., None]:
    """Return a function of (kind, text, severity, **fields) that records an event."""

    def tell(kind: str, text: str, severity: str = "info", **fields: Any) -> None:
        record(Event(kind=kind, text=text, severity=severity, **fields))

    return tell


def process_event(kind: str, text: str) -> Event:
    """Return an event about the driver's process, with data for programs."""
    return Event(kind=kind, text=text, severity="debug", data=process_facts())
