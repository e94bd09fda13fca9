"""Name the mesh axes and compute their sizes.

Input: the sizes that the user sets (`MeshConfig`) and a number of devices. Output: one
size per axis (`AxisSizes`). Nothing here touches a device.
"""

import dataclasses
import math
from typing import Literal

PP = "pp"
DP_REPLICATE = "dp_replicate"
DP_NODE = "dp_node"
DP_SHARD = "dp_shard"
TP = "tp"
AXES = (PP, DP_REPLICATE, DP_NODE, DP_SHARD, TP)
"""All mesh axes, outermost (slowest link) first; an unused one has size 1."""

DP = (DP_REPLICATE, DP_NODE, DP_SHARD)
"""The axes over which the batch is split."""

SHARDS = (DP_SHARD, DP_NODE)
"""The axes over which state is sharded, as `--zero` says; the major axis is first. So a
gather over dp_node and then over dp_shard joins neighbouring shards."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes."""

    pp: int = 1
    """Pipeline stages; -1 uses the remaining devices."""
    dp: int = -1
    """Data-parallel size, replicas times shards; -1 uses the remaining devices."""
    dp_shard: int | None = None
    """Devices over which state is sharded (see --zero); None uses all of dp."""
    dp_shard_per_node: int | None = None
    """Shards per node: gather and reduce-scatter in two steps, between nodes and inside
    them; None uses one step."""
    tp: int = 1
    """Tensor-parallel size; -1 uses the remaining devices."""
    gather_first: bool = False
    """Gather the embedding and the first layer before the batch arrives, in a separate
    call; for slow data."""
    tp_across_hosts: bool = False
    """Let a tensor-parallel group span hosts (slow links)."""
    tp_overlap: Literal["off", "chunks"] = "off"
    """Tensor-parallel communication of activations. off: all at once, before and after
    a matmul; chunks: in chunks, each overlapped with the matmul of another chunk."""
    tp_chunks: int | None = None
    """Number of chunks with --mesh.tp-overlap chunks, 2 to tp; None uses tp."""

    def __post_init__(self) -> None:
        sizes = {"pp": self.pp, "dp": self.dp, "tp": self.tp}
        open_axes = [name for name, size in sizes.items() if size == -1]
        for name, size in sizes.items():
            if size < 1 and size != -1:
                fill = "" if open_axes else ", or -1 for the remaining devices"
                raise ValueError(f"--mesh.{name} must be at least 1{fill}, got {size}")
        if len(open_axes) > 1:
            raise ValueError(
                f"only one mesh axis can be -1, got {' and '.join(open_axes)}; give a "
                f"size to all but one of --mesh.{', --mesh.'.join(open_axes)}"
            )
        if self.dp_shard is not None and self.dp_shard < 1:
            raise ValueError(
                f"--mesh.dp-shard must be at least 1, got {self.dp_shard}; leave it "
                "out to shard over all of dp"
            )
        if self.dp_shard_per_node is not None and self.dp_shard_per_node < 2:
            raise ValueError(
                "--mesh.dp-shard-per-node must be at least 2, got "
                f"{self.dp_shard_per_node}; leave it out: with one shard per node "
                "there is nothing to gather inside a node"
            )
        if self.tp_chunks is not None and self.tp_chunks < 2:
            raise ValueError(
                f"--mesh.tp-chunks must be at least 2, got {self.tp_chunks}; leave it "
                "out"
            )
        if self.tp_chunks is not None and self.tp_overlap == "off":
            raise ValueError(
                f"--mesh.tp-chunks {self.tp_chunks} needs --mesh.tp-overlap chunks"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisSizes:
    """The size of every mesh axis. Their product is the number of devices."""

    pp: int
    dp_replicate: int
    dp_node: int = 1
    """Nodes over which the state is sharded, if gathers have two steps; otherwise 1."""
    dp_shard: int
    """Shards on each of these nodes; all shards if dp_node is 1."""
    tp: int

    @property
    def shards(self) -> int:
        """Devices over which state is sharded: nodes times shards on each."""
        return self.dp_node * self.dp_shard

    @property
    def dp(self) -> int:
        """Data-parallel size: replicas times shards."""
        return self.dp_replicate * self.shards

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return self.pp * self.dp * self.tp

    def as_tuple(self) -> tuple[int, int, int, int, int]:
        """Return the sizes in the order of `AXES`."""
        return (self.pp, self.dp_replicate, self.dp_node, self.dp_shard, self.tp)


def resolve(config: MeshConfig, num_devices: int) -> AxisSizes:
    """Compute the size of every axis for a number of devices.

    Args:
      config: the requested sizes, at most one of them -1.
      num_devices: available devices; the mesh uses all of them.
    Returns:
      The sizes; their product is num_devices.
    Raises:
      ValueError: the sizes cannot use exactly num_devices devices, dp_shard does not
        divide dp, or dp_shard_per_node is not a proper divisor of dp_shard.
    """
    sizes = {"pp": config.pp, "dp": config.dp, "tp": config.tp}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    is_open = -1 in sizes.values()
    if num_devices % fixed if is_open else num_devices != fixed:
        asked = " x ".join(f"--mesh.{name} {s}" for name, s in sizes.items() if s != -1)
        raise ValueError(
            f"the number of devices must be {'a multiple of ' if is_open else ''}"
            f"{asked} = {fixed}, got {num_devices}"
        )
    pp, dp, tp = (num_devices // fixed if s == -1 else s for s in sizes.values())
    dp_shard = dp if config.dp_shard is None else config.dp_shard
    if dp % dp_shard:
        raise ValueError(
            f"--mesh.dp-shard must be a divisor of dp, which is {dp} on {num_devices} "
            f"devices, got {dp_shard}"
        )
    per_node = config.dp_shard_per_node or dp_shard
    is_two_steps = config.dp_shard_per_node is not None
    if dp_shard % per_node or (is_two_steps and per_node == dp_shard):
        raise ValueError(
            "--mesh.dp-shard-per-node must be a divisor of dp_shard and smaller, got "
            f"{per_node} with dp_shard {dp_shard}; leave it out if dp_shard is inside "
            "one node"
        )
    return AxisSizes(
        pp=pp,
        dp_replicate=dp // dp_shard,
        dp_node=dp_shard // per_node,
        dp_shard=per_node,
        tp=tp,
    )


def tp_chunks(config: MeshConfig, tp: int) -> int:
    """Return the number of chunks of tensor-parallel communication; 1: all at once.

    Args:
      config: the requested sizes.
      tp: size of the axis tp.
    Raises:
      ValueError: there are more chunks than tp.
    """
    if config.tp_overlap == "off" or tp == 1:
        return 1
    num = tp if config.tp_chunks is None else config.tp_chunks
    if num > tp:
        raise ValueError(f"--mesh.tp-chunks must be at most --mesh.tp {tp}, got {num}")
    return num
