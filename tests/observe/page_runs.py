"""Runs for the tests of the live page, written line by line as trainers write them."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mjax.observe import spans
from mjax.observe.page.model import Model, Share
from mjax.observe.spans import Event, Header, Line, Span

MS = 10**6
STEP_MS = 100


class Rank:
    """The file of one process; its clock shows the time since the epoch."""

    def __init__(self, work_dir: Path, rank: int = 0, **changes: Any) -> None:
        """Write the header."""
        now_ns = changes.pop("now_ns", time.time_ns())
        fields: dict[str, Any] = {
            "run": "run-a",
            "host": f"node{rank}",
            "rank": rank,
            "generation": 1,
            "pid": 2**22 + 1,  # above the largest that Linux gives
            "wall_ns": now_ns,
            "monotonic_ns": now_ns,
            "devices": (rank,),
            "mesh": {"pp": 1, "dp_replicate": 1, "dp_shard": rank + 1, "tp": 1},
        }
        self.header = Header(**(fields | changes))
        folder = work_dir / spans.FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / spans.file_name(self.header)
        self.num_lines = 0
        self.now_ns = now_ns
        self.append(spans.encode(self.header))

    def append(self, data: bytes) -> None:
        """Write bytes."""
        with self.path.open("ab") as file:
            file.write(data)

    def line(self, **fields: Any) -> None:
        """Write a line with the next number."""
        self.append(spans.encode(Line(n=self.num_lines, **fields)))
        self.num_lines += 1

    def barrier(self, number: int) -> None:
        """Enter a barrier and leave it a millisecond later."""
        start_ns, self.now_ns = self.now_ns, self.now_ns + MS
        span = Span("barrier", "idle", "barrier", start_ns, self.now_ns)
        self.line(spans=(span,), barrier=number)

    def steps(self, first: int, last: int, slower_ms: int = 0) -> None:
        """Run steps of 100 ms: data, forward and backward on the device, norm."""
        for step in range(first, last + 1):
            self.line(step=step, spans=tuple(self._step(slower_ms)))

    def _step(self, slower_ms: int) -> Iterator[Span]:
        begin_ns = self.now_ns
        compute_ms = 60 + slower_ms
        device = f"device:{self.header.devices[0]}"
        at_ms = 0
        parts: tuple[tuple[str, spans.Kind, str, int], ...] = (
            ("data", "data", "host", 10),
            ("dispatch", "host", "host", 10),
            ("forward", "compute", device, compute_ms // 3),
            ("backward", "compute", device, compute_ms - compute_ms // 3),
            ("norm", "dp", device, 20 - slower_ms),
            ("device", "compute", "host", 80),
        )
        for name, kind, stream, took_ms in parts:
            start_ns = begin_ns + at_ms * MS
            if name == "device":
                start_ns = begin_ns + 20 * MS
            yield Span(name, kind, stream, start_ns, start_ns + took_ms * MS)
            at_ms += took_ms
        self.now_ns += STEP_MS * MS
        yield Span("step", "compute", "step", begin_ns, self.now_ns)

    def event(self, kind: str, text: str, severity: Any = "warning") -> None:
        """Write an event of the process."""
        told = Event(time_ns=self.now_ns, kind=kind, text=text, severity=severity)
        self.line(event=told)


def write_rows(work_dir: Path, first: int, last: int, **fields: Any) -> None:
    """Append rows of metrics."""
    with (work_dir / "metrics.jsonl").open("ab") as file:
        for step in range(first, last + 1):
            row = {"step": step, "loss": 5.0 - step / 100, "step_s": 0.1}
            row |= {"tokens_per_s": 1000.0, "data_wait_s": 0.01, "mfu": None}
            file.write(json.dumps(row | fields).encode() + b"\n")


def write_event(work_dir: Path, **fields: Any) -> None:
    """Append an event of the driver."""
    event = {"time_ns": time.time_ns(), "source": "driver", "generation": 1}
    event |= {"host": None, "rank": None, "kind": "note", "severity": "info"}
    with (work_dir / "events.jsonl").open("ab") as file:
        line = json.dumps(event | {"text": "", "data": {}} | fields)
        file.write(line.encode() + b"\n")


def read_all(feed: Any, model: Model | None = None) -> tuple[Model, list[Share]]:
    """Poll a feed until it has nothing more."""
    model = model or Model()
    shares = []
    while True:
        share = feed.poll()
        model.take(share)
        shares.append(share)
        if not share.is_behind:
            return model, shares


def write_run(work_dir: Path, ranks: Sequence[int] = (0, 1, 2, 3)) -> list[Rank]:
    """Write a run of data-parallel ranks with 12 steps and two barriers."""
    now_ns = time.time_ns() - 60 * 10**9
    mesh = {"pp": 1, "dp_replicate": 1, "dp_shard": max(ranks) + 1, "tp": 1}
    files = [Rank(work_dir, rank, mesh=mesh, now_ns=now_ns) for rank in ranks]
    for file in files:
        file.barrier(0)
        file.steps(1, 12)
        file.barrier(1)
    write_rows(work_dir, 1, 12)
    (work_dir / "config.json").write_text('{"steps": 12}')
    return files
