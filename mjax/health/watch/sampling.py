"""Sample the counters of the ports of this host, at two rates.

Input: files in /sys/class/infiniband, and the rows of a run on this host. Output:
observations by port: all counters once a second; at intervals, for one port at a time,
the sent bytes every few milliseconds; the step of the newest row. Reading /sys has no
side effects. Source of names and units: Linux,
Documentation/ABI/stable/sysfs-class-infiniband.
"""

import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mjax.health.watch.samples import ACTIVE, Observation, Port, Sample, Step, Window

ROOT = Path("/sys/class/infiniband")
_RATE = re.compile(r"([0-9]{1,5}(?:\.[0-9])?) Gb/sec")
_STATE = re.compile(r"([0-9]): [A-Z_]+")
_NUMBER = re.compile(r"[0-9]{1,20}")
_FOLDERS = ("counters", "hw_counters")
_BITS_PER_BYTE = 8
_MAX_ROW_BYTES = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Sampling intervals of the ports."""

    sample_s: float = 1.0
    """Seconds between samples of all counters."""
    window_every_s: float = 30.0
    """Seconds between windows, over all ports together."""
    window_s: float = 2.0
    """Length of a window in seconds."""
    window_hz: float = 100.0
    """Reads per second of a window. Cards refresh counters every few ms."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            number = getattr(self, field.name)
            if not 0 < number < float("inf"):
                flag = "--" + field.name.replace("_", "-")
                raise ValueError(f"{flag} must be positive and finite, got {number}")


@dataclasses.dataclass(frozen=True)
class SampledPort:
    """A port of this host."""

    name: str
    path: Path
    port: Port

    def sample(self, time_s: float) -> Sample:
        """Return all its counters; an unreadable counter is absent."""
        counters = {}
        for folder in _FOLDERS:
            for path in sorted((self.path / folder).glob("*")):
                text = _text(path)
                if _NUMBER.fullmatch(text):
                    counters[path.name] = int(text)
        state = _STATE.fullmatch(_text(self.path / "state"))
        return Sample(
            time_s=time_s, counters=counters, state=int(state[1]) if state else None
        )

    def sent(self) -> int | None:
        """Return port_xmit_data; None if it cannot be read."""
        text = _text(self.path / "counters" / "port_xmit_data")
        return int(text) if _NUMBER.fullmatch(text) else None


def find_ports(root: Path = ROOT) -> list[SampledPort]:
    """Return the active ports of this host, ordered by name.

    Raises:
      ValueError: no port is active.
    """
    found = []
    for path in sorted(root.glob("*/ports/*")):
        state, rate = _STATE.fullmatch(_text(path / "state")), _text(path / "rate")
        speed = _RATE.match(rate)
        if state is None or int(state[1]) != ACTIVE or speed is None:
            continue
        gbit_per_s = float(speed[1])
        port = Port(
            link_layer="Ethernet"
            if _text(path / "link_layer") == "Ethernet"
            else "InfiniBand",
            rate_gbit_per_s=gbit_per_s,
            data_bytes_per_s=gbit_per_s * 1e9 / _BITS_PER_BYTE,
            data_counter_bits=64,
        )
        name = f"{path.parents[1].name}/{path.name}"
        found.append(SampledPort(name, path, port))
    if not found:
        raise ValueError(
            f"no active port below {root}; `python -m mjax.health check --only "
            "'infiniband.*'` says why"
        )
    return found


class Rows:
    """Reads steps from new rows of metrics.jsonl.

    The time at which a row is read counts as the end of its step.
    """

    def __init__(self, path: Path) -> None:
        """Start after the existing rows.

        Raises:
          ValueError: the path is a folder.
        """
        if path.is_dir():
            raise ValueError(f"{path} is a folder, not a file; move it away")
        self._path, self._rest = path, b""
        self._place = path.stat().st_size if path.exists() else 0

    def steps(self, now_s: float) -> list[Step]:
        """Return the step of the last new row; empty if there is no new row."""
        try:
            with self._path.open("rb") as file:
                # A run that resumes removes the rows of steps that it takes again.
                if (size := os.fstat(file.fileno()).st_size) < self._place:
                    self._place, self._rest = size, b""
                file.seek(self._place)
                data = file.read(_MAX_ROW_BYTES)
        except OSError:
            return []
        self._place += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = []
        for line in lines:
            try:
                took_s = float(json.loads(line)["step_s"])
            except (ValueError, TypeError, KeyError):
                continue
            if 0 < took_s < float("inf"):
                found.append(Step(end_s=now_s, step_s=took_s))
        return found[-1:]  # rows that are read together have no separate times


def observe(
    ports: list[SampledPort],
    rates: Rates,
    rows: Rows | None,
    until_s: float,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[SampledPort, Observation]]:
    """Yield (port, observation) for all ports, in time order.

    Args:
      ports: ports to read.
      rates: sampling intervals.
      rows: rows of the run on this host; its steps apply to each port.
      until_s: time on the clock at which to stop.
      clock: returns the time in seconds.
      sleep: waits for a number of seconds.
    """
    next_s, window_s, turn = clock(), clock() + rates.window_every_s, 0
    while (now_s := clock()) < until_s:
        if now_s < next_s:
            sleep(next_s - now_s)
            continue
        next_s = max(next_s + rates.sample_s, now_s)
        for port in ports:
            yield port, port.sample(now_s)
        for step in rows.steps(now_s) if rows is not None else []:
            for port in ports:
                yield port, step
        if now_s >= window_s:
            port = ports[turn % len(ports)]
            turn, window_s = turn + 1, now_s + rates.window_every_s
            window = _window(port, rates, clock, sleep)
            if window is not None:
                yield port, window


def _window(
    port: SampledPort,
    rates: Rates,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Window | None:
    """Read the sent bytes of one port at a high rate; other ports wait meanwhile."""
    times, sent = [], []
    until_s = clock() + rates.window_s
    while (now_s := clock()) < until_s:
        number = port.sent()
        if number is None:
            return None
        times.append(now_s)
        sent.append(number)
        sleep(1.0 / rates.window_hz)
    if len(times) < 2:
        return None
    return Window(
        time_s=np.array(times), port_xmit_data=np.array(sent, dtype=np.uint64)
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
