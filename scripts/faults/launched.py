"""A launch that is observed and disturbed from outside, for `launch_faults`.

Input: flags of the trainer. Output: the state of the launch, read from its files, and
methods that cause faults in its processes.
"""

import contextlib
import errno
import functools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mjax.ckpt.store import Store
from mjax.cli.flags import given
from mjax.launch import client
from mjax.launch.rank_files import generation_folder, log_path
from mjax.processes import progress
from mjax.processes.progress import Word
from scripts.evidence import REPOSITORY, read_metrics
from scripts.faults import small_disks

LIMIT_S = 240.0
"""Time limit of every wait."""
_LEFT_BYTES = 200_000
"""Free bytes of a full store: less than a checkpoint needs."""
INJECT = REPOSITORY / "scripts" / "faults" / "inject"
Event = dict[str, Any]


class StuckError(RuntimeError):
    """A condition was not met in time."""


class Launched:
    """A launch of a trainer on simulated hosts."""

    def __init__(
        self,
        work_dir: Path,
        hosts: int,
        spares: int,
        flags: Sequence[str],
        own: Sequence[str] = (),
    ) -> None:
        """Start it.

        Args:
          work_dir: work dir of the run.
          hosts: number of hosts that train.
          spares: number of spare hosts.
          flags: flags of the trainer.
          own: more flags of the launch.
        """
        self.work_dir = work_dir
        self._events: list[Event] = []
        self._num_read = 0
        self._store = Path(given(flags, "--ckpt.dir") or work_dir / "checkpoints")
        work_dir.mkdir(parents=True, exist_ok=True)
        words = ["--hosts", str(hosts), "--spares", str(spares)]
        words += ["--limits.step-s", "4", "--limits.first-step-s", "60"]
        words += ["--limits.eval-s", "8", "--limits.save-s", "8"]
        # Faults come faster than saves do.
        words += ["--restart.pause-s", "0.1", "--restart.max-fruitless", "20"]
        words += [*own, "--", *flags]
        self._command = [sys.executable, "-m", "mjax.launch", *words]
        self._command += ["--work-dir", str(work_dir)]
        self.start()

    def start(self) -> None:
        """Start or restart the driver."""
        self.process = self.popen(self._command)

    def popen(self, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a process of the launch."""
        paths = [str(INJECT), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        with (self.work_dir / "launch.log").open("ab") as log:
            return subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    # -------------------------------------------------------------------- what it says

    def events(self, *kinds: str) -> list[Event]:
        """Return its events so far."""
        path = self.work_dir / "events.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._num_read)
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            self._num_read += len(new)
            self._events += [json.loads(line) for line in new.splitlines()]
        return [one for one in self._events if not kinds or one["kind"] in kinds]

    @property
    def generation(self) -> int:
        """Current generation; 0 before the first."""
        return max((e["generation"] for e in self.events("generation")), default=0)

    def hosts(self) -> list[str]:
        """Return the hosts of the current generation, in the order of ranks."""
        return self.events("generation")[-1]["data"]["hosts"]

    def last_step(self) -> int:
        """Return the step of the last row."""
        return max((row["step"] for row in read_metrics(self.work_dir)), default=0)

    def saved_steps(self) -> list[int]:
        """Return the steps in its store."""
        return Store(self._store).steps()

    def word_path(self, rank: int) -> Path:
        """Return the progress word of a rank of the current generation."""
        return generation_folder(self.work_dir, self.generation) / f"progress-{rank}"

    def word(self, rank: int) -> Word | None:
        """Return the phase of a rank of the current generation."""
        return progress.read(self.word_path(rank))

    def log(self, rank: int) -> str:
        """Return the output of a rank of the current generation."""
        folder = generation_folder(self.work_dir, self.generation)
        return log_path(folder, rank).read_text(errors="replace")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds.

        Raises:
          StuckError: the condition did not hold in time, or the launch has ended.
        """
        until_s = time.monotonic() + LIMIT_S
        while not condition():
            if self.process.poll() is not None and not condition():
                raise StuckError(f"the launch ended before {what}")
            if time.monotonic() > until_s:
                raise StuckError(f"{what} did not come in {LIMIT_S:g} s")
            time.sleep(0.01)

    def wait_for_row(self, step: int) -> None:
        """Wait until there is a row of this step.

        Raises:
          StuckError: the row did not appear in time.
        """
        self.wait_for(lambda: self.last_step() >= step, f"the row of step {step}")

    # --------------------------------------------------------------- what is done to it

    def rank_pid(self, rank: int) -> int:
        """Return the process of a rank."""
        status = client.ask(self.work_dir, "status").data
        ranks: Any = status["ranks"]
        return next(one["pid"] for one in ranks if one["rank"] == rank)

    def agent_pid(self, host: str) -> int:
        """Return the process of the agent of a host."""
        return int((self.work_dir / "launch" / f"agent-{host}.pid").read_text())

    def inject(self, rank: int, what: str) -> None:
        """Cause a fault inside a rank."""
        path = Path(f"{self.word_path(rank)}.fault")
        new = path.with_suffix(".new")
        new.write_text(what)
        new.rename(path)

    def order_wrong_flags(self, rank: int) -> None:
        """Give a rank a flag that the others lack, at its next start."""
        (self.work_dir / "launch" / f"wrong-flags-{rank}").touch()

    @contextlib.contextmanager
    def full_store(self) -> Iterator[Callable[[], None]]:
        """Yield a function that fills the store's file system, which should be small.

        The function may be called repeatedly; its file is removed at the end.
        """
        filler = self._store.parent / "filler"
        try:
            with filler.open("wb") as file:
                yield functools.partial(_fill, file.fileno(), self._store)
        finally:
            filler.unlink()

    def damage_newest_checkpoint(self) -> None:
        """Flip a bit in the largest file of the newest saved step."""
        folder = self._store / str(self.saved_steps()[-1])
        files = [path for path in folder.rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)

    @contextlib.contextmanager
    def frozen_store(self) -> Iterator[None]:
        """Block every write to the store's file system, see `small_disks.frozen`."""
        with small_disks.frozen(self._store.parent):
            yield

    @contextlib.contextmanager
    def locked_journal(self) -> Iterator[None]:
        """Lock the journal of the driver, as another process that writes does."""
        path = self.work_dir / "launch" / "journal.db"
        with contextlib.closing(sqlite3.connect(path, timeout=LIMIT_S)) as base:
            base.execute("begin exclusive")
            yield

    @contextlib.contextmanager
    def paused_driver(self) -> Iterator[None]:
        """Stop the driver with SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def kill_driver(self) -> None:
        """Kill the driver, and start it again."""
        self.process.kill()
        self.process.wait()
        self.start()

    def stop(self) -> None:
        """Let the run save and end, if it has not ended.

        Raises:
          StuckError: the run did not end in time.
        """
        if self.process.poll() is not None:
            return
        client.ask(self.work_dir, "stop")
        try:
            self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise StuckError("the launch did not stop") from error

    def end(self) -> None:
        """Kill all remaining processes of the launch."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for path in (self.work_dir / "launch").glob("agent-*.pid"):
            try:
                os.kill(int(path.read_text()), signal.SIGKILL)
            except (ProcessLookupError, ValueError):
                continue


def _fill(descriptor: int, folder: Path) -> None:
    """Extend a file until the file system has _LEFT_BYTES left."""
    while (free := shutil.disk_usage(folder).free - _LEFT_BYTES) > 0:
        try:
            os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, free)
        except OSError as error:  # a save has used some of the space meanwhile
            if error.errno != errno.ENOSPC:
                raise
