"""A short training job as the test of a group: all good hosts compute the same bits.

    python -m mjax.health.bisect.replay --devices 4
    python -m mjax.health.bisect.replay --dir /shared -- srun --nodelist {hosts} \\
        python -m mjax.train --recipe debug --steps 3 --seed 0 --work-dir {work_dir}

Input: a training command with fixed seeds. Output: on the last line of the output, a
hash of the results of the job, without times: all bits of the losses and gradient norms
of each step, and the checksums of the parameters and moments saved after the last step.
A host that silently computes wrong results gives its group a different hash from most
groups. With `bisect --same-output`, that test fails.

The job must compute the same bits each time on the same number of devices; on a GPU
this needs deterministic kernels (`--model.attention-backward deterministic`, the
default). Groups must have the same number of hosts, since the order of sums depends on
it.

Source: ByteRobust, arXiv:2509.16293, which finds silent corruption by replaying a
training job with fixed parameters in groups along two directions and comparing bits.
"""

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mjax import checked_json
from mjax.cli import flags

COMPUTED = ("step", "loss", "grad_norm", "tokens", "skipped")
"""Fields of a row of metrics.jsonl that are hashed: the results of a step. Other
fields, mainly times, may differ between two runs of the same job."""
_PLACE = "{work_dir}"
_SHOWN_CHARS = 800
_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL. Not measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayFlags:
    """Run a short training job and print a hash of its results."""

    devices: int = 1
    """Simulated devices of the local job that runs if no command follows --."""
    steps: int = 3
    """Steps of the job; a command after -- must run the same number."""
    seed: int = 0
    """Seed of the local job that runs if no command follows --."""
    dir: Path = dataclasses.field(default_factory=lambda: Path(tempfile.gettempdir()))
    """Folder for the work dir; all hosts of the group must see it."""
    state: bool = True
    """Also hash the state saved after the last step."""
    time_limit_s: float = 600.0
    """Time limit of the job in seconds."""

    def __post_init__(self) -> None:
        for flag, value in (("--devices", self.devices), ("--steps", self.steps)):
            if value < 1:
                raise ValueError(f"{flag} must be at least 1, got {value}")
        if not 0 < self.time_limit_s < float("inf"):
            raise ValueError(
                f"--time-limit-s must be positive, got {self.time_limit_s:g}"
            )
        if not self.dir.is_dir():
            raise ValueError(f"--dir {self.dir} is not a folder; make it first")


def digest(
    rows: Iterable[dict[str, Any]], num_steps: int, sums: Iterable[bytes] = ()
) -> str:
    """Return a hash of the computed metrics of a run and of its state.

    Args:
      rows: rows of metrics.jsonl, in order.
      num_steps: expected number of steps of the run.
      sums: see `read_sums`.
    Raises:
      ValueError: a step is missing, repeated or out of order, or a field is missing.
    """
    lines, steps = [], []
    for row in rows:
        missing = [name for name in COMPUTED if name not in row]
        if missing:
            raise ValueError(f"a row of metrics.jsonl has no {missing[0]}: {row}")
        steps.append(row["step"])
        values = [_exact(row[name]) for name in COMPUTED]
        lines.append(" ".join([*values, _exact(row.get("nonfinite"))]))
    if steps != list(range(1, num_steps + 1)):
        raise ValueError(
            f"metrics.jsonl has the steps {steps}; expected 1 to {num_steps}"
        )
    lines += [hashlib.sha256(part).hexdigest() for part in sums]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _exact(value: Any) -> str:
    """Format a value so that different bits give different texts."""
    if isinstance(value, float):
        return value.hex()
    return json.dumps(value, sort_keys=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a complete metrics.jsonl.

    Raises:
      ValueError: it is absent or truncated, or a line is not a JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"the job wrote no {path.name}: {error}") from error
    if not text.endswith("\n"):
        raise ValueError(f"{path.name} is truncated")
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows.append(checked_json.read(line, dict[str, Any]))
        except ValueError as error:
            raise ValueError(f"{path.name}:{number}: {error}") from error
    return rows


def read_sums(work_dir: Path, step: int) -> list[bytes]:
    """Return the contents of the checksum files of a saved state, one per process.

    A file lists the leaves and index ranges that its process saved, and the CRC32C of
    their bytes; see `mjax/ckpt/manifest.py`.

    Raises:
      ValueError: this step was not saved.
    """
    folder = work_dir / "checkpoints" / str(step)
    paths = sorted(folder.glob("pieces.*.json"))
    if not paths or not (folder / "checkpoint.json").exists():
        raise ValueError(
            f"the job saved no checkpoint of step {step}; enable checkpoints, or give "
            "--no-state to compare only losses and norms"
        )
    return [path.read_bytes() for path in paths]


def run_job(command: Sequence[str], work_dir: Path, limit_s: float) -> None:
    """Run the job to its end.

    Raises:
      RuntimeError: it could not start, failed or took too long.
    """
    words = [word.replace(_PLACE, str(work_dir)) for word in command]
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"LC_ALL": "C"},
            )
        except OSError as error:
            raise RuntimeError(f"{words[0]} cannot be started: {error}") from error
        # The job stays in the session of this process, so that one signal ends both.
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the job did not end in {limit_s:g} s") from None
        finally:
            _end(process)
        if code:
            output.seek(0)
            shown = output.read().decode(errors="replace")[-_SHOWN_CHARS:].strip()
            raise RuntimeError(f"the job ended with {code}: {shown}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 after success, 1 if the job failed, 2 for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    own, command = words[:cut], words[cut + 1 :]
    try:
        config: ReplayFlags = flags.read(
            ReplayFlags,
            own,
            prog="python -m mjax.health.bisect.replay",
            guide=flags.Guide(description=__doc__ or ""),
        )
        if cut < len(words) and not any(_PLACE in word for word in command):
            raise ValueError(
                f"the command {' '.join(command)!r} has no {_PLACE}; write --work-dir "
                f"{_PLACE}"
            )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        folder = tempfile.TemporaryDirectory(prefix="mjax-replay-", dir=config.dir)
    except OSError as error:
        print(f"error: --dir {config.dir}: {error.strerror}", file=sys.stderr)
        return 2
    with folder:
        try:
            print(_replayed(config, command, Path(folder.name) / "run"))
        except (RuntimeError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


def _replayed(config: ReplayFlags, command: Sequence[str], work_dir: Path) -> str:
    """Run the job and return the hash of its results."""
    run_job(command or _own_job(config), work_dir, config.time_limit_s)
    rows = read_rows(work_dir / "metrics.jsonl")
    sums = read_sums(work_dir, config.steps) if config.state else []
    return digest(rows, config.steps, sums)


def _own_job(config: ReplayFlags) -> list[str]:
    return [
        *(sys.executable, "-m", "mjax.train", "--recipe", "debug"),
        *("--simulate-devices", str(config.devices), "--steps", str(config.steps)),
        *("--seed", str(config.seed), "--work-dir", _PLACE),
    ]


if __name__ == "__main__":
    # A signal must not leave the work dir behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
