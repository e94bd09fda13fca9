"""Compare two ways to give rows to the training processes of one host.

    python -m scripts.data.loader_ways

`mjax`: each process reads its own rows from the mapped token file
(`mjax.data.stream`). `Grain`: each has a worker process of Grain, which reads the same
rows for it. Runs each way with 1, 2, 4 and 8 processes that read as fast as they can,
and checks that both deliver equal rows. Writes docs/benchmarks/loader_ways.md; with
--only, runs one part and writes no page.
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
from scripts.data.loader_case import (
    NUM_AHEAD,
    NUM_CHECKED,
    ROWS_EACH,
    ROWS_SHARED,
    SEQ_LEN,
    WAYS,
    Case,
    Found,
    measure,
)
from scripts.evidence import Table, write_page

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
CACHES, NUM_PROCESSES = ("warm", "cold"), (1, 2, 4, 8)
Key = tuple[str, str, int]
"""State of the page cache, pattern and number of processes."""


def run_all(caches: Sequence[str], seconds: float) -> dict[Key, dict[str, Found]]:
    """Run every case; stop if the ways deliver different rows."""
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
            print(" | ".join(figures(key, found)), flush=True)
            assert len({one.checksums for one in found.values()}) == 1, (key, found)
    return everything


def figures(key: Key, found: dict[str, Found]) -> list[str]:
    """Return a row of the page: in each cell the figure of every way."""
    cells = (
        " / ".join(text.format(getattr(found[way], name)) for way in WAYS)
        for name, (_, text) in MEASURES.items()
    )
    return [*map(str, key), *cells]


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
        return 0
    text = (
        f"Load average before the start: {load:.1f}; above 2, other jobs shared the "
        f"two cores, and all times are too long. `stdlib` as bytes, rows of {SEQ_LEN} "
        f"tokens. {' '.join(PATTERNS.values())} Each case runs once, for "
        f"{args.seconds:g} s after the first row; the processes drop what they have "
        f"read. A cell has mjax' figure, then that of Grain {version('grain')} with "
        f"one worker for every process, {NUM_AHEAD} steps ahead; an element is the "
        f"data of a step that a process needs. The rows of the first {NUM_CHECKED} "
        "steps are equal. `cold`: the token file is dropped from the page cache before "
        "the processes start, and a case ends after one epoch at the latest. Every "
        f"process compares each block of {BLOCK_BYTES // 1024} KiB with its checksum "
        "when it first reads there. Tokens are those delivered to all processes, until "
        "the last has as many steps as the first had when its time was up. CPU time, "
        "proportional set size (with the parts of the token file that are mapped) and "
        "bytes from storage are sums over the processes and the workers. The first row "
        "is that of the last process, measured from the start of the first process; "
        "every process imports JAX and opens the dataset before it, as in training. "
        f"`Stream.ids`, which chooses the samples, takes {choosing_share():.0%} of the "
        f"CPU time of reading {ROWS_EACH} rows."
    )
    table = Table(
        title="1 to 8 processes",
        text=text,
        header=("files", "rows", "processes", *(x for x, _ in MEASURES.values())),
        rows=[figures(key, found) for key, found in everything.items()],
    )
    command = "python -m scripts.data.loader_ways"
    print(write_page("loader_ways", "Every process for itself", command, [table]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
