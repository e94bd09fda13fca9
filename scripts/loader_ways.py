"""Compare three ways to give rows to the training processes of one host.

    python -m scripts.loader_ways

`reader`: one reader process for all (`mjax.data.host_reader`). `per-process`: each
process reads its own rows from the mapped token file (`mjax.data.stream`). `Grain`:
each has a worker process of Grain, which reads the same rows for it. Runs each way with
1, 2, 4 and 8 processes that read as fast as they can, and checks that all ways deliver
equal rows. Writes docs/benchmarks/loader_ways.md; with --only, runs one part and writes
no page.
"""

import argparse
import importlib.util
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from mjax.data.cache_files import BLOCK_BYTES
from mjax.data.config import DataConfig
from mjax.data.dataset import open_dataset
from scripts.evidence import REPOSITORY, Table, write_page
from scripts.loader_alone import NUM_SLOTS
from scripts.loader_case import (
    NUM_CHECKED,
    ROWS_EACH,
    ROWS_SHARED,
    SEQ_LEN,
    Case,
    Found,
    measure,
)

CLOSE = 1.1
"""A smaller ratio of two figures counts as equal: each case runs once."""
READER = ("host_reader", "host_rows", "host_socket", "ring", "reader_keeper")
PATTERNS = {
    "disjoint": f"Data parallelism: each process wants {ROWS_EACH} rows of its own.",
    "same": f"Tensor parallelism: every process wants the same {ROWS_SHARED} rows.",
}
MEASURES = {
    "tokens_per_s": ("tokens / s", "{:,.0f}"),
    "cpu_s": ("CPU s / million tokens", "{:.4f}"),
    "memory_mb": ("memory, MB", "{:.0f}"),
    "start_s": ("first row, s", "{:.2f}"),
    "fetched_mb": ("from storage, MB", "{:.1f}"),
}
WAYS, CACHES, NUM_PROCESSES = (
    ("reader", "per-process", "Grain"),
    ("warm", "cold"),
    (1, 2, 4, 8),
)
Key = tuple[str, str, int]
"""State of the page cache, pattern and number of processes."""


def verdict(found: dict[str, Found], name: str) -> tuple[str, str]:
    """Return who is best at a measure, and a cell with the factor.

    The factor lies between the reader and the best of the others.
    """
    # What is read beside the rows is no difference.
    least = 1.0 if name == "fetched_mb" else 0.0
    figures = {way: max(getattr(one, name), least) for way, one in found.items()}
    sign = 1 if name == "tokens_per_s" else -1
    reader = figures.pop("reader")
    best = max(figures, key=lambda way: sign * figures[way])
    ratio = (reader / figures[best]) ** sign
    factor = max(ratio, 1 / ratio)
    winner = "equal" if factor < CLOSE else "reader" if ratio > 1 else best
    return winner, winner if winner == "equal" else f"{winner} {factor:.2f}x"


def run_all(caches: Sequence[str], seconds: float) -> dict[Key, dict[str, Found]]:
    """Run every case; stop if two ways deliver different rows."""
    everything: dict[Key, dict[str, Found]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = DataConfig(seq_len=SEQ_LEN, cache_dir=folder)
        num_samples = open_dataset(config, seed=0).train.num_samples
        (tokens,) = Path(folder).rglob("train.tokens")
        for key in itertools.product(caches, PATTERNS, NUM_PROCESSES):
            found = everything[key] = {}
            for way in WAYS:
                case = Case(way, *key, seconds, config)
                found[way] = measure(case, tokens, num_samples)
                print(" | ".join([*map(str, key), *cells(way, found[way])]), flush=True)
            assert len({one.checksums for one in found.values()}) == 1, (key, found)
    return everything


def cells(way: str, found: Found) -> list[str]:
    """Return a way and its figures."""
    figures = (text.format(getattr(found, x)) for x, (_, text) in MEASURES.items())
    return [way, *figures]


def figures_table(everything: dict[Key, dict[str, Found]], cache: str) -> Table:
    """Show all figures with the files in the page cache, or not."""
    texts = {
        "warm": "The token file is in the page cache.",
        "cold": (
            "The token file is dropped from the page cache before the processes start; "
            "a case ends after one epoch at the latest. Every process that reads "
            f"compares each block of {BLOCK_BYTES // 1024} KiB with its checksum when "
            "it first reads there, warm or cold."
        ),
    }
    return Table(
        title=f"Files {cache}",
        text=f"{texts[cache]} {' '.join(PATTERNS.values())}",
        header=("rows", "processes", "way", *(title for title, _ in MEASURES.values())),
        rows=[
            [pattern, str(num_processes), *cells(way, one)]
            for (of, pattern, num_processes), found in everything.items()
            for way, one in found.items()
            if of == cache
        ],
    )


def verdict_table(everything: dict[Key, dict[str, Found]], text: str) -> Table:
    """Show which way is best at what."""
    verdicts = {
        key: [verdict(found, name) for name in MEASURES]
        for key, found in everything.items()
    }
    rows = [[*map(str, key), *(c for _, c in v)] for key, v in verdicts.items()]
    for winner in (*WAYS, "equal"):
        wins = [
            sum(w == winner for w, _ in v) for v in zip(*verdicts.values(), strict=True)
        ]
        rows.append(["all", "", winner, *(f"{n} of {len(verdicts)}" for n in wins)])
    return Table(
        title="Which way is best",
        text=text,
        header=("files", "rows", "processes", *(t for t, _ in MEASURES.values())),
        rows=rows,
    )


def choosing_share() -> float:
    """Return which part of the CPU time of reading a step chooses its samples."""
    stream = open_dataset(DataConfig(seq_len=SEQ_LEN), seed=0).train
    stream.rows(0, ROWS_EACH)
    times_s = [time.process_time()]
    for call in (stream.ids, stream.rows):
        for step in range(100):
            call(step, ROWS_EACH)
        times_s.append(time.process_time())
    begin_s, chosen_s, read_s = times_s
    return (chosen_s - begin_s) / (read_s - chosen_s)


def main() -> int:
    """Run everything and write the page; return 1 without Grain."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="of a case")
    parser.add_argument("--only", choices=CACHES, help="run a part, write no page")
    args = parser.parse_args()
    if importlib.util.find_spec("grain") is None:
        print("Grain is not installed; install it with: pip install -e .[dev]")
        return 1
    load, started_s = os.getloadavg()[0], time.monotonic()
    everything = run_all([args.only] if args.only else CACHES, args.seconds)
    print(f"{time.monotonic() - started_s:.0f} s", flush=True)
    if args.only:
        for row in verdict_table(everything, "").rows:
            print(" | ".join(row))
        return 0
    modules = [REPOSITORY / "mjax" / "data" / f"{name}.py" for name in READER]
    num_lines = sum(len(path.read_text().splitlines()) for path in modules)
    text = (
        f"Load average before the start: {load:.1f}; above 2, other jobs shared the "
        f"two cores, and all times are too long. `stdlib` as bytes, rows of {SEQ_LEN} "
        f"tokens. Each case runs once, for {args.seconds:g} s after the first row; the "
        "processes drop what they have read. `reader`: one reader for the host, "
        f"{num_lines} lines in {len(READER)} modules. `per-process`: every process "
        "reads from the mapped file, which needs no further code. `Grain`: "
        f"{version('grain')}, one worker for every process, {NUM_SLOTS} steps ahead as "
        "the reader is; an element is what a process wants of a step. The rows of the "
        f"first {NUM_CHECKED} steps are equal in all ways. A cell names the best way "
        "and the factor between the reader and the best of the other two; below "
        f"{CLOSE:g} they count as equal, and so does less than 1 MB from storage. "
        "Tokens are those delivered to all processes, until the last has as many steps "
        "as the first had when its time was up. CPU time, proportional "
        "set size (with the parts of the token file that are mapped) and bytes from "
        "storage are sums over the processes, the reader and the workers. The first "
        "row is that of the last process, measured from the start of the first "
        "process; every process imports JAX and opens the dataset before it, as in "
        "training. `Stream.ids`, which chooses the samples, takes "
        f"{choosing_share():.0%} of the CPU time of reading {ROWS_EACH} rows."
    )
    tables = [figures_table(everything, cache) for cache in CACHES]
    tables.insert(0, verdict_table(everything, text))
    command, title = "python -m scripts.loader_ways", "One reader per host, or none"
    print(write_page("loader_ways", title, command, tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
