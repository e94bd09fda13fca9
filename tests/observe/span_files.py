"""Span files for tests: starts of a run, on clocks that the test chooses."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from mjax.observe import spans
from mjax.observe.spans import Header, Line, Span

SECOND = 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """One process; its clocks are ahead of true time."""

    rank: int = 0
    generation: int = 1
    host: str = "node"
    run: str = "a1"
    monotonic_ahead_ns: int = 0
    wall_ahead_ns: int = 10**18
    devices: tuple[int, ...] = (0,)
    mesh: tuple[tuple[str, int], ...] = (
        ("pp", 1),
        ("dp_replicate", 1),
        ("dp_shard", 1),
        ("tp", 1),
    )
    launch: spans.Launch | None = None
    boot: str | None = None


def span(process: Process, name: str, kind, stream: str, start_s, end_s) -> Span:
    """Make a span from seconds of true time."""
    ahead_ns = process.monotonic_ahead_ns
    start_ns, end_ns = (
        round(second * SECOND) + ahead_ns for second in (start_s, end_s)
    )
    return Span(name, kind, stream, start_ns, end_ns)


def write(
    work_dir: Path, process: Process, lines: Sequence[Line], at_s: int | float = 0
) -> Path:
    """Write the file of a process; its lines are numbered here."""
    header = Header(
        run=process.run,
        host=process.host,
        rank=process.rank,
        generation=process.generation,
        pid=1,
        wall_ns=round(at_s * SECOND) + process.wall_ahead_ns,
        monotonic_ns=round(at_s * SECOND) + process.monotonic_ahead_ns,
        devices=process.devices,
        mesh=dict(process.mesh),
        launch=process.launch,
        boot=process.boot,
    )
    folder = work_dir / spans.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / spans.file_name(header)
    numbered = [
        spans.msgspec.structs.replace(line, n=n) for n, line in enumerate(lines)
    ]
    path.write_bytes(b"".join(map(spans.encode, (header, *numbered))))
    return path
