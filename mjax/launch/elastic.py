"""Sizes of a run on fewer hosts: the same global batch, the same data, less at a time.

Enters: the trainer's config on all hosts. Leaves: the numbers of hosts on which it can
train, and the flags that differ there. Hosts are taken from the data-parallel axis;
each device keeps at most the rows that it has at once, so a step takes more
microbatches. What else a size must divide (the shards of a state) the trainer checks.
"""

import json
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

_DP, _MICROBATCHES = "--mesh.dp", "--batch.microbatches"
_PER_NODE = "--mesh.dp-shard-per-node"


def trainer_config(command: Sequence[str], timeout_s: float) -> Mapping[str, Any]:
    """Ask the trainer what its flags mean.

    Args:
      command: of the trainer, with its flags.
      timeout_s: that it may take to import.
    Raises:
      ValueError: it refuses the flags, in its own words.
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
    """Return the numbers of hosts that fit, most first, with the flags that differ.

    Args:
      config: of the trainer, as `--print-config` has it.
      hosts: on which it trains as its flags say.
      least: hosts that are too few by one.
      devices_per_host: on each; None: unknown, then the flags must say dp.
    Raises:
      ValueError: dp is neither given nor known.
    """
    mesh, batch = config["mesh"], config["batch"]
    dp = mesh["dp"]
    if dp == -1:
        if devices_per_host is None or -1 in (mesh["pp"], mesh["tp"]):
            raise ValueError(
                "--min-hosts needs the data-parallel size; give --mesh.dp, or "
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
            found[fewer][_PER_NODE] = ["None"]  # one node, or parts of nodes
    return found


def _microbatches(size: int, before: int, dp: int, smaller: int) -> int | None:
    """Return the fewest with which no device has more rows at once; None: none fits."""
    rows = size / (dp * before)
    for number in range(before, size // smaller + 1):
        if size % (smaller * number) == 0 and size / (smaller * number) <= rows:
            return number
    return None


def devices_per_host(config: Mapping[str, Any], ranks_per_host: int) -> int | None:
    """Return the devices of a host, if they are simulated or can be counted here."""
    if config["simulate_devices"] is not None:
        return config["simulate_devices"] * ranks_per_host
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) or None


class Sizes:
    """On how many hosts a run goes on."""

    def __init__(self, wanted: int, others: Collection[int]) -> None:
        """Know the numbers of hosts.

        Args:
          wanted: if there are so many.
          others: that do as well.
        """
        self._wanted, self._fitting = wanted, {wanted, *others}

    @property
    def least(self) -> int:
        """The fewest."""
        return min(self._fitting)

    def best(self, num_ready: int, *, waits: bool) -> int | None:
        """Return how many of the hosts that are ready to take; None: wait for more.

        Args:
          num_ready: hosts that can have ranks.
          waits: whether more may still come.
        """
        if num_ready >= self._wanted:
            return self._wanted
        fitting = [size for size in self._fitting if size <= num_ready]
        return None if waits or not fitting else max(fitting)

    def discard(self, size: int) -> bool:
        """Try no more with so few hosts; False, and nothing done, if all are there."""
        if size == self._wanted:
            return False
        self._fitting.discard(size)
        return True
