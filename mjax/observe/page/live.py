"""Server-sent events: updates of a run, to each viewer at its own pace.

Input: a `Page`, and the number of rows of metrics that a viewer has seen. Output: the
bytes of an event stream. Each event contains all updates since the previous one, so a
slow viewer gets fewer, larger events and needs no queue.

Source: the format is that of the HTML standard, section 9.2, Server-sent events.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool

from mjax.observe.page.answers import Page

KEEP_ALIVE_S = 15.0
"""Seconds between comments, so that no proxy closes a quiet stream."""
STATE_EVERY_S = 2.0
"""Minimum seconds between two states of the ranks."""
RETRY_MS = 2000
"""Time after which a browser reconnects."""
_IDLE_S = 10.0
"""Time between two states of the ranks if there is no new data; the ages they show
still grow."""
_LOOK_S = 0.25
_AGAIN = 300
"""Number of last rows to send again, and to look for new marks in. It is more than a
run writes between two requests of a viewer."""


def rows_seen(last_event_id: str | None) -> int | None:
    """Return the number of rows in the header Last-Event-ID.

    None if the header is absent or the page did not write it.
    """
    text = last_event_id or ""
    is_number = text.isascii() and text.isdigit() and len(text) <= 15
    return int(text) if is_number else None


def encode(event: str, data: Any, number: int | None = None) -> bytes:
    """Encode an event; JSON contains no line ends."""
    body = data if isinstance(data, bytes) else msgspec.json.encode(data)
    identity = b"" if number is None else b"id: %d\n" % number
    return b"event: " + event.encode() + b"\n" + identity + b"data: " + body + b"\n\n"


async def stream(page: Page, rows: int | None) -> AsyncIterator[bytes]:
    """Yield events until the server stops.

    Args:
      page: page of a run.
      rows: number of rows of metrics that the viewer has; None sends the last ones
        again, because rows may have arrived since the viewer read them.
    """
    yield b"retry: %d\n\n" % RETRY_MS
    seen = page.seen()
    have = max(0, seen.rows - _AGAIN) if rows is None else min(rows, seen.rows)
    # Earlier data is served at other addresses.
    events, generation, revision = seen.events, seen.generation, seen.rows_revision
    said = state_at = -1e9
    version = marked = -1
    marks: dict[str, Any] = {}
    while not page.stopping.is_set():
        now = time.monotonic()
        seen = page.seen()
        if seen.generation != generation:
            generation = seen.generation
            yield encode("run", {"generation": generation})
            said = now
        if seen.rows_revision != revision:
            revision, have = seen.rows_revision, 0
        if seen.rows != have:
            have = min(have, seen.rows)
            new = await run_in_threadpool(page.rows_from, have)
            have += max(0, seen.rows - have)
            yield encode("metrics", new, have)
            said = now
        if seen.version != marked:  # the mark of a step may follow its row
            marked = seen.version
            new = await run_in_threadpool(page.marks_from, max(0, have - _AGAIN))
            if any(new[name] != marks.get(name) for name in ("num_marks", "marks")):
                marks, said = new, now
                yield encode("marks", new)
        if seen.events > events:
            new = await run_in_threadpool(page.events_from, events)
            events = seen.events
            yield encode("events", new)
            said = now
        wait_s = STATE_EVERY_S if seen.version != version else _IDLE_S
        if now - state_at >= wait_s:
            version, state = await run_in_threadpool(page.state_json)
            state_at = now
            yield encode("state", state)
            said = now
        if now - said >= KEEP_ALIVE_S:
            yield b": still here\n\n"
            said = now
        await asyncio.sleep(_LOOK_S)
