"""Choose the bytes of weights or gradients that XLA may combine into one collective.

Input: the weights of one layer, and their sharding. Output: thresholds for the three
kinds of data-parallel collectives. `mjax.hardware.xla_flags` turns them into options.

The weights of a layer are gathered, and its gradients reduced, in a window: the compute
time of the preceding layer (`mjax.step.prefetch`). So without a pipeline the thresholds
are the bytes of one layer.

- Below them each weight has its own collective. Each counts against the limit of
  collectives in flight, and most start after the last matmul of the window.
- Above them XLA may combine two layers, or a layer with the embedding. Data can be used
  only when its whole collective has arrived, but the window is still that of one layer.

In a pipeline the weights of a layer are joined into few large ones. The first tick
gathers them layer by layer, and the first matmul of a layer is the window for the
weights of the second (`mjax.pipeline.pieces`). So the thresholds are the bytes of the
smallest matrix: norms and biases are combined, matrices are not.

XLA compares a threshold with the bytes of a collective's result: the whole weights for
an all-gather, one shard for a reduce-scatter. docs/overlap.md has counts from compiled
programs.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """A weight of one layer."""

    size: int
    """Number of entries on one tp device, unsharded over dp_shard."""
    is_matrix: bool
    """False for scales and biases."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Bytes of the result of a combined collective on one device, by kind."""

    all_gather: int
    reduce_scatter: int
    all_reduce: int


def choose_thresholds(
    gathered: Sequence[Weight],
    reduced: Sequence[Weight],
    *,
    gather_bytes: int | None = None,
    reduce_bytes: int | None = None,
    gather_itemsize: int,
    reduce_itemsize: int,
    level: int,
    shards: int,
    shards_per_node: int,
    is_pipeline: bool,
) -> Thresholds:
    """Choose the thresholds.

    Args:
      gathered: the weights of one layer.
      reduced: the weights that have gradients.
      gather_bytes: largest bytes of gathered weights in a collective; None chooses.
      reduce_bytes: largest bytes of gradients before reduction; None chooses.
      gather_itemsize: bytes of a gathered entry.
      reduce_itemsize: bytes of a reduced entry.
      level: ZeRO level.
      shards: number of devices over which state is sharded.
      shards_per_node: number of devices in the first stage of a reduce-scatter; all
        shards if it has one stage.
      is_pipeline: whether weights are joined and gathered in pieces.
    Returns:
      The thresholds. An all-reduce carries whole gradients at levels 0 and 1, and one
      shard of them at levels 2 and 3.
    """
    if gather_bytes is None:
        gather_bytes = _together(gathered, is_pipeline) * gather_itemsize
    if reduce_bytes is None:
        reduce_bytes = _together(reduced, is_pipeline) * reduce_itemsize
    return Thresholds(
        all_gather=gather_bytes,
        reduce_scatter=-(-reduce_bytes // shards_per_node),
        all_reduce=reduce_bytes if level < 2 else -(-reduce_bytes // shards),
    )


def _together(weights: Sequence[Weight], is_pipeline: bool) -> int:
    """Return the number of entries that may share a collective."""
    if not is_pipeline:
        return sum(weight.size for weight in weights)
    matrices = [weight.size for weight in weights if weight.is_matrix]
    return min(matrices, default=0)
