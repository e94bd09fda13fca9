"""Checks that need all processes of a run.

Input: the report of each host, and the config with which the processes find each other.
Output: process 0 prints one line for each joint step and one for each failed check of a
host. All processes return the same exit code. Steps, in order:

- *meet*: all processes connect to the coordinator (`mjax.processes.distributed`).
- *same*: mjax's files, package versions and environment are equal in all processes.
- *files*: each process reads a file that process 0 has just written to the work dir,
  and process 0 reads a file of each process.
- *sum*: a number is summed over all devices, which connects them as the first step of a
  run does.

After a failed step the later steps are skipped: a run would fail there too.
"""

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from mjax.mesh.devices import load_plugin_without_gpu
from mjax.processes import distributed
from mjax.processes.agreement import Agreement
from mjax.processes.comparison import check_same, code_facts, environment_facts
from mjax.processes.config import DistributedConfig
from mjax.processes.device_sum import device_sum

_SEEN_S = 30.0
"""Seconds within which all processes must see a new file: the time for which NFS caches
a folder (nfs(5), acdirmin)."""
_POLL_S = 0.2
_FIX = "Give all hosts the same mjax, packages and environment"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Result of one joint step."""

    name: str
    state: str
    """`ok`, `failed`, or `unknown` if the step was skipped."""
    value: str = ""
    reason: str = ""


def main(
    report: Mapping[str, Any],
    config: DistributedConfig,
    *,
    hosts: int,
    work_dir: Path,
    limit_s: int | float,
    is_json: bool,
) -> int:
    """Run all steps, print the results on process 0, and return the exit code.

    Args:
      report: report of this host, from `mjax.health.check_command.to_json`.
      config: config with which the processes find each other.
      hosts: number of hosts of the run, each with at least one process.
      work_dir: work dir of the run; process 0 creates and removes a folder in it.
      limit_s: time limit of each step in seconds; a process that is still in the step
        `config.timeout_s` later ends itself.
      is_json: whether to print one JSON object instead of lines.
    """
    with _stdout_as_stderr():
        steps, reports = _take(report, config, hosts, work_dir, limit_s)
    is_ok = all(step.state == "ok" for step in steps)
    is_ok = is_ok and all(one["ok"] for one in reports)
    if distributed.rank() == 0:
        found = {
            "ok": is_ok,
            "together": [dataclasses.asdict(step) for step in steps],
            "hosts": reports,
        }
        print(json.dumps(found) if is_json else "\n".join(_lines(steps, reports)))
        sys.stdout.flush()
    elif steps[0].state == "failed":  # process 0 cannot tell why
        print(f"error: {steps[0].name}: {steps[0].reason}", file=sys.stderr)
    return 0 if is_ok else 1


def _take(
    report: Mapping[str, Any],
    config: DistributedConfig,
    num_hosts: int,
    work_dir: Path,
    limit_s: int | float,
) -> tuple[list[Step], list[Mapping[str, Any]]]:
    """Run the steps.

    Returns:
      the results of the steps, and the reports of all processes (of this process alone
      if the processes did not connect).
    """
    reports = [report]

    def meet() -> str:
        load_plugin_without_gpu()
        distributed.start(config)
        texts = Agreement("doctor", timeout_s=limit_s).all_of(json.dumps(report))
        reports[:] = [json.loads(text) for text in texts]
        if len(reports) < num_hosts:
            raise RuntimeError(
                f"--hosts is {num_hosts}, and {len(reports)} processes met; start one "
                "on each host with srun or mpirun, or give the --distributed flags"
            )
        hosts = {one["host"] for one in reports}
        return f"{len(reports)} processes, {len(hosts)} hosts"

    def same() -> str:
        facts = environment_facts() | code_facts()
        check_same(Agreement("same", timeout_s=limit_s), facts, _FIX)
        return f"{len(facts)} facts"

    actions: dict[str, Callable[[], str]] = {
        "meet": meet,
        "same": same,
        "files": lambda: _files(work_dir, limit_s),
        "sum": lambda: _sum(),
    }
    steps: list[Step] = []
    for name, act in actions.items():
        if any(step.state != "ok" for step in steps):
            steps.append(Step(name=name, state="unknown", reason="not tried"))
            continue
        began_s = time.monotonic()
        try:
            so_far = functools.partial(_lines, steps, reports)
            with _limit(name, limit_s + config.timeout_s, so_far):
                value = act()
        except (OSError, RuntimeError, ValueError) as error:
            steps.append(Step(name=name, state="failed", reason=str(error)))
            continue
        seconds = time.monotonic() - began_s
        steps.append(Step(name=name, state="ok", value=f"{value}, {seconds:.1f} s"))
    return steps, reports


@contextlib.contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Redirect stdout to stderr: gloo and NCCL write to stdout from C++."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _limit(
    name: str, limit_s: int | float, so_far: Callable[[], Iterable[str]]
) -> Iterator[None]:
    """End this process after limit_s seconds: a collective cannot be interrupted.

    Args:
      name: name of the step, for the message.
      limit_s: time limit of the step in seconds.
      so_far: returns the results so far, which process 0 then prints to stderr.
    """

    def end() -> None:
        print(
            f"error: process {distributed.rank()}: {name} did not end within "
            f"{limit_s:.0f} s; python -m mjax.health bisect finds the host",
            file=sys.stderr,
        )
        if distributed.rank() == 0:
            print("\n".join(so_far()), file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _files(work_dir: Path, limit_s: int | float) -> str:
    """Check that all processes read a file of process 0, and process 0 reads theirs.

    Returns:
      the number of files and the work dir, as text.
    Raises:
      RuntimeError: a file was not visible or had other content; raised in all
        processes.
    """
    agreement = Agreement("files", timeout_s=limit_s)
    nonce = agreement.from_rank(0, secrets.token_hex(8))
    folder = work_dir / f".mjax-doctor-{nonce}"
    rank, num = distributed.rank(), distributed.num_processes()
    seen_s = min(_SEEN_S, limit_s / 2)  # the other processes wait for this process

    def write() -> None:
        if rank == 0:
            folder.mkdir(parents=True)
            _path(folder, 0).write_text(nonce)

    def answer() -> None:
        _see(_path(folder, 0), nonce, seen_s)
        if rank != 0:
            _path(folder, rank).write_text(nonce)

    def gather() -> None:
        if rank == 0:
            for other in range(num):
                _see(_path(folder, other), nonce, seen_s)

    try:
        for act in (write, answer, gather):
            agreement.together(act, timeout_s=limit_s)
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return f"{num} files in {work_dir}"


def _path(folder: Path, rank: int) -> Path:
    return folder / f"process-{rank}"


def _see(path: Path, nonce: str, limit_s: int | float) -> None:
    until_s = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(FileNotFoundError):
            if path.read_text() == nonce:
                return
        if time.monotonic() > until_s:
            raise RuntimeError(
                f"{path} was written but is not visible here after {limit_s:.0f} s; "
                "give a --work-dir on a file system that all hosts mount"
            )
        time.sleep(_POLL_S)


def _sum() -> str:
    """Sum the numbers 1, 2, ... over all devices, one number on each device.

    Returns:
      the number and the kind of the devices, as text.
    Raises:
      RuntimeError: the sum is wrong on a device of this process.
    """
    devices = jax.devices()
    summed, numbers, right = device_sum()

    def compare() -> None:
        for shard in summed(numbers).addressable_shards:
            if (found := float(shard.data[0])) != right:
                raise RuntimeError(
                    f"{shard.device}: the sum over all devices is {found:g}, not "
                    f"{right:g}"
                )

    Agreement("sum").together(compare)
    return f"{len(devices)} x {devices[0].device_kind}"


def _lines(steps: list[Step], reports: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield lines to print: the steps, then failed checks and warnings of each host."""
    for step in steps:
        said = f": {step.reason}" if step.reason else f" {step.value}"
        yield f"{step.state:10} together.{step.name}{said}"
    # If a host has several processes, its worst report counts.
    hosts = {one["host"]: one for one in sorted(reports, key=lambda one: not one["ok"])}
    for name, report in hosts.items():
        for one in report["checks"]:
            is_warning = one["state"] == "ok" and one["reason"]
            if is_warning or one["state"] in ("failed", "incomplete"):
                state = "warning" if is_warning else one["state"]
                yield f"{state:10} {name}: {one['name']}: {one['reason']}"
    well = sum(one["ok"] for one in hosts.values())
    yield f"{well} of {len(hosts)} hosts are healthy"
