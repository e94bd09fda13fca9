"""Name the mesh axes and compute their sizes.

Enters: the wish of the user (`MeshConfig`) and a number of devices. Leaves: one size
per axis (`AxisSizes`). Nothing here touches a device.
"""

import dataclasses

PP = "pp"
DP_REPLICATE = "dp_replicate"
DP_SHARD = "dp_shard"
TP = "tp"
AXES = (PP, DP_REPLICATE, DP_SHARD, TP)
"""All mesh axes, outermost (slowest link) first; an unused one has size 1."""

DP = (DP_REPLICATE, DP_SHARD)
"""The pair of axes over which the batch is split."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes."""

    pp: int = 1
    """Pipeline stages; -1 takes the devices that the other axes leave."""
    dp: int = -1
    """Data-parallel size, replicas times shards; -1 takes what is left."""
    dp_shard: int | None = None
    """Devices over which state is sharded (see --zero); None is all of dp."""
    tp: int = 1
    """Tensor-parallel size; -1 takes what is left."""
    tp_across_hosts: bool = False
    """Let a tensor-parallel group span hosts (slow links)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxisSizes:
    """The size of every mesh axis; the product is the number of devices."""

    pp: int
    dp_replicate: int
    dp_shard: int
    tp: int

    @property
    def dp(self) -> int:
        """Data-parallel size: replicas times shards."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return self.pp * self.dp * self.tp

    def as_tuple(self) -> tuple[int, int, int, int]:
        """Return the sizes in the order of `AXES`."""
        return (self.pp, self.dp_replicate, self.dp_shard, self.tp)
