"""Pairs of hosts that exchange data, because their devices are neighbours in the mesh.

Input: the sizes of the mesh and the GPUs of a host. Output: pairs of slots (positions
in the order of hosts), with the number of neighbouring pairs of devices. Devices are
laid out as in `mjax.mesh.build`: host by host, with the axes pp, dp_replicate, dp_shard
(dp_node included) and tp, outermost first.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """Sizes of the mesh axes."""

    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Data-parallel size, replicas times shards."""
    dp_shard: int | None = None
    """Number of devices over which state is sharded; None: all of dp."""
    tp: int = 1
    """Tensor-parallel size; it stays inside a host."""
    pipeline_wraps: bool = False
    """Whether the last stage sends to the first, as with --pipeline.chunks above 1."""

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--{name} must be at least 1, got {getattr(self, name)}"
                )
        if self.dp_shard is not None and (self.dp_shard < 1 or self.dp % self.dp_shard):
            raise ValueError(
                f"--dp-shard must be a divisor of --dp {self.dp}, got {self.dp_shard}"
            )

    @property
    def num_devices(self) -> int:
        """Number of devices in the mesh."""
        return self.pp * self.dp * self.tp


Edges = list[tuple[int, int, int, int]]
"""For each pair of slots: slot, other slot, number of pairs of neighbouring devices
over dp, and number of such pairs over pp."""


def edges_of(sizes: MeshSizes, num_gpus: int) -> Edges:
    """Count the pairs of neighbouring devices between each two slots.

    Args:
      sizes: sizes of the mesh.
      num_gpus: number of GPUs of a host, which is one slot.
    """
    dp: Counter[tuple[int, int]] = Counter()
    pp: Counter[tuple[int, int]] = Counter()
    for device in range(sizes.num_devices):
        for other, is_pp in _following(device, sizes):
            one, two = sorted((device // num_gpus, other // num_gpus))
            if one != two:
                (pp if is_pp else dp)[one, two] += 1
    return [(a, b, dp[a, b], pp[a, b]) for a, b in sorted(dp.keys() | pp.keys())]


def _following(device: int, sizes: MeshSizes) -> Iterator[tuple[int, bool]]:
    """Yield (next device, whether the axis is pp) for each axis."""
    shard = sizes.dp if sizes.dp_shard is None else sizes.dp_shard
    axes = (
        (shard, sizes.tp, True, False),
        (sizes.dp // shard, shard * sizes.tp, True, False),
        (sizes.pp, sizes.dp * sizes.tp, sizes.pipeline_wraps, True),
    )
    for size, stride, is_ring, is_pp in axes:
        index = device // stride % size
        if index + 1 < size:
            yield device + stride, is_pp
        elif is_ring and size > 2:  # a ring of two has one pair of neighbours
            yield device - index * stride, is_pp
