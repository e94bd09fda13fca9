"""The short runs of `fake`: make their commands and run them.

Input: the work dir of a run. Output: the commands of its rungs (see `rungs`), and the
files of the short runs. The run's own folders are only read.
"""

import dataclasses
import math
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mjax.config.command_line import to_flags
from mjax.config.train import TrainConfig, from_json, to_fields
from mjax.mesh.axes import DP
from mjax.observe import output, records, rungs
from mjax.observe.records import Record
from mjax.observe.rungs import FIRST, Origin, Rung
from mjax.recipes import RECIPES

_STOP_S = 120.0
"""Seconds that a run may take to end after SIGTERM: a launch stops its hosts first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The short runs, before any of them is started."""

    ladder: list[Rung]
    commands: Mapping[str, list[str]]
    """Arguments of `python` by name of the rung; a rung without a config is absent."""
    elsewhere: str
    """Reason why the runs cannot be started from this machine; empty if they can."""
    record: Record
    """Records of the run."""


def plan(work_dir: Path, out_dir: Path, *, steps: int, names: tuple[str, ...]) -> Plan:
    """Make the commands.

    Raises:
      ValueError: the records of the run are unusable, or do not allow these steps.
    """
    record = records.read(work_dir, "--work-dir")
    origin = _origin(record, work_dir)
    ladder = rungs.ladder(origin, out_dir, steps, names)
    elsewhere = _elsewhere(record, origin)
    program = _program(record, origin, is_here=not elsewhere)
    commands = {
        rung.name: _command(rung, program) for rung in ladder if rung.config is not None
    }
    return Plan(
        ladder=ladder,
        commands=commands,
        elsewhere=elsewhere,
        record=record,
    )


def _origin(record: Record, work_dir: Path) -> Origin:
    """Read the config of the run and its sizes.

    Hosts that the processes cannot be divided among count as one host.
    """
    path = work_dir / "config.json"
    if record.config is None or not record.starts:
        missing = "config.json" if record.config is None else "starts/"
        raise ValueError(
            f"{work_dir} has no readable {missing}, so the run cannot be repeated; "
            "give the work dir of a run that has begun"
        )
    try:
        config = from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is not the config of a run of this version: {error}; use the "
            "version that wrote it"
        ) from error
    start = record.starts[-1]
    mesh = start.get("mesh") or {}
    newest = max((of.header.generation for of in record.files), default=0)
    own = [of.header for of in record.files if of.header.generation == newest]
    processes = len(start.get("processes") or [0])
    hosts = len({header.host for header in own} or {*_hosts(record)})
    return Origin(
        config=config,
        processes=processes,
        hosts=hosts if processes % hosts == 0 else 1,
        dp=math.prod(int(mesh.get(axis, 1)) for axis in DP),
        pp=int(mesh.get("pp", 1)),
    )


def _hosts(record: Record) -> list[str]:
    """Return the machine of each process of the newest start."""
    return [str(of.get("host")) for of in record.starts[-1].get("processes") or []]


def _elsewhere(record: Record, origin: Origin) -> str:
    """Return why this machine cannot start the short runs; empty if it can."""
    others = {*_hosts(record)} - {socket.gethostname()}
    if origin.processes == 1 or not others:
        return ""
    return (
        f"the run had {origin.processes} processes on {len({*_hosts(record)})} "
        "machines, and cannot be started from this one"
    )


def _program(record: Record, origin: Origin, *, is_here: bool) -> list[str]:
    """Return the command that starts the run: the trainer, or a launch."""
    start = record.starts[-1]
    variables = start.get("environment") or {}
    is_slurm = any(name.startswith("SLURM_") for name in variables)
    if origin.processes == 1:
        return ["-m", "mjax.train"]
    if is_here:
        return ["-m", "mjax.launch"]
    if is_slurm and start.get("launch"):
        return ["-m", "mjax.launch", "slurm"]
    return ["-m", "mjax.train"]  # in each process, as the run was started


def _command(rung: Rung, program: Sequence[str]) -> list[str]:
    """Return the command of a rung: the nearest recipe, with flags."""
    assert rung.config is not None
    own = _fields(rung.config)
    bases = {name: make() for name, make in RECIPES.items()}
    name = min(bases, key=lambda recipe: len(own - _fields(bases[recipe])))
    words = ["--recipe", name, *to_flags(rung.config, bases[name])]
    if "mjax.launch" not in program:
        return [*program, *words]
    ranks = ["--ranks-per-host", str(rung.processes // rung.hosts)]
    return [*program, "--hosts", str(rung.hosts), *ranks, "--", *words]


def _fields(config: TrainConfig) -> set[tuple[str, str]]:
    """Return (dotted name, value as text) of each field."""
    nested = to_fields(config)
    return {(name, repr(value)) for name, value in records.flat(nested)}


# ------------------------------------------------------------------------ running them


def check_out_dir(out_dir: Path, work_dir: Path, *, has_runs: bool) -> None:
    """Refuse a folder that is in use, or is inside the run's work dir.

    Args:
      out_dir: folder for the short runs.
      work_dir: work dir of the run.
      has_runs: whether the short runs already exist.
    Raises:
      ValueError: the folder is refused.
    """
    if out_dir.resolve().is_relative_to(work_dir.resolve()):
        raise ValueError(
            f"--out-dir {out_dir} is in the work dir of the run; give another folder"
        )
    if has_runs:
        output.check_folder(out_dir, "--out-dir")
    elif out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ValueError(
            f"--out-dir {out_dir} exists and is not empty; give another folder, or "
            "--compare-only to compare the runs in it"
        )


def run_all(found: Plan, out_dir: Path, limit_s: float) -> dict[str, str]:
    """Run the rungs one after the other; return the reason of each failure, by name.

    Raises:
      ValueError: the folder cannot be made, or the baseline run fails.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot make --out-dir {out_dir}: {error.strerror}; give another one"
        ) from error
    failed: dict[str, str] = {}
    for rung in found.ladder:
        name = rung.name
        if name not in found.commands:
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        why = _run(found.commands[name], out_dir / f"{name}.log", limit_s)
        _remove_copies(rung)
        if why:
            failed[name] = why
        if why and name == FIRST:
            raise ValueError(f"the unchanged run failed: {why}")
    return failed


def _remove_copies(rung: Rung) -> None:
    """Delete the state copies in a short run's --ckpt.local-dir, maybe a RAM disk."""
    folder = None if rung.config is None else rung.config.ckpt.local_dir
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _run(words: Sequence[str], log: Path, limit_s: float) -> str:
    """Run a command for at most `limit_s`; return why it failed, or an empty string."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"it took longer than --limit-s {limit_s:g}; see {log}"
        finally:
            _end(process)
    if not code:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = next((line for line in reversed(lines) if "error" in line.lower()), "")
    return f"exit code {code}, {last or 'no error in its log'}; see {log}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a run that has not ended, with time to save or to stop its hosts."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
