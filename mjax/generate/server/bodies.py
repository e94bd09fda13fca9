"""Read request bodies within limits, and detect disconnected clients.

Input: ASGI's `receive`. Output: bytes, an ApiError, or a ClientGoneError.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from starlette.types import Receive

from mjax.generate.server.errors import ApiError
from mjax.generate.server.limits import Limits

_DRAIN_S = 2.0
_DRAIN_BYTES = 32 << 20
"""Limits, in seconds and bytes, for reading and discarding the rest of a body that is
too large. The rest is read because a client that is disconnected while it sends does
not see the answer. Not measured."""


class ClientGoneError(Exception):
    """The client has closed its connection."""


async def read(receive: Receive, headers: Mapping[str, str], limits: Limits) -> bytes:
    """Return the body of a request.

    Raises:
      ApiError: 413, the body is too large; 408, it takes too long.
      ClientGoneError: the connection was closed before the end of the body.
    """
    try:
        async with asyncio.timeout(limits.body_s):
            length = headers.get("content-length", "")
            is_large = length.isdigit() and _exceeds(length, limits.max_body_bytes)
            body = None if is_large else await _read(receive, limits.max_body_bytes)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {limits.body_s:g} s; send the whole body "
            "without pauses, or raise --body-s of this server",
            code="body_timeout",
        ) from None
    if body is None:
        await _drain(receive)
        raise ApiError(
            413,
            f"the body must have at most {limits.max_body_bytes} bytes "
            "(--max-body-bytes of this server); shorten the prompt",
            code="body_too_large",
        )
    return body


def _exceeds(length: str, most: int) -> bool:
    """Return whether a number exceeds `most`; it may have thousands of digits."""
    return len(length) > 15 or int(length) > most


async def _read(receive: Receive, most: int) -> bytes | None:
    """Return the body; None as soon as it is too large."""
    parts, size = [], 0
    while True:
        part, is_last = await _part(receive)
        parts.append(part)
        size += len(part)
        if size > most:
            return None
        if is_last:
            return b"".join(parts)


async def _part(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    return message.get("body", b""), not message.get("more_body", False)


async def _drain(receive: Receive) -> None:
    size, is_last = 0, False
    try:
        async with asyncio.timeout(_DRAIN_S):
            while not is_last and size < _DRAIN_BYTES:
                part, is_last = await _part(receive)
                size += len(part)
    except TimeoutError:
        pass


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run a coroutine, and cancel it if the client disconnects.

    Args:
      work: the coroutine.
      receive: ASGI's `receive`, after the body has been read.
    Raises:
      ClientGoneError: the client disconnected before the work was finished.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
