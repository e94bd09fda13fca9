"""Measure rows per second into the store, and the heat map over ten million rows.

    python -m scripts.observe.ingest_rate

`--stores duckdb` omits PostgreSQL, which needs root. Writes
docs/benchmarks/ingest_rate.md.

Files of spans of 1,024 ranks are written first. Then the two commands that a user runs,
`ingest` and `collect --once`, load them into a database over a socket. The clock runs
from the start of the collector, including imports, to its end after the last commit.
"""

import argparse
import contextlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import psycopg

from mjax.observe import spans
from mjax.observe.store.base import Store, open_store
from scripts.evidence import REPOSITORY, Table, write_page
from scripts.observe.kill_stream import Program
from tests.observe.store.services import Postgres

_NAMES: tuple[tuple[str, spans.Kind], ...] = (
    *(("data", "data"), ("dispatch", "host"), ("device", "idle"), ("metrics", "host")),
    *(("forward", "compute"), ("backward", "compute"), ("gradient norm", "dp")),
    *(("optimizer", "optimizer"), ("gather", "dp"), ("send", "pp")),
)
_RANKS = 1024
_HEAT_MAP = (
    "select host, phase, sum(seconds), sum(spans) from heat_map where run = ? "
    "group by host, phase"
)
_BY_RANK = (
    "select rank, phase, sum(seconds), sum(spans) from heat_map where run = ? "
    "group by rank, phase"
)
_ONE_STEP = (
    "select rank, phase, seconds from step_phases where run = ? and step between ? "
    "and ?"
)
_RUN = "0123456789abcdef"


def write_spans(work_dir: Path, num_steps: int) -> int:
    """Write the files of a run; return the sum of all spans, in ns."""
    folder = work_dir / spans.FOLDER
    folder.mkdir(parents=True)
    total = 0
    for rank in range(_RANKS):
        header = spans.Header(
            run=_RUN,
            host=f"node{rank // 8:03}",
            rank=rank,
            generation=1,
            pid=1,
            wall_ns=10**18,
            monotonic_ns=10**12,
            devices=(rank,),
            mesh={"dp_shard": _RANKS},
        )
        with (folder / spans.file_name(header)).open("wb") as file:
            file.write(spans.encode(header))
            for step in range(1, num_steps + 1):
                line, ns = _line(rank, step)
                file.write(line)
                total += ns
    return total


def _line(rank: int, step: int) -> tuple[bytes, int]:
    """Write the line of a step, with span lengths that depend on rank and step."""
    found, total = [], 0
    start = 10**12 + step * 10**9
    for i, (name, kind) in enumerate(_NAMES):
        ns = 1_000_000 * (i + 1) + 1_000 * (rank % 97) + step % 89
        stream = "host" if i < 4 else f"device:{rank}"
        found.append(spans.Span(name, kind, stream, start, start + ns))
        start += ns
        total += ns
    return spans.encode(spans.Line(n=step - 1, step=step, spans=tuple(found))), total


def ingest(work_dir: Path, store: str) -> tuple[float, float]:
    """Load the files into a store; return wall and CPU seconds."""
    ingester = Program("ingest", "--work-dir", str(work_dir), "--store", store)
    begin = time.monotonic()
    collect = [sys.executable, "-m", "mjax.observe", "collect", "--once"]
    done = subprocess.run(
        [*collect, "--work-dir", str(work_dir), "--once-within-s", "3600"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    wall_s = time.monotonic() - begin
    cpu_s = ingester.cpu_s()
    ingester.end()
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return wall_s, cpu_s


def median_s(action: Callable[[], object], times: int = 11) -> float:
    """Return the median duration in seconds, without the first, which warms the
    cache."""
    found = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        action()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def measure(
    name: str, work_dir: Path, address: str, total: int, steps: int
) -> list[str]:
    """Measure one store; return the cells of its table rows."""
    num_rows = _RANKS * steps * len(_NAMES)
    wall_s, cpu_s = ingest(work_dir, address)
    store = open_store(address)
    try:
        _check(store, num_rows, total)
        by_host = median_s(lambda: store.query(_HEAT_MAP, [_RUN]))
        by_rank = median_s(lambda: store.query(_BY_RANK, [_RUN]))
        one = median_s(lambda: store.query(_ONE_STEP, [_RUN, steps // 2, steps // 2]))
    finally:
        store.close()
    cells = [name, f"{num_rows:,}", f"{num_rows / wall_s:,.0f}"]
    cells += [f"{num_rows / cpu_s:,.0f}", f"{by_host:.3f}", f"{by_rank:.3f}"]
    return [*cells, f"{one:.3f}"]


def _check(store: Store, num_rows: int, total: int) -> None:
    """Compare the number and the sum of all spans, by both queries, with those
    written."""
    exact = store.query("select count(*), sum(end_ns - start_ns) from spans")
    sums = store.query("select sum(spans), sum(ns) from phase_totals")
    if not exact == sums == [(num_rows, total)]:
        raise RuntimeError(f"written {num_rows, total}, stored {exact}, summed {sums}")


@contextlib.contextmanager
def _address(name: str, folder: Path) -> Iterator[str]:
    if name == "duckdb":
        yield str(folder / "store.duckdb")
        return
    server = Postgres()
    try:
        yield server.address
    finally:
        server.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="of each rank")
    parser.add_argument("--stores", nargs="+", default=["duckdb", "postgresql"])
    parser.add_argument("--no-page", action="store_true", help="only print")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mjax-rate-"))
    rows = []
    try:
        total = write_spans(folder, given.steps)
        for name in given.stores:
            with _address(name, folder) as address:
                rows.append(measure(name, folder, address, total, given.steps))
            print(*rows[-1], flush=True)
    finally:
        shutil.rmtree(folder)
    if not given.no_page:
        _write(rows, given.steps)
    return 0


def _write(rows: list[list[str]], steps: int) -> None:
    table = Table(
        title="Rows a second, and queries over them",
        text=(
            f"{_RANKS:,} ranks of 128 hosts, {steps:,} steps, {len(_NAMES)} spans a "
            "step, sent by one collector over a socket to one ingester, 2 threads of "
            "DuckDB. A row is a span. Rows a second: from the start of the collector "
            "to its end, after the last commit; and per CPU-second of the ingester, "
            "which excludes the processes of PostgreSQL. Seconds of queries: median of "
            "11, results fetched, by the only active process. The number and the sum "
            "of all spans are compared with what was written. Bounds: 100,000 rows a "
            f"second, 0.5 s for the heat map. duckdb {duckdb.__version__}, psycopg "
            f"{psycopg.__version__}."
        ),
        header=[
            *("store", "rows", "rows/s", "rows/s of CPU", "heat map, host x phase (s)"),
            *("rank x phase (s)", "one step, exact (s)"),
        ],
        rows=rows,
    )
    command = "python -m scripts.observe.ingest_rate"
    command += "" if steps == 1000 else f" --steps {steps}"
    write_page("ingest_rate", "Rate of the store", command, [table])


if __name__ == "__main__":
    sys.exit(main())
