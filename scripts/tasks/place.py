"""The place of a task: a folder, the command `mjax`, and the commands typed there."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
HF_PYTHON = REPOSITORY / ".venv-hf" / "bin" / "python"
EVAL_PYTHON = REPOSITORY / ".venv-eval" / "bin" / "python"
ONE_THREAD_S = 900
"""Time limit of a command; a task with a slower one fails."""


class TaskFailedError(Exception):
    """A command or a check of a task failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """Output of a command."""

    out: str
    err: str
    code: int


@dataclasses.dataclass
class Place:
    """One running task.

    Commands run in `folder` without the repository on Python's path. Commands that a
    user types are shown on the page and timed; checks are neither.
    """

    folder: Path
    """Folder of this task; it exists and is empty at first."""
    shared: Path
    """Folder of all tasks: `shared/demo` is the run of task 7."""
    shown: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = dataclasses.field(default_factory=list)
    """Results of the checks, for the page."""

    def mjax(self, *words: str, **options: Any) -> Done:
        """Type a command of mjax; see `run`."""
        return self.run(
            [sys.executable, "-m", "mjax", *words], shown=["mjax", *words], **options
        )

    def run(
        self,
        command: Sequence[str],
        *,
        shown: Sequence[str] | str | None,
        code: int = 0,
        typed: str = "",
    ) -> Done:
        """Run a command.

        Args:
          command: words that are executed.
          shown: text on the page; None for a check, whose time does not count.
          code: exit code that is expected.
          typed: standard input.
        Raises:
          TaskFailedError: another exit code.
        """
        begun_s = time.perf_counter()
        done = subprocess.run(
            list(command),
            cwd=self.folder,
            env=self.environment(),
            input=typed,
            capture_output=True,
            text=True,
            timeout=ONE_THREAD_S,
        )
        if shown is not None:
            self.seconds += time.perf_counter() - begun_s
            self.show(shown)
        if done.returncode != code:
            raise TaskFailedError(
                f"{shlex.join(command)} ended with {done.returncode}, not {code}:\n"
                f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            )
        return Done(out=done.stdout, err=done.stderr, code=done.returncode)

    def show(self, words: Sequence[str] | str) -> None:
        """Show a command on the page, once."""
        text = words if isinstance(words, str) else shlex.join(words)
        if self.short(text) not in self.shown:
            self.shown.append(self.short(text))

    def short(self, text: str) -> str:
        """Return a text without the folders of this machine."""
        return text.replace(f"{self.folder}/", "").replace(f"{self.shared}/", "")

    def environment(self) -> dict[str, str]:
        """Return the variables of a user: nothing of this process's Python."""
        kept = ("PATH", "HOME", "LANG", "XDG_CACHE_HOME")
        found = {name: os.environ[name] for name in kept if name in os.environ}
        return found | {"HF_HUB_OFFLINE": "1", "COLUMNS": "100"}

    def start(self, *words: str, shown: bool = True) -> subprocess.Popen[str]:
        """Start a command of mjax in the background."""
        if shown:
            self.show(["mjax", *words])
        return subprocess.Popen(
            [sys.executable, "-m", "mjax", *words],
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def write(self, name: str, text: str) -> Path:
        """Write a file of the user's."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def ask(self, python: Path | str, code: str, *words: str) -> Any:
        """Run a piece of Python that checks; return the JSON of its last line."""
        done = self.run([str(python), "-c", code, *words], shown=None)
        return json.loads(done.out.splitlines()[-1])

    def need(self, holds: bool, what: str, found: object = "") -> None:
        """Continue if a condition holds, and record it.

        Raises:
          TaskFailedError: it does not hold.
        """
        if not holds:
            raise TaskFailedError(f"not so: {what}; found {found}")
        note = f"{what}: {found}" if found != "" else what
        self.notes.append(self.short(note))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One row of the page."""

    number: int
    do: Callable[[Place], None]
    needs: tuple[int, ...] = ()
    """Tasks whose folders this one uses."""


def rows(work_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the rows of a run's metrics by step; the last one of a step counts."""
    lines = (work_dir / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines) if "loss" in row}


def losses(work_dir: Path) -> list[float]:
    """Return the loss of each step, in order."""
    found = rows(work_dir)
    return [found[step]["loss"] for step in sorted(found)]


def wait_for(what: Callable[[], bool], limit_s: float, told: str) -> None:
    """Wait until a condition holds.

    Raises:
      TaskFailedError: it is not so after the limit.
    """
    end_s = time.monotonic() + limit_s
    while not what():
        if time.monotonic() > end_s:
            raise TaskFailedError(f"after {limit_s:.0f} s still not: {told}")
        time.sleep(0.05)
