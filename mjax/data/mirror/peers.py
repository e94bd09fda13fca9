"""Ask the other hosts of a mirror for blocks.

Input: the name of a block. Output: the checked block, or the reason why a host did not
return it. A host that does not answer, or sends anything but the block, is not asked
for a while; each further failure doubles that time.
"""

import dataclasses
import http
import http.client
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal

from mjax.data.mirror.blocks import is_whole

Method = Literal["GET", "POST", "DELETE"]
"""GET returns a block that the host has, POST makes the host fetch it first, DELETE
removes it there."""
BUSY = http.HTTPStatus.ACCEPTED
"""Status of a host that is alive but has no answer yet; it is asked again."""
_DOWN_S = 30.0  # seconds until a host that failed is asked again
_MAX_DOWN_S = 480.0  # maximum, after several failures
_UP = (0.0, 0.0, "")  # end and length of a host's pause in seconds, and its reason
_MAX_REASON_BYTES = 500
_REFUSALS: dict[int, str] = {
    http.HTTPStatus.FORBIDDEN: "refused the token of this run",
    http.HTTPStatus.CONFLICT: "has listed other files, or has another block size",
    http.HTTPStatus.NOT_FOUND: "does not have it",
}
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Answer:
    """Answer of a host to a request for a block."""

    content: bytes | None
    """The block as `blocks.sealed` returns it; None if the host did not return it."""
    reason: str = ""
    """Why the host did not return the block."""


class Peers:
    """The other hosts of a run, and which of them have failed."""

    def __init__(
        self,
        addresses: Mapping[str, tuple[str, int]],
        token: str,
        timeout_s: float,
        block_timeout_s: float,
        closed: threading.Event,
    ) -> None:
        """Store the arguments; no host is asked yet.

        Args:
          addresses: host -> (address, port).
          token: secret of the run.
          timeout_s: seconds without a byte after which a host counts as lost.
          block_timeout_s: time limit for a whole block, in seconds.
          closed: event that stops retries with busy hosts when it is set.
        """
        self._addresses, self._token = addresses, token
        self._closed = closed
        self._timeout_s, self._block_timeout_s = timeout_s, block_timeout_s
        self._down: dict[str, tuple[float, float, str]] = {}
        self._said: set[tuple[str, str]] = set()

    def ask(
        self,
        host: str,
        block: str,
        method: Method,
        is_right: Callable[[bytes], bool] = lambda content: True,
        *,
        label: str,
        is_last_try: bool = False,
    ) -> Answer:
        """Ask a host for a block.

        Args:
          host: name of the host.
          block: name of the block.
          method: see `Method`.
          is_right: returns whether a block's content is the expected one.
          label: text that names the block in log messages.
          is_last_try: whether to ask a host even during its pause.
        """
        until_s, _, reason = self._down.get(host, _UP)
        if time.monotonic() < until_s and not is_last_try:
            return Answer(None, reason)
        status, content = BUSY, b""
        start_s = time.monotonic()
        while status == BUSY:
            if self._closed.is_set():
                return Answer(None, "was busy until this host ended")
            if method != "POST" and time.monotonic() > start_s + self._block_timeout_s:
                return Answer(None, f"was busy for {self._block_timeout_s:g} s")
            try:
                status, content = self._request(host, block, method)
            except (OSError, http.client.HTTPException) as error:
                return self._failed(host, "does not answer", _text(error), label)
        is_block = status == http.HTTPStatus.OK and method != "DELETE"
        if is_block and not (is_whole(content) and is_right(content)):
            why = "they differ from their SHA-256"
            return self._failed(host, "sent wrong bytes", why, label)
        self._down.pop(host, None)
        if is_block:
            return Answer(content)
        if status == http.HTTPStatus.BAD_GATEWAY:
            text = content[:_MAX_REASON_BYTES].decode("utf-8", "replace")
            return Answer(None, text)
        reason = _REFUSALS.get(status, f"answered {status}")
        if status not in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.OK):
            self._say_once(host, "gives no blocks", reason)
        return Answer(None, reason)

    def _request(self, host: str, block: str, method: Method) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(
            *self._addresses[host], timeout=self._timeout_s
        )
        headers = {"Authorization": f"Bearer {self._token}"}
        until_s = time.monotonic() + self._block_timeout_s
        try:
            connection.request(method, f"/{block}", headers=headers)
            answer = connection.getresponse()
            content = bytearray()
            while part := answer.read1(1 << 20):
                content += part
                if time.monotonic() > until_s:
                    raise TimeoutError(f"no whole block in {self._block_timeout_s:g} s")
            return answer.status, bytes(content)
        finally:
            connection.close()

    def _failed(self, host: str, what: str, why: str, label: str) -> Answer:
        """Begin a pause in which a host is not asked; return the reason as answer."""
        now = time.monotonic()
        until_s, wait_s, _ = self._down.get(host, _UP)
        reason = f"{what} ({why})"
        if until_s <= now:  # no other thread has just begun the pause
            wait_s = min(2 * wait_s, _MAX_DOWN_S) or _DOWN_S
            self._down[host] = now + wait_s, wait_s, reason
        self._say_once(host, what, f"{why}; asked for {label}")
        return Answer(None, reason)

    def _say_once(self, host: str, what: str, why: str) -> None:
        if (host, what) not in self._said:
            _log.warning(
                "mirror: host %s at %s:%d %s (%s); other hosts or the remote are asked",
                *(host, *self._addresses[host], what, why),
            )
        self._said.add((host, what))


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
