"""The sinks to which a collector sends batches.

Input: an address. Output: a `Sink`. An error of the sink is a SinkGoneError: the
collector keeps its position and retries.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from mjax.observe.store.batches import Batch, Outcome
from mjax.observe.stream.wire import MarksAnswer, MarksRequest


class SinkGoneError(RuntimeError):
    """The sink is unreachable or full; it may accept the batches later."""


@runtime_checkable
class Sink(Protocol):
    """Takes batches."""

    is_queue: bool
    """Whether the sink only queues accepted batches; `marks` tells when they are
    stored."""

    def marks(self, request: MarksRequest) -> MarksAnswer:
        """Request the stored size of the files; raises SinkGoneError."""
        ...

    def send(self, batches: Sequence[Batch], again: int) -> list[Outcome]:
        """Send batches; raises SinkGoneError.

        Args:
          batches: batches to send, in file order for each file.
          again: a new number each time the collector goes back in its files; a queue
            accepts repeated bytes only under a new number.
        """
        ...

    def close(self) -> None:
        """Release connections."""
        ...


def open_sink(address: str, token_path: Path | None) -> Sink:
    """Open the sink at an address.

    Args:
      address: unix:PATH, http://HOST:PORT, or nats://HOST:PORT.
      token_path: file with the token of an ingester that listens on a port.
    Raises:
      ValueError: the address is none of these, a package is missing, or the token
        cannot be read.
    """
    if address.startswith("nats://"):
        try:
            from mjax.observe.stream.nats_sink import NatsSink
        except ImportError as error:
            raise ValueError(
                f"{error.name} is not installed; pip install 'mjax[observe-scale]'"
            ) from error
        return NatsSink(address)
    if address.startswith(("unix:", "http://")):
        from mjax.observe.stream.http_sink import HttpSink

        return HttpSink(address, read_token(token_path))
    raise ValueError(
        f"--to must be unix:PATH, http://HOST:PORT or nats://HOST:PORT, got {address}"
    )


def read_token(path: Path | None) -> str:
    """Read a token; without a path return "".

    Raises:
      ValueError: the file cannot be read, or is empty.
    """
    if path is None:
        return ""
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ValueError(
            f"--token-file {path} cannot be read ({error.strerror}); it is written by "
            "python -m mjax.observe ingest"
        ) from error
    if not token:
        raise ValueError(f"--token-file {path} is empty; write a long random word")
    return token
