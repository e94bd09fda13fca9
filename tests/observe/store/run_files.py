"""Files of a made-up run, written as a trainer does."""

import json
from collections.abc import Iterable
from pathlib import Path

from mjax.observe import spans
from mjax.observe.store.batches import Batch, Kind, digest

NAMES: tuple[tuple[str, spans.Kind], ...] = (
    *(("data", "data"), ("dispatch", "host"), ("device", "idle"), ("metrics", "host")),
    *(("forward", "compute"), ("backward", "compute"), ("all-reduce", "dp")),
)
STEP_NS = 1_000_000_000


def header(rank: int = 0, generation: int = 1, run: str = "a" * 16) -> spans.Header:
    """Return the header of a process; two ranks share a host."""
    return spans.Header(
        run=run,
        host=f"node{rank // 2}",
        rank=rank,
        generation=generation,
        pid=100 + rank,
        wall_ns=5_000 * STEP_NS,
        monotonic_ns=1_000 * STEP_NS,
        devices=(rank,),
        mesh={"dp_shard": 4},
    )


def line(n: int, rank: int = 0) -> spans.Line:
    """Return the line of a step, with times that are unique to its number and rank."""
    begin = 1_000 * STEP_NS + n * STEP_NS
    found = []
    for i, (name, kind) in enumerate(NAMES):
        stream = "host" if i < 4 else f"device:{rank}"
        start = begin + i * 1_000_000
        found.append(
            spans.Span(name, kind, stream, start, start + 1_000 * rank + n + 1)
        )
    return spans.Line(n=n, step=n + 1, spans=tuple(found))


def span_bytes(rank: int, num_lines: int, generation: int = 1) -> bytes:
    """Return a whole file of spans."""
    lines = [line(n, rank) for n in range(num_lines)]
    return b"".join(map(spans.encode, [header(rank, generation), *lines]))


def span_path(work_dir: Path, rank: int, generation: int = 1) -> Path:
    """Return the path of a file of spans; its folder is made."""
    path = work_dir / spans.FOLDER / spans.file_name(header(rank, generation))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def metric_bytes(steps: Iterable[int], loss: float = 1.0) -> bytes:
    """Return rows of metrics.jsonl."""
    rows = [
        {"step": step, "loss": loss + step, "tokens": 64, "tokens_per_s": 1e3}
        for step in steps
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def event_bytes(numbers: Iterable[int]) -> bytes:
    """Return lines of events.jsonl."""
    rows = [
        {
            **{"time_ns": number, "source": "driver", "generation": 1},
            **{"kind": "started", "severity": "info", "host": None, "rank": None},
            **{"text": f"event {number}", "data": {"number": number}},
        }
        for number in numbers
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def batch(data: bytes, source: str, kind: Kind = "spans", **fields: object) -> Batch:
    """Make a batch of a whole file."""
    lines = data.split(b"\n")
    given = {
        **{"run": "a" * 16, "source": source, "kind": kind},
        **{"identity": digest(lines[0]), "start": 0, "end": len(data)},
        **{"first_line": 1, "tail": digest(lines[-2]), "data": data},
    }
    return Batch(**(given | fields))  # type: ignore[arg-type]
