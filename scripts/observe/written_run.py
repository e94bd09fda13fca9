"""A run that is being written, and its comparison with a store.

Input: a work dir, a seed. Output: files that grow like those of a trainer, with a
restart in the middle, and a comparison of all rows with those of a database.
"""

import collections
import dataclasses
import hashlib
import json
import random
import threading
from pathlib import Path
from typing import Any

from mjax.observe import spans
from mjax.observe.store.base import Store

RANKS = 4
RUN = "0123456789abcdef"
_NAMES: tuple[tuple[str, spans.Kind], ...] = (
    *(("data", "data"), ("dispatch", "host"), ("device", "idle"), ("metrics", "host")),
    *(("forward", "compute"), ("backward", "compute"), ("all-reduce", "dp")),
)


class Writer:
    """Writes the files of a run in a thread: bursts of lines, one restart."""

    def __init__(self, work_dir: Path, seed: int, *, burst: int, pause_s: float):
        """Start; the restart happens when `restart` is called."""
        self._work_dir = work_dir
        self._random = random.Random(seed)
        self._burst, self._pause_s = burst, pause_s
        self._stop, self._restart = threading.Event(), threading.Event()
        self._step = 0
        (work_dir / spans.FOLDER).mkdir(parents=True)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def restart(self) -> None:
        """Kill all ranks in the middle of a line, and resume from an older step."""
        self._restart.set()

    def end(self) -> None:
        """Write the last lines."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        generation = 1
        files = self._open(generation)
        while not self._stop.wait(self._pause_s):
            if self._restart.is_set():
                self._restart.clear()
                for file, _ in files:
                    file.write(b'{"n":9999,"step":9')  # a write that was cut off
                    file.close()
                self._step = max(0, self._step - self._burst)
                self._drop_rows()
                generation += 1
                files = self._open(generation)
            self._append(files)
        for file, counts in files:
            file.write(spans.encode(spans.Line(n=counts[0], end=0)))
            file.close()

    def _open(self, generation: int) -> list[tuple[Any, list[int]]]:
        files = []
        for rank in range(RANKS):
            header = spans.Header(
                run=RUN,
                host=f"node{rank}",
                rank=rank,
                generation=generation,
                pid=1,
                wall_ns=10**18,
                monotonic_ns=10**12,
                devices=(rank,),
                mesh={"dp_shard": RANKS},
            )
            path = self._work_dir / spans.FOLDER / spans.file_name(header)
            file = path.open("ab", buffering=0)
            file.write(spans.encode(header))
            files.append((file, [0]))
        return files

    def _append(self, files: list[tuple[Any, list[int]]]) -> None:
        for _ in range(self._burst):
            self._step += 1
            for file, counts in files:
                file.write(spans.encode(self._line(counts[0])))
                counts[0] += 1
            row = {"step": self._step, "loss": self._random.random()}
            self._text("metrics.jsonl", row | {"tokens": 1024})
        event = {"time_ns": self._random.getrandbits(60), "source": "driver"}
        event |= {"generation": 1, "host": None, "rank": None, "kind": "note"}
        event |= {"severity": "info", "text": f"step {self._step}, ½", "data": {}}
        self._text("events.jsonl", event)

    def _line(self, n: int) -> spans.Line:
        start = self._random.getrandbits(50)
        found = []
        for name, kind in _NAMES:
            end = start + self._random.getrandbits(20)
            found.append(spans.Span(name, kind, "host", start, end))
            start = end
        return spans.Line(n=n, step=self._step, spans=tuple(found))

    def _text(self, name: str, row: dict[str, Any]) -> None:
        with (self._work_dir / name).open("ab", buffering=0) as file:
            file.write(json.dumps(row).encode() + b"\n")

    def _drop_rows(self) -> None:
        """Remove the rows of steps that will be repeated, as the trainer does."""
        path = self._work_dir / "metrics.jsonl"
        if path.exists():
            lines = path.read_bytes().splitlines(keepends=True)[: self._step]
            temporary = path.with_name("metrics.jsonl.tmp")
            temporary.write_bytes(b"".join(lines))
            temporary.replace(path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The rows of files and those of a store."""

    written: int
    lost: int
    """Rows of the files that are missing from the store or differ there."""
    doubled: int
    """Rows of the store beyond those of the files."""
    digest_written: str
    digest_stored: str
    sums_agree: bool
    """Whether the sums of the heat map equal those of the spans."""


def compare(work_dir: Path, store: Store) -> Comparison:
    """Compare every field of every row."""
    written, stored = collections.Counter(_written(work_dir)), collections.Counter()
    for table in (_SPANS, _METRICS, _EVENTS):
        stored.update(store.query(table))
    sums = store.query("select sum(spans), sum(ns) from phase_totals")
    exact = store.query("select count(*), sum(end_ns - start_ns) from spans")
    return Comparison(
        written=sum(written.values()),
        lost=sum((written - stored).values()),
        doubled=sum((stored - written).values()),
        digest_written=_digest(written),
        digest_stored=_digest(stored),
        sums_agree=sums == exact,
    )


_SPANS = """select 'span', p.run, p.generation, p.rank, p.host, s.n, s.i, s.step,
  s.name, s.kind, s.stream, s.start_ns, s.end_ns
  from spans s join processes p on p.file_id = s.file_id"""
_METRICS = "select 'row', run, step, loss, tokens, line from metrics"
_EVENTS = "select 'event', run, time_ns, source, kind, text, data from events"


def _written(work_dir: Path) -> list[tuple[Any, ...]]:
    """Read the files with the package's reader, not the store's."""
    rows: list[tuple[Any, ...]] = []
    files, _ = spans.read_run(work_dir)
    for file in files:
        head = file.header
        process = ("span", head.run, head.generation, head.rank, head.host)
        for line in file.lines:
            rows += [
                (*process, line.n, i, line.step, *span)
                for i, span in enumerate(line.spans)
            ]
    for text in (work_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(text)
        kept = json.dumps(row)
        rows.append(("row", RUN, row["step"], row["loss"], row["tokens"], kept))
    for text in (work_dir / "events.jsonl").read_text().splitlines():
        row = json.loads(text)
        named = [row[name] for name in ("time_ns", "source", "kind", "text")]
        rows.append(("event", RUN, *named, json.dumps(row["data"])))
    return rows


def _digest(rows: collections.Counter[tuple[Any, ...]]) -> str:
    lines = sorted(repr(row) for row in rows.elements())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
