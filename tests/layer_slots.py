"""Layers of a tree between their order and the slots of a pipeline: in NumPy.

Converts leaf by leaf, with the tables of the partition, so that tests can compare the
result with that of `mjax.step.state` on the devices.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mjax.pipeline.partition import EMPTY, Partition


def in_order(tree: Any, partition: Partition) -> Any:
    """Take the layers, leaves [slots, ...] under "blocks", from their slots."""
    return _on_blocks(lambda x: x[partition.slot_of_layer], tree)


def in_slots(tree: Any, partition: Partition) -> Any:
    """Put the layers, leaves [L, ...], into their slots; zeros into empty ones."""
    is_filled = partition.layer_of_slot != EMPTY

    def slots(x: np.ndarray) -> np.ndarray:
        out = np.zeros((partition.num_slots, *x.shape[1:]), x.dtype)
        out[is_filled] = x[partition.layer_of_slot[is_filled]]
        return out

    return _on_blocks(slots, tree)


def _on_blocks(f: Callable[[np.ndarray], np.ndarray], tree: Any) -> Any:
    blocks = jax.tree_util.DictKey("blocks")
    return jax.tree_util.tree_map_with_path(
        lambda path, x: f(np.asarray(x)) if blocks in path else x, tree
    )
