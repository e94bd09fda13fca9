"""Kill every stage of the stream repeatedly, and compare all rows at the end.

    python -m scripts.observe.kill_stream --kills 50

The scale-out half needs root and Debian's PostgreSQL and NATS (`--setups embedded`
omits it). Writes docs/benchmarks/stream_kills.md.

A writer appends spans of 4 ranks, rows and events in bursts, with a restart of the run
in the middle, which rewrites metrics.jsonl and leaves truncated lines. One stage
is killed with SIGKILL at a random moment after it is up, and started again. After all
kills the writer ends, the rest is shipped, and every field of every row in the database
is compared with the files.
"""

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mjax.observe.store.base import open_store
from scripts.evidence import REPOSITORY, Table, write_page
from scripts.observe.written_run import Comparison, Writer, compare
from tests.observe.store.services import Nats, Postgres, Service

STAGES = {
    "embedded": ("collector", "ingester"),
    "scale-out": ("collector", "NATS", "ingester", "PostgreSQL"),
}


class Program:
    """A running command of mjax.observe, which can be killed and restarted."""

    address = ""

    def __init__(self, *argv: str) -> None:
        self._argv = [sys.executable, "-m", "mjax.observe", *argv]
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it reports that it works."""
        self._process = subprocess.Popen(
            self._argv,
            cwd=REPOSITORY,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self._process.stderr is not None
        line = ""
        for line in self._process.stderr:
            if line.startswith(("ingest: ", "collect: ")):
                return
            if line.startswith("error: "):
                break
        raise RuntimeError(f"{' '.join(self._argv)} did not come up: {line}")

    def cpu_s(self) -> float:
        """Return its CPU seconds (Linux, proc(5))."""
        assert self._process is not None
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        ticks = sum(map(int, stat.rpartition(")")[2].split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    def end(self) -> None:
        """Stop it with SIGTERM."""
        assert self._process is not None
        self._process.terminate()
        _, said = self._process.communicate(timeout=120)
        if self._process.returncode != 0:
            raise RuntimeError(f"{self._argv} ended badly: {said[-2000:]}")


def kill_stage(setup: str, stage: str, kills: int, seed: int) -> tuple[Comparison, int]:
    """Kill one stage repeatedly; return the comparison and the number of kills."""
    generator = random.Random(f"{seed} {setup} {stage}")
    with _folder() as work_dir, _services(setup) as services:
        store = str(work_dir / "observe" / "store.duckdb")
        ingest = ["ingest", "--work-dir", str(work_dir)]
        collect = ["collect", "--work-dir", str(work_dir)]
        if setup == "scale-out":
            store, nats = services["PostgreSQL"].address, services["NATS"].address
            ingest += ["--store", store, "--nats", nats]
            collect += ["--to", nats]
        writer = Writer(work_dir, seed, burst=20, pause_s=0.1)
        programs: dict[str, Service] = {
            "ingester": Program(*ingest),
            "collector": Program(*collect, "--every-s", "0.05"),
        }
        try:
            stages = services | programs
            for number in range(kills):
                time.sleep(generator.uniform(0.05, 0.6))
                stages[stage].kill()
                time.sleep(generator.choice([0.0, 0.0, 0.3]))
                stages[stage].start()
                if number == kills // 2:
                    writer.restart()
            writer.end()
            programs["collector"].end()
            _ship_the_rest(collect)
            programs["ingester"].end()
        finally:
            for program in programs.values():
                program.kill()
        opened = open_store(store)
        try:
            return compare(work_dir, opened), kills
        finally:
            opened.close()


def _ship_the_rest(collect: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mjax.observe", *collect, "--once", "--every-s", "0.1"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the rest was not shipped: {done.stderr}")


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mjax-stream-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _services(setup: str) -> Iterator[dict[str, Service]]:
    started: dict[str, Service] = {}
    try:
        if setup == "scale-out":
            started["PostgreSQL"] = Postgres()
            started["NATS"] = Nats()
        yield started
    finally:
        for service in started.values():
            service.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="of each stage")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--setups", nargs="+", choices=[*STAGES], default=[*STAGES])
    every = sorted({stage for stages in STAGES.values() for stage in stages})
    parser.add_argument("--stages", nargs="+", choices=every, help="only these")
    parser.add_argument("--no-page", action="store_true", help="only print")
    given = parser.parse_args()
    rows, is_good = [], True
    for setup in given.setups:
        for stage in STAGES[setup]:
            if given.stages and stage not in given.stages:
                continue
            begin = time.monotonic()
            found, kills = kill_stage(setup, stage, given.kills, given.seed)
            is_same = found.digest_written == found.digest_stored and found.sums_agree
            is_good &= is_same and found.lost == found.doubled == 0
            cells = [setup, stage, f"{kills}", f"{found.written:,}"]
            cells += [f"{found.lost}", f"{found.doubled}"]
            cells += [found.digest_written, "yes" if is_same else "NO"]
            rows.append(cells)
            print(*cells, f"{time.monotonic() - begin:.0f} s", flush=True)
    if not given.no_page:
        _write(rows, given.kills, given.seed)
    return 0 if is_good else 1


def _write(rows: list[list[str]], kills: int, seed: int) -> None:
    table = Table(
        title="Rows through kills",
        text=(
            "While spans, rows and events are written, a stage is killed with SIGKILL "
            "0.05 to 0.6 s after it is up, and restarted at once or after 0.3 s. "
            "Lost: rows of the files that the database lacks or has with other "
            "content. Doubled: rows of the database that the files do not have. The "
            "digest is over every field of every row, sorted; the sums of the heat "
            "map are compared too. Bound: 0 and 0. A kill ends a process, not the "
            "machine: the effect of a power failure on the page cache is not tested."
        ),
        header=[
            *("setup", "stage", "kills", "rows written", "lost", "doubled"),
            *("digest of the files", "same in the database"),
        ],
        rows=rows,
    )
    command = f"python -m scripts.observe.kill_stream --kills {kills} --seed {seed}"
    write_page("stream_kills", "Kills of the stream", command, [table])


if __name__ == "__main__":
    sys.exit(main())
