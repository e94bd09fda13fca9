"""Choose how many bytes of weights or gradients XLA may combine in one collective.

Input: the weights of one layer, and their sharding. Output: thresholds for the three
kinds of data-parallel collectives. `mjax.hardware.xla_flags` turns them into options.

The weights of a layer are gathered, and its gradients reduced, while the preceding
layer computes (`mjax.step.prefetch`). This compute time is the collectives' window. So
without a pipeline each threshold is the bytes of one layer.

- With smaller thresholds each weight has its own collective. Each counts against the
  limit of collectives in flight, and most start after the last matmul of the window.
- With larger thresholds XLA may combine two layers, or a layer with the embedding. Data
  can be used only when its whole collective has arrived, but the window is still the
  compute time of one layer.

In a pipeline the weights of a layer are joined into a few large arrays. The first tick
gathers these layer by layer, and a layer's first matmul is the window for the weights
of its second matmul (`mjax.pipeline.pieces`). So each threshold is the bytes of the
smallest matrix: norms and biases are combined, matrices are not.

XLA compares a threshold with the bytes of a collective's result: whole weights for an
all-gather, one shard for a reduce-scatter. docs/overlap.md has counts from compiled
programs.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """A weight of one layer."""

    size: int
    """Number of entries on one tp device, before sharding over dp_shard."""
    is_matrix: bool
    """Whether the weight is a matrix; False for scales and biases."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Limits on the result of a combined collective, in bytes per device."""

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
    """Choose the thresholds for combining collectives.

    Args:
      gathered: the weights of one layer.
      reduced: the weights that have gradients.
      gather_bytes: maximum bytes of gathered weights in a collective; None: chosen as
        the module docstring says.
      reduce_bytes: maximum bytes of unreduced gradients in a collective; None: chosen
        in the same way.
      gather_itemsize: bytes of a gathered entry.
      reduce_itemsize: bytes of a reduced entry.
      level: ZeRO level.
      shards: number of devices over which state is sharded.
      shards_per_node: number of devices in the first step of a reduce-scatter; all
        shards if it has one step.
      is_pipeline: whether weights are joined and gathered in pieces.
    Returns:
      The thresholds. An all-reduce carries whole gradients at levels 0 and 1, and one
      shard of the gradients at levels 2 and 3.
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
    """Return the number of entries that one collective may carry."""
    if not is_pipeline:
        return sum(weight.size for weight in weights)
    matrices = [weight.size for weight in weights if weight.is_matrix]
    return min(matrices, default=0)
