"""`health watch`: apply rules to a log, print the events, and act on them.

    health watch FILE|- --rules FILE [--state FILE] [--follow] [--replay-speed X]
        [--json] [--yes | --dry-run] [--events FILE] [--host NAME] [--year YEAR]
        [--time-zone NAME]
    health watch --release DEVICE --state FILE

Exit codes: 0 no event; 1 an event or an action, or the summary names a problem; 2 bad
input, or an error of a file that ended the watch. Events have the fields of the
launcher's events.jsonl.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import os
import select
import signal
import sqlite3
import sys
import time
import zoneinfo
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from mjax import printable
from mjax.cli import exit_codes
from mjax.cli.flags.standard import ArgumentParser
from mjax.health.events import actions, rules
from mjax.health.events.actions import Actions, Record
from mjax.health.events.engine import Engine
from mjax.health.events.logs import Line, Reader
from mjax.health.events.rules import Rule, RuleSet
from mjax.health.events.state import State

_CHUNK_BYTES = 2**16
_POLL_S = 0.5
"""Seconds between two reads of a followed log. Nobody notices a delay of that
length."""
_NS = 10**9


class _StopError(Exception):
    """SIGTERM or SIGINT."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = _parser().parse_args(argv)
    try:
        _check(args)
        if args.release is not None:
            return _release(args)
        return _watch(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    except (OSError, sqlite3.Error) as error:
        print(
            f"error: the watch has ended: {error}; check the log and the files of "
            "--state and --events, then start it again",
            file=sys.stderr,
        )
        return exit_codes.BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="python -m mjax.health watch", description="Apply rules to a log."
    )
    add = parser.add_argument
    add("log", nargs="?", help="file, or - for stdin")
    add("--rules", type=Path, help="TOML file of rules")
    add("--state", type=Path, help="SQLite file of the disabled devices")
    add("--follow", action="store_true", help="wait for more lines, as tail -F does")
    add(
        "--replay-speed",
        type=float,
        help="log seconds to replay per second; default: no wait",
    )
    add("--json", action="store_true", help="print events as JSON lines")
    add("--yes", action="store_true", help="run actions with the policy confirm")
    add("--dry-run", action="store_true", help="run no action, whatever its policy")
    add("--events", type=Path, help="append events to this file as JSON lines")
    add("--host", help="host of lines that do not name one")
    add("--year", type=int, help="year of the first line, if the log has none")
    add(
        "--time-zone",
        default="UTC",
        help="time zone of times that have none, such as Europe/Paris",
    )
    add(
        "--release",
        metavar="DEVICE",
        help="forget a device that a person has enabled again",
    )
    return parser


def _check(args: argparse.Namespace) -> None:
    """Raise if flags contradict each other."""
    if args.release is not None:
        if args.state is None or args.log is not None:
            raise ValueError("--release takes --state FILE and no log")
        if not args.state.exists():
            raise ValueError(
                f"--state {args.state} does not exist; give the file that the watch "
                "was started with"
            )
        return
    if args.log is None or args.rules is None:
        raise ValueError("give a log (a file, or - for stdin) and --rules FILE")
    speed = args.replay_speed
    if speed is not None and not (speed > 0 and math.isfinite(speed)):
        raise ValueError(
            f"--replay-speed must be finite and above 0, got {speed:g}; give for "
            "example 10, or leave it out to read without waiting"
        )
    if speed is not None and (args.follow or args.log == "-"):
        raise ValueError("--replay-speed needs a file, and no --follow")
    if args.follow and args.log == "-":
        raise ValueError("--follow needs a file; stdin is always read to its end")
    if args.yes and args.dry_run:
        raise ValueError("--yes and --dry-run contradict each other; give one")
    if args.year is not None and not 1970 <= args.year <= 9000:
        raise ValueError(f"--year must be 1970 to 9000, got {args.year}")


def _release(args: argparse.Namespace) -> int:
    with contextlib.closing(State(args.state)) as state:
        acting = Actions(state, rules.Limits(), may=lambda _: False, run=lambda *_: 127)
        record = acting.release(args.release, time.time_ns())
    print(record.text)
    return 0


def _watch(args: argparse.Namespace) -> int:
    rule_set = rules.read(args.rules)
    may = _permission(args)
    if args.state is None and any(may(rule) for rule in rule_set.rules):
        raise ValueError(
            "--state FILE is missing: rules may run commands, and a restart must know "
            "which devices they disabled; give it, or --dry-run"
        )
    year = args.year or datetime.datetime.now(datetime.UTC).year
    reader = Reader(year=year, zone=_zone(args.time_zone))
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(contextlib.closing(State(args.state)))
        log = stack.enter_context(_opened(args.log))
        events = args.events and stack.enter_context(_appended(args.events))
        acting = Actions(state, rule_set.limits, may=may, run=actions.run)
        watch = Watch(rule_set, acting, _teller(args, events))
        stack.enter_context(_stopped_by_signals())
        with contextlib.suppress(_StopError):
            _feed(args, reader, log, watch)
        return _summary(reader, watch)


def _permission(args: argparse.Namespace) -> Callable[[Rule], bool]:
    """Return a function that says whether the commands of a rule may be run."""
    allowed = {"run", "confirm"} if args.yes else {"run"}
    if args.dry_run:
        allowed = set()
    return lambda rule: bool(rule.action) and rule.policy in allowed


class Watch:
    """Applies rules to lines, and reports and counts the events."""

    def __init__(
        self, rule_set: RuleSet, acting: Actions, tell: Callable[[Record, Line], None]
    ) -> None:
        """Start before the first line."""
        self.engine = Engine(rule_set.rules)
        self._acting, self._tell = acting, tell
        self._newest_ns: int | None = None
        self._line: Line | None = None
        self.num_events = 0

    def feed(self, line: Line) -> None:
        """Apply the rules to a line, then do the actions due at its time."""
        for detection in self.engine.feed(line):
            self._record(self._acting.handle(detection), line)
        if line.time_ns is not None:
            self.advance(line.time_ns, line)

    def advance(self, time_ns: int, line: Line | None = None) -> None:
        """Run the actions due at a log time; the time never goes back."""
        line = line or self._line
        if line is None:
            return
        self._line = line
        if self._newest_ns is None:
            self._record(self._acting.resume(time_ns), line)
        self._newest_ns = max(time_ns, self._newest_ns or 0)
        self._record(self._acting.advance(self._newest_ns), line)

    @property
    def newest_ns(self) -> int | None:
        """The latest log time."""
        return self._newest_ns

    def _record(self, records: Sequence[Record], line: Line) -> None:
        for record in records:
            self.num_events += 1
            self._tell(record, line)


def _feed(
    args: argparse.Namespace, reader: Reader, log: BinaryIO, watch: Watch
) -> None:
    begin_ns: int | None = None
    start_s = time.monotonic()
    for data, is_over in _chunks(args, log, watch):
        for line in reader.feed(data, is_over=is_over):
            if args.replay_speed is not None and line.time_ns is not None:
                begin_ns = line.time_ns if begin_ns is None else begin_ns
                due_s = start_s + (line.time_ns - begin_ns) / _NS / args.replay_speed
                time.sleep(max(0.0, due_s - time.monotonic()))
            watch.feed(line)


def _chunks(
    args: argparse.Namespace, log: BinaryIO, watch: Watch
) -> Iterator[tuple[bytes, bool]]:
    """Yield (bytes, whether the file ends after them); with --follow, never end."""
    while data := _read(log):
        yield data, False
    if not args.follow:
        yield b"", True
        return
    path, waited_s = Path(args.log), time.monotonic()
    while True:
        data = log.read(_CHUNK_BYTES)
        if not data and _is_replaced(path, log):
            while data := log.read(
                _CHUNK_BYTES
            ):  # the rest of the file that was replaced
                yield data, False
            yield b"", True
            log.close()
            log = path.open("rb", buffering=0)
            continue
        if data:
            waited_s = time.monotonic()
            yield data, False
        else:
            time.sleep(_POLL_S)
            passed_s = time.monotonic() - waited_s
            waited_s = time.monotonic()
            if watch.newest_ns is not None:  # time passes even without new lines
                watch.advance(watch.newest_ns + int(passed_s * _NS))


def _read(log: BinaryIO) -> bytes:
    """Read the available bytes without waiting for a full chunk."""
    with contextlib.suppress(ValueError, OSError):
        select.select([log], [], [])
    return os.read(log.fileno(), _CHUNK_BYTES)


def _is_replaced(path: Path, log: BinaryIO) -> bool:
    """Return whether the log was rotated, or truncated below the read position."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    opened = os.fstat(log.fileno())
    is_other = (named.st_ino, named.st_dev) != (opened.st_ino, opened.st_dev)
    return is_other or named.st_size < log.tell()


def _teller(
    args: argparse.Namespace, events: TextIO | None
) -> Callable[[Record, Line], None]:
    """Return a function that prints a record and appends it to --events."""

    def tell(record: Record, line: Line) -> None:
        fields: dict[str, Any] = {"time_ns": record.time_ns, "source": "health.watch"}
        fields |= {"host": line.host or args.host, "rank": None, "generation": None}
        fields |= dataclasses.asdict(record)
        written = json.dumps(fields)
        if events is not None:
            events.write(written + "\n")
            events.flush()
        print(written if args.json else _shown(record, line), flush=True)

    return tell


def _shown(record: Record, line: Line) -> str:
    """Return a record for a person, without control characters."""
    if line.is_since_boot:
        when = f"{record.time_ns / _NS:.3f} s since boot"
    else:
        seconds, part = divmod(record.time_ns, _NS)
        shown = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
        when = f"{shown:%Y-%m-%d %H:%M:%S}.{part // 1_000_000:03}Z"
    lines = [f"{when} {record.severity} {record.kind}: {record.text}"]
    for name in ("status", "ticket"):
        if name in record.data:
            lines.append(f"  {name}: {record.data[name]}")
    for step, command in record.data.get("commands", {}).items():
        lines.append(f"  {step}: {command}")
    return "\n".join(printable(one, kept="") for one in lines)


def _summary(reader: Reader, watch: Watch) -> int:
    """Print a summary to stderr; return the exit code."""
    read, matched = reader.counts, watch.engine.counts
    parts = [
        f"{read.lines} lines",
        f"{matched.matched} matched",
        f"{watch.num_events} events and actions",
        f"{matched.duplicates} duplicates",
        f"{matched.cooling} within a cool-down",
        f"{read.cut} lines truncated",
    ]
    problems = []
    if not read.stamped:
        problems.append(
            "no line had a time in a known format, so only rules with count 1 can fire"
        )
    if matched.untimed:
        problems.append(f"{matched.untimed} matches had no time and were not counted")
    if matched.dropped_keys:
        problems.append(f"{matched.dropped_keys} devices were forgotten: too many")
    print("; ".join([", ".join(parts), *problems]), file=sys.stderr)
    return 1 if watch.num_events or problems else 0


def _zone(name: str) -> datetime.tzinfo:
    try:
        return datetime.UTC if name == "UTC" else zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError) as error:
        raise ValueError(
            f"--time-zone {name}: no such zone; give one such as Europe/Paris"
        ) from error


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        log = Path(path).open("rb", buffering=0)  # noqa: SIM115, closed below
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    with log:
        yield log  # type: ignore[misc]  # FileIO is read as BinaryIO is


@contextlib.contextmanager
def _appended(path: Path) -> Iterator[TextIO]:
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--events {path} cannot be written: {error.strerror}"
        ) from error
    with file:
        yield file


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raise `_StopError` on SIGTERM and SIGINT; the watch then ends with a summary."""

    def stop(*_: object) -> None:
        raise _StopError

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
