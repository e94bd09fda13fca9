"""Run on fewer hosts: same global batch, same data, more microbatches.

Input: the trainer's config for all hosts. Output: the numbers of hosts on which it can
train, and the flags that each number changes. Hosts are removed from the data-parallel
axis. A device never has more sequences in a microbatch than before, so a step takes
more microbatches. The trainer checks all other divisibility rules, such as those of
state shards.
"""

import json
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

_DP, _MICROBATCHES = "--mesh.dp", "--batch.microbatches"
_PER_NODE = "--mesh.dp-shard-per-node"


def of_one_rank(num_ranks: int) -> list[str]:
    """Return flags with which the trainer checks its config for all ranks of a run.

    Args:
      num_ranks: number of ranks. With simulated devices, the trainer then knows the
        number of devices, and refuses a model or a batch that does not fit them.
    """
    flags = ["--distributed.num-processes", str(num_ranks)]
    if num_ranks > 1:  # the trainer wants all three; it connects to nothing
        flags += ["--distributed.coordinator", "localhost:1"]
        flags += ["--distributed.process-id", "0"]
    return flags


def trainer_config(command: Sequence[str], timeout_s: float) -> Mapping[str, Any]:
    """Return the configuration that the trainer reads from its flags.

    Args:
      command: command of the trainer, with its flags.
      timeout_s: time limit of the command, in seconds.
    Raises:
      ValueError: the trainer refuses the flags, with the trainer's own message.
    """
    try:
        done = subprocess.run(
            [*command, "--print-config"],
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"the trainer did not print its config in {timeout_s:g} s; give a longer "
            "--limits.import-s"
        ) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ValueError(lines[-1].removeprefix("error: "))
    return json.loads(done.stdout)


def sizes(
    config: Mapping[str, Any], *, hosts: int, least: int, devices_per_host: int | None
) -> dict[int, dict[str, list[str]]]:
    """Return the numbers of hosts on which the trainer can run, largest first.

    Args:
      config: config of the trainer, as `--print-config` prints it.
      hosts: number of hosts that the config is for.
      least: smallest number of hosts allowed.
      devices_per_host: devices per host; None if unknown, in which case the config must
        give dp.
    Returns:
      Number of hosts -> the flags that change with it, each with its values.
    Raises:
      ValueError: dp is neither given nor known.
    """
    mesh, batch = config["mesh"], config["batch"]
    dp = mesh["dp"]
    if dp == -1:
        if devices_per_host is None or -1 in (mesh["pp"], mesh["tp"]):
            raise ValueError(
                "--min-hosts needs the data-parallel size; give --mesh.dp or "
                "--simulate-devices"
            )
        dp = hosts * devices_per_host // (mesh["pp"] * mesh["tp"])
    found: dict[int, dict[str, list[str]]] = {hosts: {}}
    for fewer in range(hosts - 1, least - 1, -1):
        smaller, rest = divmod(dp * fewer, hosts)
        shard = mesh["dp_shard"]
        if rest or smaller < 1 or (shard is not None and smaller % shard):
            continue
        microbatches = _microbatches(batch["size"], batch["microbatches"], dp, smaller)
        if microbatches is None:
            continue
        found[fewer] = {_MICROBATCHES: [str(microbatches)]}
        if mesh["dp"] != -1:
            found[fewer][_DP] = [str(smaller)]
        per_node = mesh["dp_shard_per_node"]
        if shard is None and per_node and (smaller <= per_node or smaller % per_node):
            found[fewer][_PER_NODE] = ["None"]  # one node, or part of a node
    return found


def _microbatches(size: int, before: int, dp: int, smaller: int) -> int | None:
    """Return the fewest microbatches no larger per device than before, or None."""
    rows = size / (dp * before)
    for number in range(before, size // smaller + 1):
        if size % (smaller * number) == 0 and size / (smaller * number) <= rows:
            return number
    return None


def devices_per_host(config: Mapping[str, Any], ranks_per_host: int) -> int | None:
    """Return the devices per host if simulated or visible here, otherwise None."""
    if config["simulate_devices"] is not None:
        return config["simulate_devices"] * ranks_per_host
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) or None


class Sizes:
    """Chooses the number of hosts on which a run continues."""

    def __init__(self, wanted: int, others: Collection[int]) -> None:
        """Store the possible numbers of hosts.

        Args:
          wanted: preferred number.
          others: other possible numbers.
        """
        self._wanted, self._fitting = wanted, {wanted, *others}

    @property
    def least(self) -> int:
        """The smallest possible number of hosts."""
        return min(self._fitting)

    def best(self, num_ready: int, *, waits: bool) -> int | None:
        """Return how many of the ready hosts to use; None means wait for more.

        Args:
          num_ready: number of hosts that can have ranks.
          waits: whether to wait for more hosts.
        """
        if num_ready >= self._wanted:
            return self._wanted
        fitting = [size for size in self._fitting if size <= num_ready]
        return None if waits or not fitting else max(fitting)

    def discard(self, size: int) -> bool:
        """Exclude a number of hosts; return False if it is `wanted`."""
        if size == self._wanted:
            return False
        self._fitting.discard(size)
        return True
