"""A record of each start of a run: code, machine and settings.

Input: the settings of the start. Output: `starts/0001.json` in the work dir, one file
for each start, never changed afterwards. The record also has the name and generation of
the launch that started the processes, if there is one.

A record that cannot be written is a warning. People and tools read records, training
does not, so refusing would end a run that can train: a launch would give up after a few
restarts. What a run needs, such as config.json, is refused before.
"""

import dataclasses
import hashlib
import json
import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import mjax
from mjax import checked_json
from mjax.observe import beats
from mjax.observe.spans import FOLDER
from mjax.processes.agreement import Agreement
from mjax.run.json_files import write_json
from mjax.run.metrics import say

_PREFIXES = ("JAX_", "XLA_", "NCCL_", "CUDA_", "MJAX_", "SLURM_", "OMP_")
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASS", "JWT")
_GIT_S = 5
_NUMBER = re.compile(r"-(\d+)\.jsonl?(?:\.gz)?$")
"""End of the name of a file of spans or beats: the number of its start."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Identifies a start and its run."""

    run: str
    """Id of the run, the same in all starts in a work dir."""
    number: int
    """Number of the start, from 1."""


def write(
    work_dir: Path,
    mesh: Mesh,
    agreement: Agreement,
    facts: Mapping[str, Any],
    argv: Sequence[str],
    **more: Any,
) -> Start:
    """Write the record of this start. Every process calls this; process 0 writes.

    Args:
      work_dir: work dir of the run.
      mesh: mesh of all processes.
      agreement: the `Agreement` in which all processes take part.
      facts: values that describe code and environment, see `processes.comparison`.
      argv: the flags of process 0.
      more: further JSON fields of this start: `launch`, `generation`, `start_step`.
    Returns:
      the start, the same in all processes.
    """
    own = {"host": socket.gethostname(), "pid": os.getpid()}

    def merge(processes: Sequence[str]) -> str:
        folder = work_dir / "starts"
        start = Start(run=_run(folder), number=_last_number(work_dir) + 1)
        record = {
            "run": start.run,
            "time": time.strftime("%FT%T%z"),
            **more,
            "argv": [*argv],
            "mjax": mjax.__version__,
            "commit": _commit(),
            "code": _digest(facts),
            "facts": {name: v for name, v in facts.items() if not _is_file(name)},
            "environment": _environment(),
            "mesh": dict(mesh.shape),
            "device": jax.devices()[0].device_kind,
            "processes": [json.loads(text) for text in processes],
        }
        path = folder / f"{start.number:04d}.json"
        try:
            folder.mkdir(exist_ok=True)
            write_json(path, record)
        except OSError as error:
            why = error.strerror
            say(f"warning: {path} cannot be written, training continues: {why}")
        return json.dumps(dataclasses.asdict(start))

    return Start(**json.loads(agreement.merge(json.dumps(own), merge)))


def _last_number(work_dir: Path) -> int:
    """Return the number of the last start; 0 if there is none.

    A start whose record could not be written may have spans or beats.
    """
    names = [
        path.name
        for folder in (FOLDER, beats.FOLDER)
        for path in (work_dir / folder).glob("*")
    ]
    numbers = [int(found[1]) for name in names if (found := _NUMBER.search(name))]
    records = (work_dir / "starts").glob("[0-9]*.json")
    return max([*numbers, *(int(path.stem) for path in records)], default=0)


def _run(folder: Path) -> str:
    """Return the id that the first start gave the run, or a new id."""
    first = folder / "0001.json"
    try:
        return checked_json.read(first.read_bytes(), dict[str, Any])["run"]
    except (OSError, ValueError, KeyError):  # absent, or written by an older mjax
        return secrets.token_hex(8)


def _is_file(name: str) -> bool:
    return name.startswith("mjax/")


def _digest(facts: Mapping[str, Any]) -> str:
    """Return a hash of the files of mjax, whether git tracks them or not."""
    files = {name: value for name, value in facts.items() if _is_file(name)}
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _environment() -> dict[str, str]:
    """Return the environment variables that may change a run, without secrets."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES) and not any(word in name for word in _SECRETS)
    }


def _commit() -> str:
    """Return the commit of the checkout that mjax runs from; "" if installed."""
    command = ["git", "-C", str(Path(mjax.__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
