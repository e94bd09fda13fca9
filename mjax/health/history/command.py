"""`python -m mjax.health history`: past events of hosts, and which hosts to trust.

    history show       --history FILE [--host gpu001]
    history order      --history FILE --hosts gpu[001-048]
    history may-return --history FILE --host gpu001
    history import     --history FILE --events RUN/events.jsonl
    history record     --history FILE --host gpu001 --kind burn_passed --text "..."
    history correlate  --samples FILE

Exit codes: 0 done, 1 the host may not return, lines could not be read, or the file is
in use, 2 bad input.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mjax import printable
from mjax.cli import exit_codes
from mjax.cli.flags.standard import ArgumentParser
from mjax.health.cluster.ranges import expand
from mjax.health.history import correlation, run_events, samples
from mjax.health.history.events import CAUSES, HostEvent, Kind
from mjax.health.history.reputation import HALF_LIFE_DAYS, Reputation


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
      SystemExit: argparse has printed the help (code 0) or a syntax error in the flags
        (code 2).
    """
    args = _parser().parse_args([*argv])
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="python -m mjax.health history",
        description=(__doc__ or "").splitlines()[0],
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True)
    show = _command(
        commands, "show", _show, "show hosts with their scores, or one host"
    )
    show.add_argument("--host", help="show the events of this host")
    order = _command(commands, "order", _order, "list hosts, healthiest first")
    order.add_argument("--hosts", required=True, help="such as gpu[001-048]")
    may = _command(
        commands, "may-return", _may_return, "check whether a host may be used again"
    )
    may.add_argument("--host", required=True, help="name of the host")
    add = _command(
        commands, "import", _import, "import the events of a run"
    ).add_argument
    add("--events", type=Path, required=True, help="events.jsonl of its work dir")
    add = _command(commands, "record", _record, "add an event manually").add_argument
    add("--host", required=True, help="name of the host")
    add("--kind", required=True, choices=[kind.value for kind in Kind])
    add("--cause", default="", choices=["", *CAUSES], help="cause of a fault")
    add("--text", default="", help="description for a person")
    correlate = commands.add_parser(
        "correlate", help="correlate statistics with step times"
    )
    add = correlate.add_argument
    add("--samples", type=Path, required=True, help="JSON lines with host, sample, ...")
    rate = correlation.FALSE_DISCOVERY_RATE
    add("--rate", type=float, default=rate, help="false discovery rate")
    add("--json", action="store_true", help="print one JSON object")
    correlate.set_defaults(run=_correlate)
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, allow_abbrev=False)
    add = parser.add_argument
    made = "SQLite file; import and record create it if absent"
    add("--history", type=Path, required=True, help=made)
    halved = "days after which the weight of an event is halved"
    add("--half-life-days", type=float, default=HALF_LIFE_DAYS, help=halved)
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)
    return parser


def _open(args: argparse.Namespace, *, is_made: bool = False) -> Reputation:
    """Open the history; only commands that write create a new one."""
    if not is_made and not os.path.exists(args.history):
        raise ValueError(
            f"--history {args.history} does not exist; create it with `history import` "
            "or `history record`"
        )
    return Reputation(args.history, half_life_days=args.half_life_days)


def _show(args: argparse.Namespace) -> int:
    with _open(args) as reputation:
        standings = reputation.standings(None if args.host is None else [args.host])
        events = reputation.events(args.host) if args.host is not None else []
    if args.json:
        found: dict[str, Any] = {"hosts": [dataclasses.asdict(s) for s in standings]}
        if args.host is not None:
            found["events"] = [dataclasses.asdict(event) for event in events]
        print(json.dumps(found))
        return 0
    for one in sorted(standings, key=lambda s: -s.score):
        state = f"may not be used: {one.why_not}" if one.why_not else "may be used"
        print(f"{one.host:<20} {one.score:8.2f}  {one.num_faults:4} faults  {state}")
    for event in events:
        cause = f" ({event.cause})" if event.cause else ""
        print(f"{_when(event.time_ns)}  {event.kind.value}{cause}  {_line(event.text)}")
    return 0


def _order(args: argparse.Namespace) -> int:
    hosts = expand(args.hosts)
    if len(set(hosts)) != len(hosts):
        raise ValueError(f"--hosts {args.hosts} names a host twice")
    with _open(args) as reputation:
        found = reputation.order(hosts)
    print(json.dumps({"hosts": found}) if args.json else "\n".join(found))
    return 0


def _may_return(args: argparse.Namespace) -> int:
    with _open(args) as reputation:
        why_not = reputation.why_not(args.host)
        num = len(reputation.events(args.host))
    if args.json:
        found = {"host": args.host, "may_return": not why_not, "why_not": why_not}
        print(json.dumps(found | {"events": num}))
    else:
        known = "" if num else "; no event of it is known"
        print(f"{args.host} may not return: {why_not}" if why_not else f"yes{known}")
    return 1 if why_not else 0


def _import(args: argparse.Namespace) -> int:
    counts = run_events.Counts()
    with _open(args, is_made=True) as reputation:
        num = reputation.record_all(run_events.read(args.events, counts))
    found = {"new": num, **dataclasses.asdict(counts)}
    if args.json:
        print(json.dumps(found))
    else:
        print(f"{num} new events of hosts from {counts.num_lines} lines")
        if counts.is_cut:
            print(
                "the last line is incomplete and was skipped; import the file again "
                "later"
            )
    if counts.num_unreadable:
        print(
            f"error: {counts.num_unreadable} lines could not be read, first "
            f"{counts.first_unreadable}",
            file=sys.stderr,
        )
        return 1
    return 0


def _record(args: argparse.Namespace) -> int:
    kind = Kind(args.kind)
    if (kind is Kind.FAULT) != bool(args.cause):
        raise ValueError(
            "--kind fault needs --cause, and no other kind has one, got --kind "
            f"{kind.value} --cause {args.cause or 'none'}"
        )
    event = HostEvent(
        host=args.host,
        kind=kind,
        time_ns=time.time_ns(),
        text=args.text,
        cause=args.cause,
    )
    with _open(args, is_made=True) as reputation:
        reputation.record(event)
        why_not = reputation.why_not(args.host)
    if args.json:
        print(json.dumps({"host": args.host, "why_not": why_not}))
    else:
        print(f"recorded; {args.host} may{' not' if why_not else ''} be used")
    return 0


def _correlate(args: argparse.Namespace) -> int:
    try:
        with args.samples.open("rb") as file:
            lines = iter(lambda: file.readline(samples.MAX_LINE_BYTES), b"")
            statistics, step_s = samples.read(lines, str(args.samples))
    except OSError as error:
        raise ValueError(
            f"--samples {args.samples} cannot be read: {error.strerror}"
        ) from error
    found = correlation.correlate(statistics, step_s, rate=args.rate)
    if args.json:
        print(json.dumps(dataclasses.asdict(found)))
        return 0
    print(f"{'statistic':<28} {'rho':>7} {'null 95%':>9} {'p':>8} {'q':>8}")
    for one in found.associations:
        mark = "  <- stands out" if one.is_discovery else ""
        numbers = f"{one.rho:7.3f} {one.null_rho:9.3f} {one.p:8.4f} {one.q:8.4f}"
        print(f"{one.name:<28} {numbers}{mark}")
    for name, why in found.not_tested.items():
        print(f"{name:<28} not tested: {why}")
    num = sum(one.is_discovery for one in found.associations)
    print(
        f"{num} of {found.num_tests} statistics stand out at a false discovery rate of "
        f"{found.rate:g}; the null model has {found.num_shifts} shifts"
    )
    if found.problem:
        print(found.problem)
    return 0


def _when(time_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_ns / 1e9))


def _line(text: str) -> str:
    """Return the first line of a text, without control characters."""
    return printable(text.splitlines()[0] if text else "", kept="")
