"""The server process: socket, threads, signals, exit code.

Input: a bound socket, the served model, an engine. Output: answers, and an exit code:
0 after a signal, 1 if the engine or the HTTP side has failed.

The main thread waits for signals. A second thread runs the event loop with all
connections, a third the engine (`scheduler`).
"""

import asyncio
import contextlib
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from mjax.cli.listening import asgi
from mjax.generate.requests import Request, Sampling
from mjax.generate.server import errors
from mjax.generate.server.app import make_app
from mjax.generate.server.metrics import Metrics
from mjax.generate.server.prompts import Served
from mjax.generate.server.scheduler import Engine, Scheduler

_KEEP_ALIVE_S = 75
"""Seconds that an idle connection is kept; nginx's default (keepalive_timeout)."""
_LAST_ANSWERS_S = 2
"""Seconds to send the last errors when the server ends. Not measured."""
_PROBE_IDLE_S, _PROBE_EVERY_S, _PROBES = 60, 15, 4
"""TCP keepalive times of the kernel. A client whose machine is gone frees its slot
after two minutes."""
_POLL_S = 0.1
_WARM_TOKENS = 2
"""Tokens of the warm-up answer: the prefill draws one, the draw program another."""


def warm_up(engine: Engine, max_len: int) -> None:
    """Compile every program before the first request.

    It prefills prompts of each power of two and of the maximum length, and continues
    the prompt of one token. All options of a request are arguments of these programs.

    Args:
      engine: an engine that is not yet in use.
      max_len: maximum number of tokens of a prompt and its answer together.
    """
    lengths = {1, max_len - 1} | {1 << bit for bit in range(max_len.bit_length())}
    for length in sorted(length for length in lengths if length < max_len):
        max_tokens = min(_WARM_TOKENS if length == 1 else 1, max_len - length)
        sampling = Sampling(max_tokens=max_tokens)
        engine.submit(Request(prompt=(0,) * length, sampling=sampling))
        while not engine.is_idle:
            engine.step()


def set_timeouts(listening: socket.socket, limit_s: float) -> None:
    """Let the kernel close connections whose client stops reading for too long.

    Accepted connections inherit this. Without it, data sent to a client that does not
    read stays in memory after the request is aborted. Source: tcp(7), TCP_USER_TIMEOUT;
    Linux only.

    Args:
      listening: the listening socket.
      limit_s: seconds that sent data may stay unread.
    """
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_USER_TIMEOUT": int(limit_s * 1000),
        "TCP_KEEPIDLE": _PROBE_IDLE_S,
        "TCP_KEEPINTVL": _PROBE_EVERY_S,
        "TCP_KEEPCNT": _PROBES,
    }
    for name, value in options.items():
        option = getattr(socket, name, None)
        if option is not None:
            listening.setsockopt(socket.IPPROTO_TCP, option, value)


class ModelServer:
    """Answers requests until closed."""

    def __init__(
        self,
        listening: socket.socket,
        served: Served,
        engine: Engine,
        *,
        tokens: frozenset[str],
        on_news: Callable[[], None],
    ) -> None:
        """Start to answer.

        Args:
          listening: the listening socket; closed with the server.
          served: the model and its limits.
          engine: the engine; the caller must not use it any more.
          tokens: accepted API tokens; empty: none is required.
          on_news: called from other threads when the server or the engine has ended.
        """
        set_timeouts(listening, served.limits.request_s)
        self._on_news = on_news
        self.scheduler = Scheduler(engine, capacity=served.capacity, on_failure=on_news)
        app = make_app(served, self.scheduler, tokens=tokens, counters=Metrics())
        bad_request = errors.malformed(
            "the request is not HTTP/1.1, or its headers are too long; the address of "
            "this server begins with http://"
        )
        self._uvicorn = asgi.make_server(
            app,
            listening,
            bad_request=bad_request.body(),
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_ANSWERS_S,
        )
        self._socket = listening
        self._loop: asyncio.AbstractEventLoop | None = None
        has_begun = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(has_begun,), name="http", daemon=True
        )
        self._thread.start()
        has_begun.wait()

    @property
    def is_alive(self) -> bool:
        """Whether the server answers connections."""
        return self._thread.is_alive()

    def _run(self, has_begun: threading.Event) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            has_begun.set()
            await self._uvicorn.serve(sockets=[self._socket])

        try:
            asyncio.run(serve())
        finally:
            has_begun.set()
            self._on_news()

    def drain(self, grace_s: float, is_urgent: Callable[[], bool]) -> int:
        """Refuse new requests and finish those that were accepted.

        Args:
          grace_s: seconds after which unfinished requests get an error.
          is_urgent: called repeatedly; True ends the grace period.
        Returns:
          number of requests that got an error.
        """
        assert self._loop is not None
        drained = asyncio.run_coroutine_threadsafe(
            self.scheduler.drain(grace_s), self._loop
        )
        num_cut = 0
        while not drained.done() and self.is_alive and self.scheduler.failure is None:
            if is_urgent():
                cutting = asyncio.run_coroutine_threadsafe(self._cut(), self._loop)
                num_cut += cutting.result(_LAST_ANSWERS_S)
        return num_cut + (drained.result() if drained.done() else 0)

    async def _cut(self) -> int:
        return self.scheduler.cut()

    def close(self) -> None:
        """Send remaining data for a moment, then end."""
        self._uvicorn.should_exit = True
        self._thread.join()
        self.scheduler.stop()
        self._socket.close()


@contextlib.contextmanager
def _signals(news: "queue.SimpleQueue[str]") -> Iterator[None]:
    """Put SIGTERM and Ctrl-C into a queue inside a with statement.

    SimpleQueue.put is safe in a signal handler; Event.set is not.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [
        signal.signal(number, lambda *_: news.put("signal")) for number in numbers
    ]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def serve(
    listening: socket.socket,
    served: Served,
    engine: Engine,
    *,
    tokens: frozenset[str],
    say: Callable[[str], None],
) -> int:
    """Serve until a signal, then finish the accepted requests.

    Args:
      listening: the listening socket.
      served: the model and its limits.
      engine: the engine; the caller must not use it any more.
      tokens: accepted API tokens; empty: none is required.
      say: prints a line.
    Returns:
      the exit code: 0 after a signal; 1 if the engine or the HTTP side has failed.
    """
    news: queue.SimpleQueue[str] = queue.SimpleQueue()
    with _signals(news):
        server = ModelServer(
            listening, served, engine, tokens=tokens, on_news=lambda: news.put("ended")
        )
        host, port = listening.getsockname()[:2]
        say(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1")
        if news.get() == "signal":
            grace_s = served.limits.grace_s
            num_open = server.scheduler.num_open
            say(f"stopping: {num_open} open answers have {grace_s:g} s")
            num_cut = server.drain(grace_s, lambda: _next(news) == "signal")
            if num_cut:
                say(f"{num_cut} requests were not finished and got an error")
        is_alive = server.is_alive
        server.close()
    if server.scheduler.failure is not None:
        print(f"error: {server.scheduler.failure}", file=sys.stderr)
        return 1
    if not is_alive:
        print("error: the HTTP side of the server has failed", file=sys.stderr)
        return 1
    return 0


def _next(news: "queue.SimpleQueue[str]") -> str | None:
    """Return the next entry of the queue; None if none arrives within a moment."""
    try:
        return news.get(timeout=_POLL_S)
    except queue.Empty:
        return None
