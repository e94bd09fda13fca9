"""`python -m mjax.observe collect`: send the files of a run to an ingester.

Input: flags. Output: batches at a sink, until SIGTERM or Ctrl-C, or with --once until
the store has all existing data.
"""

import dataclasses
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mjax.cli import flags
from mjax.observe.stream import logs, quota
from mjax.observe.stream.collector import Collector
from mjax.observe.stream.service import FOLDER, Stop, stopped_by_signals
from mjax.observe.stream.sinks import SinkGoneError, open_sink

_QUOTA_EVERY_S = 10.0
_LONGEST_WAIT_S = 10.0
"""Longest pause between two attempts while the sink is unreachable. Not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectFlags:
    """Send the files of a run to an ingester, directly or through a queue."""

    work_dir: Path
    """Work dir of the run."""
    to: str | None = None
    """Sink: unix:PATH, http://HOST:PORT or nats://HOST:PORT. None: the socket
    observe/ingest.sock in the work dir."""
    token_file: Path | None = None
    """File with the token of an ingester on a port. None: observe/token in the work
    dir."""
    host: str | None = None
    """Send only spans of this host, in a work dir that hosts share. None: all spans."""
    spans_dir: Path | None = None
    """Folder of the spans, as given to the run with --observe.spans-dir. None: the
    folder spans in the work dir."""
    run: str | None = None
    """Run to which metrics.jsonl and events.jsonl belong; needed if the work dir has no
    spans, or spans of several runs."""
    every_s: float = 1.0
    """Interval between two scans of the files, in seconds."""
    once: bool = False
    """Exit with code 0 once the store has all existing data; with 1 if some data cannot
    be sent."""
    once_within_s: float = 600.0
    """With --once: give up after this many seconds, with exit code 1."""
    quota_gb: float | None = None
    """Limit for span files, in gigabytes (1e9). Above it, the oldest files that are in
    the store are compressed, then deleted. None: no limit."""
    drop_unstored: bool = False
    """With --quota-gb: if the stored files are not enough, also delete files of ended
    processes that are not in the store; their lines are lost."""

    log_quota_gb: float | None = None
    """Limit for logs of ranks, stacks and recorded windows, in gigabytes (1e9). Above
    it, the oldest logs and stacks that no process writes are compressed. None: no
    limit."""
    delete_logs: bool = False
    """With --log-quota-gb: if compression is not enough, delete the oldest logs, stacks
    and windows that no process writes. The store has no copy of them."""

    def __post_init__(self) -> None:
        if not 0.01 <= self.every_s <= 3600:
            raise ValueError(
                f"--every-s must be at least 0.01 and at most 3600, got {self.every_s}"
            )
        if self.quota_gb is not None and not self.quota_gb > 0:
            raise ValueError(f"--quota-gb must be above 0, got {self.quota_gb}")
        if self.log_quota_gb is not None and not self.log_quota_gb > 0:
            raise ValueError(f"--log-quota-gb must be above 0, got {self.log_quota_gb}")
        if self.delete_logs and self.log_quota_gb is None:
            raise ValueError(
                "--delete-logs needs --log-quota-gb; without a quota all logs are kept"
            )
        if self.drop_unstored and self.quota_gb is None:
            raise ValueError(
                "--drop-unstored needs --quota-gb; without a quota all spans are kept"
            )
        if not self.once_within_s > 0:
            raise ValueError(
                f"--once-within-s must be above 0, got {self.once_within_s}"
            )


def main(argv: Sequence[str]) -> int:
    """Collect until a signal; return the exit code."""
    try:
        given = flags.read(
            CollectFlags,
            argv,
            prog="python -m mjax.observe collect",
        )
        if not given.work_dir.is_dir():
            raise ValueError(
                f"--work-dir {given.work_dir} is not a folder; give the work dir of a "
                "run"
            )
        folder = given.work_dir / FOLDER
        to = given.to or f"unix:{folder.absolute() / 'ingest.sock'}"
        token = given.token_file
        if token is None and to.startswith("http://"):
            token = folder / "token"
        sink = open_sink(to, token)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    collector = Collector(
        given.work_dir,
        sink,
        host=given.host,
        spans_dir=given.spans_dir,
        run=given.run,
        name=f"{given.host or socket.gethostname()}:{given.work_dir.absolute()}",
        say=_say,
    )
    try:
        with stopped_by_signals() as stop:
            _say(f"collect: {given.work_dir} to {to}")
            return _loop(given, collector, stop)
    finally:
        sink.close()


def _loop(given: CollectFlags, collector: Collector, stop: Stop) -> int:
    wait, said, limited_at = given.every_s, "", -_QUOTA_EVERY_S
    longest = max(_LONGEST_WAIT_S, given.every_s)
    until = time.monotonic() + given.once_within_s
    while not stop.is_set():
        try:
            collector.round()
            if given.once and collector.is_done():
                return 1 if collector.refused() else 0
            wait, said = given.every_s, ""
        except SinkGoneError as error:
            if not said:
                _say(
                    f"{error}; trying to send the files again, with pauses of up to "
                    f"{longest:g} s"
                )
            said = str(error)
            wait = min(2 * wait, longest)
        if time.monotonic() - limited_at >= _QUOTA_EVERY_S:
            _limit(given, collector)
            limited_at = time.monotonic()
        if given.once and time.monotonic() > until:
            _say(f"--once-within-s {given.once_within_s} s have passed: {said}")
            return 1
        stop.wait(wait)
    return 0


def _limit(given: CollectFlags, collector: Collector) -> None:
    """Keep span files and logs below their quotas."""
    if given.quota_gb is not None:
        actions, excess = quota.plan(
            collector.spool(),
            int(given.quota_gb * 1e9),
            drop_unstored=given.drop_unstored,
        )
        _carry_out(actions)
        if excess:
            _say(
                f"the spans exceed --quota-gb {given.quota_gb} by {excess} bytes, and "
                "nothing more may be deleted: the remaining files are not stored yet, "
                "or still being written"
            )
    if given.log_quota_gb is not None:
        actions, excess = quota.plan(
            collector.logs(),
            int(given.log_quota_gb * 1e9),
            drop_unstored=given.delete_logs,
        )
        written = logs.written_here() if actions else set()
        _carry_out([one for one in actions if not logs.is_among(one.path, written)])
        if excess:
            _say(
                f"the logs exceed --log-quota-gb {given.log_quota_gb} by {excess} "
                "bytes, and the rest is still being written"
                + ("" if given.delete_logs else ", or needs --delete-logs")
            )


def _carry_out(actions: Sequence[quota.Action]) -> None:
    for action in actions:
        if action.kind == "drop":
            _say(f"{action.path} is deleted before all of it was stored")
        try:
            quota.carry_out(action)
        except OSError as error:
            _say(f"{action.path}: {error.strerror or error}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
