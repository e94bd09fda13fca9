"""A real run of four training processes, some of which can be stopped for a while.

Input: whether a launcher starts them, and which ranks stop. Output: a run that is
stopped while the caller inspects it, and then continues; see `inject`.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mjax.processes.progress import Phase
from mjax.processes.progress import read as read_word
from scripts.evidence import REPOSITORY, read_metrics

MODES = ("launcher", "no launcher")
NUM_RANKS = 4
FLAGS = (
    *("--recipe", "debug", "--data.path", "synthetic", "--simulate-devices", "1"),
    *("--model.layers", "2", "--mesh.tp", "2", "--steps", "100000"),
    *("--eval.every", "8", "--eval.batches", "4", "--ckpt.every", "10"),
)
INJECT = Path(__file__).parent / "inject"
WAIT_S = 150.0
"""Time limit of each wait."""
_LAUNCH = (
    *("--hosts", str(NUM_RANKS), "--restart.no-warm"),
    # It would end a stopped run.
    *("--limits.step-s", "3600", "--limits.eval-s", "3600", "--limits.save-s", "3600"),
)


class LateError(RuntimeError):
    """A wait ended before its condition held."""


class Run:
    """Four training processes, until `end`."""

    def __init__(self, folder: Path, mode: str, cache: Path) -> None:
        """Start them.

        Args:
          folder: folder for all files of this run.
          mode: name in MODES.
          cache: folder of the compilation cache.
        """
        folder.mkdir(parents=True)
        self.work_dir, self._stops, self._mode = folder / "run", folder / "stops", mode
        self._stops.mkdir()
        self._log = folder / "log.txt"
        self._num_orders = [0] * NUM_RANKS
        self._id = 0
        paths = [str(INJECT), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        self._environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "MJAX_STOPS": str(self._stops),
            "XDG_CACHE_HOME": str(cache),
            "JAX_PLATFORMS": "cpu",
        }
        self.start()

    def start(self) -> None:
        """Start or restart them."""
        flags = [*FLAGS, "--work-dir", str(self.work_dir)]
        if self._mode == "launcher":
            self._processes = [self._popen(["mjax.launch", *_LAUNCH, "--", *flags])]
            return
        with socket.create_server(("", 0)) as server:
            coordinator = f"127.0.0.1:{server.getsockname()[1]}"
        flags += ["--distributed.coordinator", coordinator]
        flags += ["--distributed.num-processes", str(NUM_RANKS)]
        self._processes = [
            self._popen(
                ["mjax.train", *flags, "--distributed.process-id", str(rank)],
                MJAX_STOP_RANK=str(rank),
            )
            for rank in range(NUM_RANKS)
        ]

    def _popen(self, words: Sequence[str], **more: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=REPOSITORY,
                env=self._environment | more,
                stdout=log,
                stderr=log,
            )

    def end(self) -> None:
        """Kill them."""
        agents = self.work_dir.glob("launch/agent-*.pid")
        pids = [int(path.read_text()) for path in agents]
        for process in self._processes:
            process.kill()
            process.wait()
        for pid in pids:  # the ranks end with their agents
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def last_step(self) -> int:
        """Return the step of the last row."""
        return max((row["step"] for row in read_metrics(self.work_dir)), default=0)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds.

        Raises:
          LateError: the condition did not hold in time, or a process has ended.
        """
        until_s = time.monotonic() + WAIT_S
        while not condition():
            ended = any(process.poll() is not None for process in self._processes)
            if ended or time.monotonic() > until_s:
                tail = self._log.read_text(errors="replace")[-2000:]
                raise LateError(f"{what} did not come; {tail}")
            time.sleep(0.05)

    def go_on(self, num_steps: int) -> None:
        """Wait for more rows.

        Raises:
          LateError: the rows did not come in time.
        """
        step = self.last_step() + num_steps
        self.wait_for(lambda: self.last_step() >= step, f"the row of step {step}")

    @contextlib.contextmanager
    def stopped(
        self,
        kind: str,
        ranks: Sequence[int],
        *,
        where: str,
        delay_s: float = 0.0,
        slow_s: float = 0.0,
    ) -> Iterator[None]:
        """Stop ranks, and let them continue at the end.

        Args:
          kind: kind of the stop, as in `inject`.
          ranks: ranks to stop.
          where: place of the stop, as in `inject`.
          delay_s: seconds to wait before the stop.
          slow_s: seconds that a slow rank sleeps.
        Raises:
          LateError: they did not reach the place in time.
        """
        self._id += 1
        stems = [self._stops / f"{self._id}-{rank}" for rank in ranks]
        for rank, stem in zip(ranks, stems, strict=True):
            if kind == "lock":
                os.mkfifo(stem.with_suffix(".pipe"))
            order = {"kind": kind, "where": where, "delay_s": delay_s}
            self._order(rank, order | {"slow_s": slow_s})
        began = [stem.with_suffix(".began") for stem in stems]
        self.wait_for(lambda: all(path.exists() for path in began), "the stop")
        yield
        for stem in stems:
            stem.with_suffix(".ends").touch()
            if kind == "lock":
                pipe = os.open(stem.with_suffix(".pipe"), os.O_WRONLY | os.O_NONBLOCK)
                os.write(pipe, b"x")
                os.close(pipe)
        if kind == "skip":
            for rank in {*range(NUM_RANKS)} - {*ranks}:
                self._order(rank, {"kind": "join"})

    def _order(self, rank: int, order: dict[str, Any]) -> None:
        path = self._stops / f"{rank}-{self._num_orders[rank]}.order"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(order | {"id": self._id}))
        new.rename(path)
        self._num_orders[rank] += 1

    def restart(self) -> None:
        """Kill the ranks and start them again, in the same work dir."""
        self.end()
        for path in self._stops.iterdir():
            path.unlink()
        self._num_orders = [0] * NUM_RANKS
        self.start()

    def word_phase(self) -> Phase | None:
        """Return the phase of rank 0 in the launcher's newest report."""
        folder = max(self.work_dir.glob("launch/generation-*"), default=None)
        word = read_word(folder / "progress-0") if folder else None
        return word.phase if word else None
