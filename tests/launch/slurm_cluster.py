"""A real Slurm on this machine: a controller, and several nodes beside each other.

Needs root and Debian's packages slurmctld, slurmd, slurm-client and munge. The tests
use it, and `make try-slurm` (scripts/clusters/try_slurm.py).
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.launch.slurm_processes import Daemons, is_running

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
PARTITION = "main"
_START_S = 60.0
_LOG_LINES = 5
_OURS = ("SLURM", "SBATCH_", "SRUN_")
"""Prefixes of variables that would describe another cluster."""
_PATHS = ("Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Comment", "JobName")
"""Fields of a job that may hold spaces; `scontrol` gives a line to most of them."""
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
EnforcePartLimits=ALL
MinJobAge=0
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=10
ReturnToService=1
MpiDefault=none
JobRequeue=1
PartitionName={partition} Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class RefusedError(ValueError):
    """Slurm does not accept a batch script."""


class Cluster:
    """Runs until `end`."""

    def __init__(self, folder: Path, num_nodes: int, num_gpus: int = 0) -> None:
        """Start it.

        Args:
          folder: folder of its files, which must not have any yet.
          num_nodes: number of nodes, each with the processors and the memory of this
            machine.
          num_gpus: number of GPUs that each node declares, whether or not it has them.
        Raises:
          RuntimeError: a program is missing, or the nodes do not come up.
        """
        check_machine()
        self.folder = folder
        self.num_cpus, self.num_gpus = os.cpu_count() or 1, num_gpus
        self.memory_mib = (
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
        )
        self.nodes = [f"n{index + 1}" for index in range(num_nodes)]
        (folder / "state").mkdir(parents=True)
        self._config = folder / "slurm.conf"
        self._write_config()
        self._pids: dict[str, int] = {}
        self._daemons = Daemons()
        try:
            self._begin_munge()
            self._spawn("slurmctld", "slurmctld", "-D")
            for name in self.nodes:
                self.begin_node(name)
            self.wait_for_nodes()
        except BaseException:
            self.end()
            raise

    def _write_config(self) -> None:
        ports = _free_ports(1 + len(self.nodes))
        host = socket.gethostname().partition(".")[0]
        text = _CONFIG.format(
            host=host, port=ports[0], folder=self.folder, partition=PARTITION
        )
        has = f"CPUs={self.num_cpus} RealMemory={self.memory_mib}"
        if self.num_gpus:
            has += f" Gres=gpu:{self.num_gpus}"
            files = [self.folder / f"gpu{index}" for index in range(self.num_gpus)]
            for file in files:
                file.touch()
            gpus = [f"Name=gpu File={file}\n" for file in files]
            self._config.with_name("gres.conf").write_text("".join(gpus))
        for name, port in zip(self.nodes, ports[1:], strict=True):
            text += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 "
            text += f"Port={port} {has} State=UNKNOWN\n"
        self._config.write_text(text)

    def _begin_munge(self) -> None:
        folder = self.folder / "munge"
        folder.mkdir(mode=0o700)
        key = folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {"pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        words = [f"--{flag}={folder / name}" for flag, name in files.items()]
        words += [f"--key-file={key}", f"--socket={self.folder / 'munge.sock'}"]
        self._spawn("munged", "munged", "--foreground", "--force", *words)

    def begin_node(self, name: str) -> None:
        """Start a node, or start it again."""
        self._spawn(name, "slurmd", "-D", "-N", name)

    def _spawn(self, name: str, *words: str) -> None:
        log = self.folder / f"{name}.out"
        self._pids[name] = self._daemons.start(words, self.environment, log)

    @property
    def environment(self) -> dict[str, str]:
        """Environment for the commands of this cluster."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_OURS)
        }
        return {**kept, "SLURM_CONF": str(self._config)}

    def run(self, *words: str) -> str:
        """Return the output of a command.

        Raises:
          subprocess.CalledProcessError: it failed.
        """
        return subprocess.run(
            words, env=self.environment, check=True, capture_output=True, text=True
        ).stdout

    def submit(self, script: Path, options: Sequence[str]) -> str:
        """Submit a batch script with options of sbatch; return its job.

        Raises:
          RefusedError: sbatch does not accept it; the message is that of sbatch.
        """
        done = subprocess.run(
            ["sbatch", "--parsable", *options, str(script)],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        number = done.stdout.strip().partition(";")[0]
        if not number.isdigit():  # with --wait the status is that of the job
            said = done.stderr.replace("sbatch: error: ", "").strip()
            raise RefusedError("\n  ".join(said.splitlines()))
        return number

    def jobs(self, number: str) -> list[dict[str, str]]:
        """Return the fields of `scontrol show job`, for each task of an array."""
        text = self.run("scontrol", "show", "job", number)
        return [_fields(record) for record in text.strip().split("\n\n")]

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of a job that is no array."""
        (job,) = self.jobs(number)
        return job

    def kill_node(self, name: str) -> None:
        """Kill the daemon of a node; its processes continue."""
        os.kill(self._pids[name], signal.SIGKILL)
        while is_running(self._pids[name]):
            time.sleep(0.01)

    def end(self) -> None:
        """Kill the daemons of this cluster, its jobs, and what they have started."""
        self._daemons.end()

    def wait_for_nodes(self) -> None:
        """Wait until all nodes are idle.

        Raises:
          RuntimeError: they do not come up.
        """
        until_s = time.monotonic() + _START_S
        while time.monotonic() < until_s:
            for name, pid in self._pids.items():
                if not is_running(pid):
                    raise RuntimeError(f"{name} has ended: {self._last_lines(name)}")
            found = subprocess.run(
                ["sinfo", "-h", "-o", "%D %t"],
                env=self.environment,
                capture_output=True,
                text=True,
            ).stdout
            if found.split() == [str(len(self.nodes)), "idle"]:
                return
            time.sleep(0.2)
        raise RuntimeError(
            f"the nodes did not come up within {_START_S:.0f} s: "
            f"{self._last_lines('slurmctld')}"
        )

    def _last_lines(self, name: str) -> str:
        path = self.folder / f"{name}.out"
        lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n  ".join([f"{path} ends with", *lines])


def check_machine() -> None:
    """Check that a cluster can run here.

    Raises:
      RuntimeError: a program is missing, or this is not root.
    """
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)} not found; as root, on Debian or Ubuntu: apt-get "
            "install slurmctld slurmd slurm-client munge"
        )
    if os.geteuid() != 0:
        raise RuntimeError(
            "this is not root, and Slurm's daemons start jobs as root only; put sudo "
            "before the command"
        )


def _fields(record: str) -> dict[str, str]:
    """Read a record of `scontrol show job`."""
    fields: dict[str, str] = {}
    for line in record.splitlines():
        words = line.split()
        for index, word in enumerate(words):
            name, _, value = word.partition("=")
            if name in _PATHS:
                value = " ".join([value, *words[index + 1 :]])
            if "=" in word:
                fields[name] = value
            if name in _PATHS:
                break
    return fields


def _free_ports(number: int) -> list[int]:
    probes = [socket.socket() for _ in range(number)]
    for probe in probes:
        probe.bind(("", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
