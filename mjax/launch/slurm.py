"""A launch inside a Slurm allocation: `python -m mjax.launch slurm`.

Input: the config of a launch, the trainer's flags, and the variables that Slurm sets in
a batch script. Output: the exit code of the run. This process, on the first node, is
the driver; `srun` starts one agent on each node, including spares. After a node
failure, ranks restart inside the allocation, because a requeued job would wait for
minutes or longer.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mjax.launch.config import RunConfig
from mjax.launch.driver import TRAINER
from mjax.launch.local import TOKEN, drive

_POLL_S = 0.1
_RESPAWN_S = 5.0
_PARTING_S = 10.0
_KEEP = """
trap : TERM INT
while :; do
  "$@"
  code=$?
  [ $code -gt 128 ] || exit $code
  sleep 1
done
"""
"""Shell loop that restarts an agent that was killed, but not one that has exited. A
signal to all processes of the node must not end this shell before its agent."""


async def run(
    config: RunConfig,
    flags: Sequence[str],
    work_dir: Path,
    trainer: Sequence[str] = TRAINER,
) -> int:
    """Launch a run on the nodes of this allocation, and wait; return its exit code.

    Args:
      config: hosts and limits; hosts plus spares must be the number of nodes.
      flags: flags of `python -m mjax.train`.
      work_dir: work dir of the run, on a file system shared by all nodes.
      trainer: the command of a rank, without flags.
    Raises:
      ValueError: there is no allocation, its size is wrong, the work dir belongs to
        another run, or another driver or trainer of this host holds it.
      OSError: a port, a file or srun is not available.
    """
    num_nodes = nodes_of(config)
    agents = Agents(num_nodes, work_dir, work_dir / TOKEN)
    return await drive(
        *(config, flags, agents), work_dir=work_dir, trainer=trainer, host="0.0.0.0"
    )


def nodes_of(config: RunConfig, environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of nodes of this allocation, which must fit the run.

    Raises:
      ValueError: the number does not fit, or there is no allocation.
    """
    words = environment.get("SLURM_JOB_NUM_NODES", "")
    if not words.isdigit():
        raise ValueError(
            "this is not a Slurm allocation: SLURM_JOB_NUM_NODES is not set; submit a "
            "script (deploy/slurm/mjax.sbatch), or omit `slurm` for simulated hosts"
        )
    num_nodes, wanted = int(words), config.hosts + config.spares
    if num_nodes != wanted:
        raise ValueError(
            f"--hosts {config.hosts} and --spares {config.spares} need {wanted} nodes, "
            f"this allocation has {num_nodes}; change them or --nodes of sbatch"
        )
    return num_nodes


class Agents:
    """The agents of all nodes, as one job step in which nodes may fail."""

    def __init__(self, num_nodes: int, work_dir: Path, token: Path) -> None:
        """Store the arguments; `keep` starts the agents."""
        self._num_nodes, self._token = num_nodes, token.absolute()
        self._log = work_dir / "launch" / "agent-%N.log"
        self._process: subprocess.Popen[bytes] | None = None

    async def keep(self, driver: tuple[str, int], is_over: Callable[[], bool]) -> None:
        """Start the job step, and restart it whenever it ends in the run."""
        address = f"{socket.gethostname()}:{driver[1]}"
        while not is_over():
            if not self._runs():
                self._process = subprocess.Popen(
                    self.command(address), stdin=subprocess.DEVNULL
                )
            await asyncio.sleep(_RESPAWN_S)

    def command(self, driver: str) -> list[str]:
        """Return the command that starts an agent on each node.

        Args:
          driver: host:port of the driver.
        """
        step = {
            "nodes": self._num_nodes,
            "ntasks": self._num_nodes,
            "ntasks-per-node": 1,
            "kill-on-bad-exit": 0,  # the end of one agent must not end the others
            "wait": 0,
            "cpu-bind": "none",  # an agent shares the cores of its ranks
            "mpi": "none",
            "output": self._log,
            "open-mode": "append",
        }
        srun = ["srun", "--no-kill", *(f"--{name}={step[name]}" for name in step)]
        agent = [sys.executable, "-m", "mjax.launch", "agent", "--driver", driver]
        agent += ["--token-file", str(self._token)]
        return [*srun, "sh", "-c", _KEEP, "agent", *agent]

    async def end(self) -> None:
        """Wait for a limited time until the job step ends, then terminate it."""
        for _ in range(int(_PARTING_S / _POLL_S)):
            if not self._runs():
                return
            await asyncio.sleep(_POLL_S)
        assert self._process is not None
        self._process.terminate()

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None
