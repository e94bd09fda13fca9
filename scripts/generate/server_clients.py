"""Clients of the model server that compare its answers with offline ones.

Input: the port of a server, and cases: requests with the answers of an engine that runs
each alone. Output: `Seen`, the requests and answers of the clients.

A client sends its requests one by one, each on a separate connection. Half of the
answers are streamed. A cutter closes the connection before the end of each answer:
mostly in the middle of a stream, after some pieces, otherwise after a moment without
reading, so that the request may still be in the queue.
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import random
import time
from collections.abc import AsyncIterator, Sequence

LONG_TOKENS = 60
"""Least number of tokens of answers that are cut in the middle."""
_SILENT_SHARE = 0.3
"""Share of cuts without reading anything."""
_MOST_PIECES = 5
_MOST_SILENT_S = 0.5
_LOST_S = 300.0
"""Time limit of an answer. Chosen: a hundred times the usual."""
_END = "[DONE]"
_REFUSALS = ("queue_full", "stopping")
"""Codes of errors for requests that were never accepted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A request, and its offline answer."""

    body: dict[str, object]
    text: str
    num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """When a client closes its connection; one of the two."""

    pieces: int | None = None
    """Number of pieces of text before the cut."""
    silent_s: float | None = None
    """Seconds before the cut, without reading."""


@dataclasses.dataclass(kw_only=True)
class Seen:
    """Observations of the clients."""

    outcomes: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    sent: int = 0
    tokens: int = 0
    """Tokens of complete answers."""
    whole_s: list[float] = dataclasses.field(default_factory=list)
    stream_s: list[float] = dataclasses.field(default_factory=list)
    first_s: list[float] = dataclasses.field(default_factory=list)
    """Seconds from sending to the first piece of a stream, including cut ones."""
    wrong: list[str] = dataclasses.field(default_factory=list)
    """Descriptions of lost or wrong answers."""

    @property
    def complete(self) -> int:
        """Complete answers that equal the offline ones."""
        return self.outcomes[EQUAL_STREAMED] + self.outcomes[EQUAL_WHOLE]

    @property
    def refused(self) -> int:
        """Requests that were not accepted."""
        return sum(n for name, n in self.outcomes.items() if "refused" in name)


EQUAL_STREAMED, EQUAL_WHOLE = "equal, streamed", "equal, whole"
CUT_IN_STREAM, CUT_SILENT = "cut off in the middle of a stream", "cut off unread"
LOST, DIFFERENT = "lost", "different"


async def ask(port: int, case: Case, stream: bool, cut: Cut | None, seen: Seen) -> int:
    """Send one request, and compare its answer or cut it off.

    Returns:
      seconds to wait before the next request; 0 unless this one was refused.
    """
    try:
        async with asyncio.timeout(_LOST_S), _sent(port, case, stream) as reader:
            seen.sent += 1
            if cut is not None and cut.silent_s is not None:
                await asyncio.sleep(cut.silent_s)
                seen.outcomes[CUT_SILENT] += 1
                return 0
            return await _receive(reader, case, stream, cut, seen)
    except (OSError, asyncio.IncompleteReadError, ValueError, KeyError) as error:
        # TimeoutError is an OSError.
        seen.outcomes[LOST] += 1
        seen.wrong.append(f"lost: {type(error).__name__}: {error}")
        return 0


@contextlib.asynccontextmanager
async def _sent(
    port: int, case: Case, stream: bool
) -> AsyncIterator[asyncio.StreamReader]:
    """Send a request on a separate connection, which is closed at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body = json.dumps(case.body | {"stream": stream}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        yield reader
    finally:
        writer.close()


async def _receive(
    reader: asyncio.StreamReader, case: Case, stream: bool, cut: Cut | None, seen: Seen
) -> int:
    """Read an answer and compare it; return as `ask`."""
    begun_s = time.monotonic()
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    status = int(head[9:12])
    if status != 200:
        error = (await reader.read()).decode()
        if json.loads(error)["error"]["code"] not in _REFUSALS:
            raise ValueError(f"{status} {error}")
        seen.outcomes[f"refused with {status}"] += 1
        return int(head.partition("retry-after: ")[2].partition("\r")[0])
    is_whole, pieces = True, list[str]()
    if not stream:
        pieces.append(json.loads(await reader.read())["choices"][0]["text"])
    else:
        async for piece in _pieces(reader):
            if not pieces:
                seen.first_s.append(time.monotonic() - begun_s)
            pieces.append(piece)
            if cut is not None and len(pieces) == cut.pieces:
                is_whole = False
                break
    text = "".join(pieces)
    is_equal = text == case.text if is_whole else case.text.startswith(text)
    if not is_equal:
        seen.outcomes[DIFFERENT] += 1
        seen.wrong.append(f"{text!r}, offline {case.text!r}")
    elif not is_whole:
        seen.outcomes[CUT_IN_STREAM] += 1
    else:
        seen.outcomes[EQUAL_STREAMED if stream else EQUAL_WHOLE] += 1
        seen.tokens += case.num_tokens
        times = seen.stream_s if stream else seen.whole_s
        times.append(time.monotonic() - begun_s)
    return 0


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield the pieces of text of a stream as they arrive.

    Raises:
      ValueError: the stream does not end with its mark, or has an error.
    """
    # Empty lines and lines with chunk sizes (RFC 9112, 7.1) lie between.
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        data = line.decode().removeprefix("data: ").strip()
        if data == _END:
            return
        content = json.loads(data)
        if "error" in content:
            raise ValueError(f"a stream ended with {content['error']}")
        if text := content["choices"][0]["text"]:
            yield text
    raise ValueError("a stream ended without its mark")


async def client(
    rng: random.Random,
    port: int,
    cases: Sequence[Case],
    seen: Seen,
    end: asyncio.Event,
    *,
    cuts: bool,
) -> None:
    """Send requests one by one until the end."""
    long = [case for case in cases if case.num_tokens >= LONG_TOKENS]
    while not end.is_set():
        cut, stream = None, rng.random() < 0.5
        if cuts and rng.random() < _SILENT_SHARE:
            cut = Cut(silent_s=rng.uniform(0.0, _MOST_SILENT_S))
        elif cuts:
            cut, stream = Cut(pieces=rng.randint(1, _MOST_PIECES)), True
        case = rng.choice(cases if cut is None else long)
        wait_s = await ask(port, case, stream, cut, seen)
        if wait_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), wait_s)
