"""`python -m mjax.health ports`: watch the network ports of this host.

Input: flags. Output: an event for each link flap, slow decay, neighbour load, loss of
the step period or port unlike the other ports, as JSON lines with --json or in
--events; on stderr, every half hour and at the end, a line for each port with the
period of its traffic. Exit codes: 0 nothing was found, 1 something was, 2 bad input.
"""

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from mjax.cli import exit_codes
from mjax.cli.flags.standard import ArgumentParser
from mjax.health.watch.compare_ports import compare
from mjax.health.watch.samples import Detection, Observation, seen_s
from mjax.health.watch.sampling import (
    ROOT,
    Rates,
    Rows,
    SampledPort,
    find_ports,
    observe,
)
from mjax.health.watch.watcher import DEFAULTS, Watcher


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = ArgumentParser(
        prog="python -m mjax.health ports",
        description=(__doc__ or "").splitlines()[0],
    )
    add = parser.add_argument
    rates = Rates()
    stop = "seconds after which to stop; absent: stop at a signal"
    add("--seconds", type=float, help=stop)
    sample = "seconds between samples of all counters"
    add("--sample-s", type=float, default=rates.sample_s, help=sample)
    every = "seconds between windows, over all ports together"
    add("--window-every-s", type=float, default=rates.window_every_s, help=every)
    length = "length of a window in seconds"
    add("--window-s", type=float, default=rates.window_s, help=length)
    reads = "reads per second of a window"
    add("--window-hz", type=float, default=rates.window_hz, help=reads)
    add(
        "--work-dir",
        type=Path,
        help="work dir of the run on this host, for its step times",
    )
    add("--root", type=Path, default=ROOT, help="folder of the ports")
    add("--json", action="store_true", help="print events as JSON lines")
    add("--events", type=Path, help="append events to this file as JSON lines")
    args = parser.parse_args(argv)
    try:
        return _watch(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT


def _watch(args: argparse.Namespace) -> int:
    names = ("sample_s", "window_every_s", "window_s", "window_hz")
    rates = Rates(**{name: getattr(args, name) for name in names})
    if args.seconds is not None and not args.seconds > 0:
        raise ValueError(f"--seconds must be positive, got {args.seconds:g}")
    ports = find_ports(args.root)
    rows = None if args.work_dir is None else Rows(args.work_dir / "metrics.jsonl")
    until_s = float("inf") if args.seconds is None else time.time() + args.seconds
    print(f"watching {', '.join(port.name for port in ports)}", file=sys.stderr)
    seen = observe(ports, rates, rows, until_s)
    if args.events is None:
        return _tell(ports, seen, args.json, None)
    with args.events.open("a", encoding="utf-8") as events:
        return _tell(ports, seen, args.json, events)


def _tell(
    ports: Sequence[SampledPort],
    seen: Iterable[tuple[SampledPort, Observation]],
    is_json: bool,
    events: IO[str] | None,
) -> int:
    """Feed all observations to the detectors; return the exit code."""
    watchers = {port.name: Watcher(port.port) for port in ports}
    num_found = 0

    def tell(name: str, found: Detection) -> None:
        nonlocal num_found
        num_found += 1
        line = json.dumps(event(name, found))
        if events is not None:
            events.write(line + "\n")
            events.flush()
        text = f"{name}: {found.kind}: {found.evidence}"
        print(line if is_json else text, flush=True)

    traffic = {name: watcher.step_traffic for name, watcher in watchers.items()}
    named: set[str] = set()
    compare_s = DEFAULTS.periods.compare_s
    now_s, next_s = 0.0, float("inf")

    def tell_periods() -> None:
        nonlocal named
        compared = compare(traffic, now_s, DEFAULTS.periods)
        for name, known in compared.known.items():
            print(f"{name}: period: {known.text}", file=sys.stderr, flush=True)
        for name, found in compared.unlike.items():
            if name not in named:
                tell(name, found)
        named = set(compared.unlike)

    try:
        for port, observation in seen:
            now_s = seen_s(observation)
            next_s = min(next_s, now_s + compare_s)
            if now_s >= next_s:
                tell_periods()
                next_s = now_s + compare_s
            for found in watchers[port.name].feed(observation):
                tell(port.name, found)
    except KeyboardInterrupt:
        pass
    tell_periods()
    for name, watcher in watchers.items():
        for found in watcher.finish():
            tell(name, found)
    return 1 if num_found else 0


def event(port: str, found: Detection) -> dict[str, Any]:
    """Return a detection with the fields of events.jsonl."""
    return {
        "time_ns": int(found.until_s * 1e9),
        "source": "health.ports",
        "host": os.environ.get("MJAX_HOST") or socket.gethostname(),
        "rank": None,
        "generation": None,
        "kind": f"port_{found.kind}",
        "severity": "warning",
        "text": f"{port}: {found.evidence}",
        "data": {
            "port": port,
            "onset_s": found.onset_s,
            "until_s": found.until_s,
            "score": found.score,
            **found.numbers,
        },
    }
