"""Write metrics to files, trackers and the log.

Input: one row of plain numbers per optimizer step. Output: `metrics.jsonl`,
`summary.json`, rows for trackers, and lines for people. Only rank 0 writes. A full disk
never stops a run: it is reported once, and the missing rows are written when there is
space. If the folder is deleted or moved, it is recreated with all rows. If another
start of the run has taken the folder over, nothing more is written. A run with missing
rows or without its summary is not done.

A row is one line of strict JSON, which has neither NaN nor infinity. Such a value is
null in its field, and the additional field `nonfinite` holds the original value:
`{"loss": null, ..., "nonfinite": {"loss": "nan"}}`.
"""

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mjax.config.run import LogConfig
from mjax.hardware.utilization import Utilization
from mjax.run import terminal
from mjax.run.json_files import without_nonfinite, write_atomically
from mjax.run.speed import Speed
from mjax.run.tracking.delivery import Delivery

Row = dict[str, Any]
"""Metrics of one step by name; None for an unknown number."""

_TIMING = ("step_s", "data_wait_s", "tokens_per_s", "mfu", "mfu_visible", "profiled")
"""Fields of timing, not of results. All fields that begin with `ckpt_` are timing too.
"""
_PATIENCE_S, _STOP_PATIENCE_S = 30, 5
"""Seconds that trackers have to send queued rows when a run ends, and when it is
stopped. A stopped run must exit soon."""
_MAX_LOST = 8


def bits_per_byte(nll: float, num_bytes: int | float) -> float:
    """Convert the summed nats of targets to bits per byte of their text."""
    return nll / math.log(2) / num_bytes


def make_row(
    step: int,
    metrics: Mapping[str, Any],
    *,
    step_s: float,
    data_wait_s: float,
    bytes_per_token: float,
    utilization: Utilization,
) -> Row:
    """Return the row of one step, with its fields in the order of the file.

    Args:
      step: number of optimizer steps, this one included.
      metrics: host scalars `loss` (nats per target token), `grad_norm`, `lr`,
        `tokens`, `visible_pairs`, `skipped`.
      step_s: seconds from the end of the previous step to the end of this one.
      data_wait_s: seconds that the loop waited for the batch.
      bytes_per_token: average of the corpus; converts the loss to bits per byte.
      utilization: computes the MFU of this step, unsmoothed.
    """
    loss, tokens = float(metrics["loss"]), int(metrics["tokens"])
    tokens_per_s = tokens / step_s
    return {
        "step": step,
        "loss": loss,
        "bits_per_byte": bits_per_byte(loss, bytes_per_token),
        "grad_norm": float(metrics["grad_norm"]),
        "lr": float(metrics["lr"]),
        "tokens": tokens,
        "step_s": step_s,
        "data_wait_s": data_wait_s,
        "tokens_per_s": tokens_per_s,
        "mfu": utilization.mfu(tokens_per_s),
        "mfu_visible": utilization.mfu_visible(
            tokens_per_s, float(metrics["visible_pairs"]) / max(tokens, 1)
        ),
        "skipped": int(metrics["skipped"]),
    }


def read_rows(path: Path) -> list[Row]:
    """Read the rows of metrics.jsonl; omit lines that are not rows."""
    rows, _ = _rows_of(path)
    return rows


def without_timing(row: Row) -> Row:
    """Return the fields of a row that are equal in two runs of the same training."""
    return {
        name: value
        for name, value in row.items()
        if name not in _TIMING and not name.startswith("ckpt_")
    }


def read_computed(work_dir: Path) -> list[Row]:
    """Read the rows of a run, without their timing."""
    return [without_timing(row) for row in read_rows(work_dir / "metrics.jsonl")]


def _rows_of(path: Path) -> tuple[list[Row], list[str]]:
    """Return the rows, and a description of each line that is not one."""
    rows: list[Row] = []
    problems: list[str] = []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise ValueError("it has no step")
            rows.append(row)
        except (ValueError, RecursionError) as error:
            # It was truncated by a kill or a full disk, or damaged.
            problems.append(f"line {number}: {error}")
    return rows, problems


def drop_rows_after(path: Path, step: int) -> str:
    """Remove the rows of later steps from metrics.jsonl, with an atomic rename.

    A run that resumes at `step` writes those rows again, so each step has one row.

    Returns:
      a description of the earlier rows that are lost because their lines are damaged;
      empty if there are none.
    """
    if not path.exists():
        return ""
    rows, problems = _rows_of(path)
    write_atomically(path, "".join(_line(row) for row in rows if row["step"] <= step))
    first = min((row["step"] for row in rows), default=1)
    lost = {*range(first, step + 1)} - {row["step"] for row in rows}
    if not problems or not lost:
        return ""
    which = ", ".join(map(str, sorted(lost)[:_MAX_LOST]))
    more = f" and {len(lost) - _MAX_LOST} more" if len(lost) > _MAX_LOST else ""
    return f"{path} has no row of step {which}{more}, because of {problems[0]}"


def summarize(rows: Sequence[Row]) -> Row:
    """Return the summary of all rows of a run, for summary.json.

    Throughput is the median over the steps, so the first step of each start, which
    includes the compilation, hardly matters. Profiled steps are excluded, unless all
    were profiled. The evaluation is the last one.
    """
    usual = [row for row in rows if not row.get("profiled")] or rows
    last = rows[-1] if rows else {}
    evaluated = next((row for row in reversed(rows) if "eval_loss" in row), {})
    return {
        "steps": last.get("step", 0),
        "loss": last.get("loss"),
        "eval_loss": evaluated.get("eval_loss"),
        "eval_bits_per_byte": evaluated.get("eval_bits_per_byte"),
        "tokens_per_s": _median(usual, "tokens_per_s"),
        "mfu": _median(usual, "mfu"),
        "mfu_visible": _median(usual, "mfu_visible"),
    }


class Recorder:
    """Writes the rows of a run to the file, trackers, and the log or terminal.

    On ranks other than 0 every method returns without an effect.
    """

    def __init__(
        self,
        work_dir: Path,
        config: LogConfig,
        *,
        start_step: int,
        num_steps: int,
        active: bool,
        remake: Callable[[], object] | None = None,
        is_ours: Callable[[], bool] = lambda: True,
        open_trackers: Callable[[Callable[[str], None]], Sequence[Delivery]] = (
            lambda say: ()
        ),
        memory: Callable[[], terminal.Memory | None] = lambda: None,
    ) -> None:
        """Open the files and drop rows after `start_step`.

        Args:
          work_dir: the run's folder; it exists.
          config: cadence of the progress line.
          start_step: optimizer steps of the restored state.
          num_steps: optimizer steps of the complete run.
          active: whether this process writes (rank 0).
          remake: recreates the folder with its initial files if config.json is gone;
            None creates an empty folder.
          is_ours: returns whether no other start has taken over the folder. It is
            called if the folder has changed, before a row is amended, and at the end.
          open_trackers: starts the trackers, given a function that prints.
          memory: memory of a device, for the live line; None if unknown.
        Raises:
          OSError: metrics.jsonl cannot be opened.
        """
        self._active = active
        self._is_ours, self._is_lost = is_ours, False
        self._config = config
        self._num_steps = num_steps
        self._failed: set[str] = set()
        self._unwritten = b""
        self._speed = Speed(config.every)
        self._live: terminal.LiveLine | None = None
        if not active:
            return
        self._path = work_dir / "metrics.jsonl"
        self._remake = remake or (lambda: work_dir.mkdir(parents=True, exist_ok=True))
        lost = drop_rows_after(self._path, start_step)
        self._file = self._path.open("a+b", buffering=0)
        if terminal.shows_live_line(sys.stdout):
            self._live = terminal.LiveLine(
                terminal.Progress(
                    start_step=start_step, num_steps=num_steps, memory=memory
                )
            )
        self._trackers = open_trackers(self.say)
        if lost:
            self.say(f"warning: {lost}; plots and summary leave it out")

    def record(self, row: Row) -> None:
        """Write one row to all destinations."""
        if not self._active:
            return
        self.guarded("metrics.jsonl", lambda: self._append(row))
        self._send(row)
        self._speed.add(row)
        shown = row | self._speed.mean()
        if self._live is not None:
            self._live.add(shown)
            if row["skipped"]:
                self.say(f"warning: step {row['step']} was skipped")
            if "eval_loss" in row:
                self.say(f"step {row['step']}: {_evaluated(row)}")
        elif row["step"] % self._config.every == 0 or row["step"] == self._num_steps:
            say(progress_line(shown, self._num_steps))

    def amend(self, step: int, more: Row) -> None:
        """Add fields to the last row if it is of this step."""
        if not self._active or not more or self.is_taken_over():
            return
        rows = read_rows(self._path)
        if rows and rows[-1]["step"] == step:
            rows[-1] |= more
            text = "".join(map(_line, rows))
            self.guarded("metrics.jsonl", lambda: self._replace(text))
            self._send({"step": step} | more)
        found = ", ".join(f"{name} {value:.4f}" for name, value in more.items())
        self.say(f"step {step}: {found}")

    def say(self, text: str) -> None:
        """Print a line for people, above the live line if there is one."""
        if self._live is not None:
            self._live.say(text)
        elif self._active:
            say(text)

    def sync(self) -> None:
        """Flush the rows to disk before a checkpoint, which relies on them."""

        def act() -> None:
            self._write()
            os.fsync(self._file.fileno())

        if self._active:
            self.guarded("metrics.jsonl", act)

    def close(self, ending: str = "done") -> None:
        """Close the files, end the live line, and end the trackers.

        Args:
          ending: the ending of the run, see `Tracker.finish`.
        """
        if not self._active:
            return
        if self._is_lost:
            ending = "stopped"  # the other start continues the tracker's run
        patience_s = _STOP_PATIENCE_S if ending == "stopped" else _PATIENCE_S
        for tracker in self._trackers:
            tracker.end(ending)
        until_s = time.monotonic() + patience_s
        for tracker in self._trackers:
            tracker.finish(ending, patience_s=max(0.0, until_s - time.monotonic()))
        if self._live is not None:
            self._live.close()
            self._live = None
        self._file.close()

    def is_taken_over(self) -> bool:
        """Return whether another start has taken over the folder; False on other ranks.

        Once true, nothing more is written to the folder or sent to trackers.
        """
        if self._active and not self._is_lost:
            self._is_lost = not self._is_ours()
        return self._is_lost

    @property
    def owed(self) -> list[str]:
        """Names of the files that are missing or incomplete at the end of a run."""
        if not self._active:
            return []
        rows_are_there = self._is_in_place() and not self._unwritten
        owed = [] if rows_are_there else ["metrics.jsonl"]
        return owed + sorted({"summary.json"} & self._failed)

    def _send(self, row: Row) -> None:
        if not self._is_lost:
            for tracker in self._trackers:
                tracker.send(row)

    def _append(self, row: Row) -> None:
        self._unwritten += _line(row).encode()
        self._write()

    def _write(self) -> None:
        """Write the unwritten rows; recreate the file if it was deleted or moved."""
        if not self._is_in_place():
            if self.is_taken_over():
                return
            if not (self._path.parent / "config.json").exists():
                self._remake()
            # Also the beginning of a row whose rest waits for free space.
            self._replace(self._read_all().decode())
            self.say(
                f"warning: {self._path} was deleted, moved or replaced during the run; "
                "it is recreated with all rows"
            )
        num = self._file.write(self._unwritten) or 0
        self._unwritten = self._unwritten[num:]
        if self._unwritten:
            raise OSError(f"{len(self._unwritten)} bytes of rows wait for free space")

    def _is_in_place(self) -> bool:
        try:
            there = self._path.stat()
        except OSError:
            return False
        return os.path.samestat(os.fstat(self._file.fileno()), there)

    def _read_all(self) -> bytes:
        """Read the rows of the open file, even if it was renamed or deleted."""
        return os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)

    def _replace(self, text: str) -> None:
        write_atomically(self._path, text)
        self._file.close()
        self._file = self._path.open("a+b", buffering=0)

    def guarded(self, what: str, action: Callable[[], None]) -> None:
        """Run an action that writes; an error is reported and ignored.

        It is reported again after the action has worked.

        Args:
          what: name of the file in messages.
          action: writes the file. It is not called after a takeover.
        """
        if self._is_lost:
            return
        try:
            action()
            self._failed.discard(what)
        except Exception as error:  # a full disk, or an error of the plotting library
            if what not in self._failed:
                self.say(
                    f"warning: {what} cannot be written, training continues: {error}"
                )
            self._failed.add(what)


def say(text: str) -> None:
    """Print a line; a log that cannot be written does not stop a run."""
    text = terminal.painted(text, sys.stdout)
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError:  # the disk is full, or the reader of stdout is gone
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 -- for the rest of the run


def progress_line(row: Row, num_steps: int) -> str:
    """Return one step as one line for people.

    Args:
      row: the row of the step, with the timing of `Speed.mean`.
      num_steps: optimizer steps of the complete run.
    """
    mfu = "" if row["mfu"] is None else f"  mfu {row['mfu']:.1%}"
    evaluated = f"  {_evaluated(row)}" if "eval_loss" in row else ""
    return (
        f"step {row['step']}/{num_steps}  loss {row['loss']:.4f}  "
        f"grad norm {row['grad_norm']:.3g}  lr {row['lr']:.3g}  "
        f"{row['step_s'] * 1e3:.1f} ms  wait {row['data_wait_s'] * 1e3:.1f} ms  "
        f"{row['tokens_per_s']:,.0f} tokens/s{mfu}"
        f"{'  skipped' if row['skipped'] else ''}{evaluated}"
    )


def _evaluated(row: Row) -> str:
    bits = row["eval_bits_per_byte"]
    return f"eval loss {row['eval_loss']:.4f}, {bits:.3f} bits/byte"


_encode = json.JSONEncoder(allow_nan=False).encode


def _line(row: Mapping[str, Any]) -> str:
    return _encode(without_nonfinite(row)) + "\n"


def _median(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.median(values) if values else None
