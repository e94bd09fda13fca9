"""Run a batch script on a real Slurm that lives on this machine for as long as the job.

    python -m scripts.clusters.try_slurm my.sbatch --nodes 5 --gpus 8 -- --time=10

`make try-slurm SCRIPT=my.sbatch` runs it. Input: the script, the size of the cluster,
and options of sbatch, which override those of the script. Output: a line for each state
of the job, then the ends of its output files, its final state and its exit code. Each
node has the processors and the memory of this machine. GPUs are only declared: Slurm
counts them, and the job sees those that this machine has.

Exit codes: that of the job, or 1 if it ended otherwise; 2 bad input; 130 interrupted.
The cluster and all processes of the job are then gone.
"""

import contextlib
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from mjax.cli.flags.standard import ArgumentParser
from tests.launch.slurm_cluster import PARTITION, Cluster, RefusedError, check_machine

_POLL_S = 0.5
_PENDING_S = 30.0
"""Seconds after which a job of an idle cluster counts as one that never starts. Chosen:
Slurm starts a job that fits within two seconds of its submission."""
_END_BYTES, _END_LINES = 2**16, 20
_MAX_OUTPUTS = 4
"""Maximum number of jobs of an array whose output is shown."""
_MAX_NODES = 64
_WAITING = ("PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT", "REQUEUED", "REQUEUE_FED")
_RUNNING = (
    *("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING"),
    *("RESIZING", "STAGE_OUT"),
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    words = [*argv]
    end = words.index("--") if "--" in words else len(words)
    parser = ArgumentParser(
        prog="python -m scripts.clusters.try_slurm",
        description="Run a batch script on a Slurm of this machine.",
        epilog="Options of sbatch follow after --.",
    )
    parser.add_argument("script", help="the batch script")
    parser.add_argument("--nodes", type=int, default=3, help="nodes of the cluster")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that a node declares")
    args = parser.parse_args(words[:end])
    try:
        _check(args.script, args.nodes, args.gpus)
        check_machine()
        with _interruptible(), _cluster(args.nodes, args.gpus) as cluster:
            return _try(cluster, Path(args.script), words[end + 1 :])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"error: {error} {error.stderr.strip()}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # nobody reads the output any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        _say("interrupted: the cluster is stopped, and no process of it is left")
        return _INTERRUPTED


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at any signal that asks this program to end."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check(script: str, nodes: int, gpus: int) -> None:
    if not script:
        raise ValueError(
            "SCRIPT is missing; give a batch script, for example make try-slurm "
            "SCRIPT=deploy/slurm/doctor.sbatch NODES=5 GPUS=8"
        )
    path = Path(script)
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise ValueError(
            f"SCRIPT={script} {what}; a relative path starts at {Path.cwd()}"
        )
    if not 1 <= nodes <= _MAX_NODES:
        raise ValueError(f"NODES must be from 1 to {_MAX_NODES}, got {nodes}")
    if gpus < 0:
        raise ValueError(f"GPUS must be at least 0, got {gpus}")


@contextlib.contextmanager
def _cluster(nodes: int, gpus: int) -> Iterator[Cluster]:
    """Start a cluster in a temporary folder; at the end stop it uninterrupted."""
    folder, cluster = Path(tempfile.mkdtemp(prefix="mjax-slurm-")), None
    try:
        cluster = Cluster(folder, nodes, gpus)
        _say(f"started {_size(cluster)}")
        yield cluster
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if cluster is not None:
            cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


def _size(cluster: Cluster) -> str:
    return (
        f"a cluster of {len(cluster.nodes)} nodes in the partition {PARTITION}, each "
        f"with {cluster.num_cpus} CPUs, {cluster.memory_mib / 1024:.0f} GiB of memory "
        f"and {cluster.num_gpus} GPUs"
    )


def _say(text: str) -> None:
    print(f"try-slurm: {text}", flush=True)


def _try(cluster: Cluster, script: Path, options: Sequence[str]) -> int:
    """Submit a script, follow its job, and return the exit code."""
    try:
        number = cluster.submit(script.absolute(), options)
    except RefusedError as error:
        raise ValueError(
            f"Slurm refuses {script}:\n  {error}\nThis is {_size(cluster)}. If the "
            "script asks for more, enlarge the cluster (NODES is "
            f"{len(cluster.nodes)}, GPUS is {cluster.num_gpus}), or override options "
            "of the script, for example ARGS='--nodes=2 --gpus-per-node=0 "
            f"--cpus-per-task=1 --partition={PARTITION}'."
        ) from error
    _say(f"submitted {script} as job {number}")
    jobs = _follow(cluster, number)
    ranked = sorted(jobs, key=lambda job: job["JobState"] == "COMPLETED")
    for job in ranked[:_MAX_OUTPUTS]:
        _show_output(job)
    if len(jobs) > _MAX_OUTPUTS:
        _say(f"{len(jobs) - _MAX_OUTPUTS} more outputs are not shown")
    codes = [_code(job) for job in ranked]
    for job in ranked:
        _say(f"job {_name(job)} ended {_ending(job)}")
    return max(codes)


def _follow(cluster: Cluster, number: str) -> list[dict[str, str]]:
    """Print each change of a job's state until it has ended; return its tasks.

    Raises:
      RuntimeError: it never starts.
    """
    told: dict[str, str] = {}
    since_s = time.monotonic()
    while True:
        jobs = cluster.jobs(number)
        for job in jobs:
            text = _standing(job)
            if told.get(job["JobId"]) != text:
                told[job["JobId"]] = text
                since_s = time.monotonic()
                _say(f"job {_name(job)} is {text}")
        waiting = [job for job in jobs if job["JobState"] in _WAITING]
        running = [job for job in jobs if job["JobState"] in _RUNNING]
        if not waiting and not running:
            return jobs
        stuck = waiting and not running and waiting[0]["Reason"] != "BeginTime"
        if stuck and time.monotonic() - since_s > _PENDING_S:
            raise RuntimeError(
                f"job {_name(waiting[0])} is still pending after {_PENDING_S:.0f} s in "
                f"a cluster without other jobs: {waiting[0]['Reason']}. Remove the "
                "option of the script that makes it wait, or override it with ARGS"
            )
        time.sleep(_POLL_S)


def _name(job: dict[str, str]) -> str:
    if "ArrayTaskId" in job:
        return f"{job['ArrayJobId']}_{job['ArrayTaskId']}"
    return job["JobId"]


def _standing(job: dict[str, str]) -> str:
    """Return where a job stands: its state, and its nodes or the reason to wait."""
    state, reason = job["JobState"], job["Reason"]
    if state == "RUNNING":
        return f"RUNNING on {job['NodeList']}, output in {job['StdOut']}"
    if state in _WAITING and reason != "None":
        return f"{state} ({reason})"
    return state


def _ending(job: dict[str, str]) -> str:
    code, _, number = job["ExitCode"].partition(":")
    text = f"as {job['JobState']} after {job['RunTime']}, exit code {code}"
    return text if number == "0" else f"{text}, signal {number}"


def _code(job: dict[str, str]) -> int:
    code = int(job["ExitCode"].partition(":")[0])
    return code or (job["JobState"] != "COMPLETED")


def _show_output(job: dict[str, str]) -> None:
    for path in dict.fromkeys((job["StdOut"], job["StdErr"])):
        found = _written(Path(path))
        if found is None:
            folder = Path(path).parent
            why = "" if folder.is_dir() else f": there is no folder {folder}"
            _say(f"job {_name(job)} has not written {path}{why}")
            continue
        with found.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        _say(f"{found} ends with" if lines else f"{found} is empty")
        for line in lines[-_END_LINES:]:
            print(f"  {line}")


def _written(path: Path) -> Path | None:
    """Return the file of a path in which Slurm may have left %N, the node's name."""
    if path.is_file():
        return path
    if "%" not in path.name:
        return None
    pattern = re.sub(r"%\d*[A-Za-z]", "*", glob.escape(path.name))
    return next(iter(sorted(path.parent.glob(pattern))), None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
