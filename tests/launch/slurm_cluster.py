"""A real Slurm on this machine: a controller, and several nodes beside each other.

Needs root and Debian's packages slurmctld, slurmd, slurm-client and munge.
"""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
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
SelectType=select/linear
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=10
ReturnToService=1
MpiDefault=none
JobRequeue=1
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Runs until `end`."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        """Start it.

        Raises:
          RuntimeError: a program is missing, or the nodes do not come up.
        """
        missing = [name for name in PROGRAMS if shutil.which(name) is None]
        if missing or os.geteuid() != 0:
            raise RuntimeError(
                f"missing: {', '.join(missing) or 'root'}; as root: apt-get install "
                "slurmctld slurmd slurm-client munge"
            )
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "state").mkdir(parents=True)
        ports = _free_ports(1 + num_nodes)
        host = socket.gethostname().partition(".")[0]
        text = _CONFIG.format(host=host, port=ports[0], folder=folder)
        self.nodes = [f"n{index + 1}" for index in range(num_nodes)]
        for name, port in zip(self.nodes, ports[1:], strict=True):
            text += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 "
            text += f"Port={port} CPUs={os.cpu_count()} State=UNKNOWN\n"
        self._config = folder / "slurm.conf"
        self._config.write_text(text)
        self._begin_munge()
        self._spawn("slurmctld", "slurmctld", "-D")
        for name in self.nodes:
            self.begin_node(name)
        self.wait_for_nodes()

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
        with (self.folder / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                words,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def environment(self) -> dict[str, str]:
        """Environment for the commands of this cluster."""
        return {**os.environ, "SLURM_CONF": str(self._config)}

    def run(self, *words: str) -> str:
        """Return the output of a command.

        Raises:
          subprocess.CalledProcessError: it failed.
        """
        return subprocess.run(
            words, env=self.environment, check=True, capture_output=True, text=True
        ).stdout

    def submit(self, script: Path, log: Path, options: Sequence[str]) -> str:
        """Submit a batch script; return its job."""
        found = self.run(
            "sbatch", "--parsable", f"--output={log}", *options, str(script)
        )
        return found.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        words = self.run("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def kill_node(self, name: str) -> None:
        """Kill the daemon of a node; its processes continue."""
        self._processes[name].kill()
        self._processes[name].wait()

    def end(self) -> None:
        """End the cluster and its jobs."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        subprocess.run(["pkill", "-9", "slurmstepd"], check=False)

    def wait_for_nodes(self) -> None:
        """Wait until all nodes are idle.

        Raises:
          RuntimeError: they do not come up.
        """
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            found = subprocess.run(
                ["sinfo", "-h", "-o", "%D %t"],
                env=self.environment,
                capture_output=True,
                text=True,
            ).stdout
            if found.split() == [str(len(self.nodes)), "idle"]:
                return
            time.sleep(0.2)
        raise RuntimeError(f"the nodes did not come up; see {self.folder}")


def _free_ports(number: int) -> list[int]:
    probes = [socket.socket() for _ in range(number)]
    for probe in probes:
        probe.bind(("", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
