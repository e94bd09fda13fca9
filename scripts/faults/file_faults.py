"""Damage each file of a launched run in turn, which must go on as if nothing happened.

    python -m scripts.faults.file_faults

Two hosts train a small model in a work dir on a small ext4, with the checkpoints
elsewhere. Each file and folder that the driver, the agents and the ranks have opened or
created there is deleted, replaced by a folder, replaced by a pipe for 10 s (whoever
opens it waits), and made unwritable; then the whole disk is full, and blocks, for 10 s.
No generation may end, no host may be called lost, no process may print a traceback, and
each row must equal that of an undisturbed run. Needs root. Writes
docs/benchmarks/file_faults.md; ends with 1 if anything is wrong.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from mjax.run.metrics import read_computed
from scripts.evidence import Table, commit, write_page
from scripts.faults import small_disks
from scripts.faults.chaos import differences
from scripts.faults.launch_faults import XLA_FLAGS
from scripts.faults.launched import Launched, StuckError

HOSTS = 2
RUN = (
    *("--recipe", "debug", "--model.layers", "1", "--model.d-model", "32"),
    *("--model.heads", "2", "--model.d-ff", "64", "--model.window", "16"),
    *("--model.rope", "True", "--batch.size", "4", "--data.seq-len", "32"),
    *("--simulate-devices", "1", "--ckpt.every", "10", "--optim.schedule", "constant"),
    *("--eval.every", "1000000"),
)
LIMITS = ("--limits.step-s", "30", "--limits.save-s", "60")
_DISK_MB, _CHUNK_BYTES = 64, 2**16
_HARMLESS_S, _BLOCKED_S, _RELEASE_S = 3.0, 10.0, 0.5
_PACE_S = 7200.0
"""Seconds for which `launched.inject` slows the steps: longer than this program."""
_ALARMS = ("hang", "failure", "evict", "gave_up")
_DISK = Path()
"""Stands for the whole disk in the place of a file."""


@contextlib.contextmanager
def deleted(path: Path) -> Iterator[None]:
    """Delete a file, or move a folder away for good."""
    if path.is_dir():
        away = f"{path.name}.{time.monotonic_ns()}.moved-away"
        path.rename(path.with_name(away))
    else:
        path.unlink(missing_ok=True)
    yield


@contextlib.contextmanager
def folder_instead(path: Path) -> Iterator[None]:
    """Put a folder in the place of a file."""
    with deleted(path):
        path.mkdir()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the run has replaced it
                path.rmdir()


@contextlib.contextmanager
def pipe_instead(path: Path) -> Iterator[None]:
    """Put a pipe in the place of a file, which blocks whoever opens it."""
    with deleted(path):
        os.mkfifo(path)
        try:
            yield
        finally:
            if path.is_fifo():  # otherwise the run has replaced it
                both_ends = os.open(path, os.O_RDWR | os.O_NONBLOCK)
                path.unlink()
                time.sleep(_RELEASE_S)
                os.close(both_ends)


@contextlib.contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """Let nobody, root included, write to a file or in a folder."""
    if not path.exists():  # such as a journal of SQLite, between two writes
        path.touch()
    subprocess.run(["chattr", "+i", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """Fill a disk to the last byte."""
    filler = disk / "filler"
    try:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(_CHUNK_BYTES))
        yield
    finally:
        filler.unlink()


WAYS: Mapping[str, tuple[Callable[[Path], AbstractContextManager[None]], float]] = {
    "unwritable": (unwritable, _HARMLESS_S),
    "a folder instead": (folder_instead, _HARMLESS_S),
    "a pipe instead": (pipe_instead, _BLOCKED_S),
    "deleted": (deleted, _HARMLESS_S),
}
"""Name -> context manager that takes the path of a file, and seconds in it."""
DISK_WAYS = {
    "full": (full, _BLOCKED_S),
    "blocked": (small_disks.frozen, _BLOCKED_S),
}


def files_of(work_dir: Path) -> list[Path]:
    """Return the files and folders of a run, relative to its work dir, deepest first.

    A folder that is deleted takes its files with it.
    """
    opened = {
        path
        for link in Path("/proc").glob("[0-9]*/fd/*")
        if (path := _target(link)).is_relative_to(work_dir)
    }
    found = {path.relative_to(work_dir) for path in {*work_dir.rglob("*"), *opened}}
    own = ("launch.log", ".fault", ".moved-away")
    named = [path for path in found if path.parts and not str(path).endswith(own)]
    return sorted(named, key=lambda path: (-len(path.parts), path))


def _target(link: Path) -> Path:
    try:
        return Path(os.readlink(link))
    except OSError:
        return Path()


class Watched:
    """A launch whose outputs are kept although its files are damaged."""

    def __init__(self, folder: Path, disk: Path, number: int) -> None:
        """Start it, and wait for the first rows."""
        flags = [*RUN, "--ckpt.dir", str(folder / f"checkpoints-{number}")]
        work_dir = disk / f"run-{number}"
        self.disk = disk
        words = [*flags, "--steps", "1000000"]
        self.launched = Launched(work_dir, HOSTS, 0, words, LIMITS)
        self.launched.wait_for_row(11)
        for rank in range(HOSTS):
            self.launched.inject(rank, f"slow {_PACE_S:.0f}")
        self.launched.wait_for_row(self.launched.last_step() + 3)
        self._outputs = [path.open("rb") for path in work_dir.rglob("*.log")]

    def suffer(self, file: Path, way: str) -> list[str]:
        """Damage a file, or the disk; return what is wrong with the reaction."""
        launched, num_told = self.launched, len(self.launched.events())
        damage, seconds = (DISK_WAYS if file == _DISK else WAYS)[way]
        try:
            with damage(self.disk if file == _DISK else launched.work_dir / file):
                time.sleep(seconds)
            step = max(launched.last_step(), 0)
            launched.wait_for_row(step + 3)
        except (OSError, StuckError) as error:
            return [f"{type(error).__name__}: {error}", self.output()[-1500:]]
        told = launched.events()[num_told:]
        problems = [f"{e['kind']}: {e['text']}" for e in told if e["kind"] in _ALARMS]
        if launched.generation > 1:
            problems.append("the ranks were started again")
        if (at := self.output().find("Traceback")) >= 0:
            problems.append(self.output()[at : at + 1500])
        return problems

    def output(self) -> str:
        """Return what all processes have printed since the last call with a problem."""
        texts = []
        for file in self._outputs:
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return "\n".join(texts)

    def rows(self) -> list[dict[str, Any]]:
        """Let the run end; return its rows."""
        self.launched.stop()
        return read_computed(self.launched.work_dir)

    def end(self) -> None:
        """Kill what remains."""
        self.launched.end()
        for file in self._outputs:
            file.close()


def compare(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Return the differences from the rows of an undisturbed run."""
    launched = Launched(
        folder / f"reference-{len(rows)}",
        HOSTS,
        0,
        [*RUN, "--steps", str(len(rows) + 1)],
        LIMITS,
    )
    try:
        if launched.process.wait(timeout=1800) != 0:
            raise RuntimeError((launched.work_dir / "launch.log").read_text()[-2000:])
    finally:
        launched.end()
    expected = read_computed(launched.work_dir)
    return differences(rows, {row["step"]: row for row in expected})


def run_all(folder: Path, disk: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Damage everything; yield file, way and what is wrong, then the rows' problems."""
    number, watched = 0, Watched(folder, disk, 0)
    files = files_of(watched.launched.work_dir)
    todo = [(file, way) for file in files for way in WAYS]
    todo += [(_DISK, way) for way in DISK_WAYS]
    while todo:
        try:
            while todo:
                file, way = todo.pop(0)
                problems = watched.suffer(file, way)
                name = "the whole disk" if file == _DISK else str(file)
                yield name, way, problems
                if problems:
                    break
            else:
                rows = watched.rows()
                yield f"{len(rows)} rows", "compared", compare(folder, rows)
        finally:
            watched.end()
        if todo:
            number += 1
            watched = Watched(folder, disk, number)


def main() -> int:
    """Run, write the page; return 1 if anything was wrong."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    os.environ["XLA_FLAGS"] = XLA_FLAGS
    table: dict[str, dict[str, str]] = {}
    num_wrong = 0
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = str(Path(name) / "cache")
        disk = Path(name) / "disk"
        with small_disks.ext4(disk, _DISK_MB):
            for file, way, problems in run_all(Path(name), disk):
                print(file, way, problems or "", flush=True)
                num_wrong += bool(problems)
                found = "; ".join(problems).splitlines()[0] if problems else "goes on"
                table.setdefault(file, {})[way] = found
    ways = [*WAYS, *DISK_WAYS, "compared"]
    text = (
        f"On commit {commit()}: {HOSTS} hosts with a rank each, `{' '.join(RUN)}`, "
        "compiled without LLVM's passes. A damage lasts 3 s, and 10 s if it blocks. "
        f"{num_wrong} of {sum(map(len, table.values()))} had an effect."
    )
    rows = [[file, *(found.get(w, "") for w in ways)] for file, found in table.items()]
    shown = Table(title="Each file", text=text, header=("file", *ways), rows=rows)
    command = "python -m scripts.faults.file_faults"
    print(write_page("file_faults", "Files of a run that fail", command, [shown]))
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
