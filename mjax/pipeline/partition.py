"""Cut the layers into chunks, and say where each is stored. NumPy only.

Enters: L layers, P stages, v chunks a stage. Leaves: how many layers each of the
K = v P chunks has, and the order in which the layers of a run are stored.

Stage s holds the chunks s, s + P, s + 2P, ..., its local chunks 0 to v - 1
(`pipeline.schedule`). The parameters of all layers are stacked in P v n *slots*, n
being the layers of the largest chunk: slot (s v + c) n + i is layer i of local chunk c
of stage s, so that the slots of a stage are neighbours and a dim of slots is split over
the stages. Where a chunk has fewer than n layers, its last slots are *empty*.

Layers differ in kind (window, rotation), and kinds repeat with a period. A kernel sees
its kind as a constant, and every stage runs the same program. So layers are assigned in
*units* of one period. If the units do not divide evenly, some chunks are one unit
shorter: first the last chunk, which also computes the head, then the first, which
embeds, then the one before the last, the second, and so on inward.
"""

import dataclasses

import numpy as np
from jaxtyping import Int

EMPTY = -1
"""Entry of `Partition.layer_of_slot` where a slot holds no layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partition:
    """The layers of each chunk, and the slots that store them."""

    num_stages: int
    """P, stages."""
    num_chunks: int
    """v, chunks of each stage."""
    layers_per_chunk: tuple[int, ...]
    """Layers of each of the K = v P chunks, in the order of the model."""

    def __post_init__(self) -> None:
        """Refuse a list that does not fit the stages, and chunks without layers."""
        if len(self.layers_per_chunk) != self.num_stages * self.num_chunks:
            raise ValueError(
                f"{self.num_stages} stages of {self.num_chunks} chunks need "
                f"{self.num_stages * self.num_chunks} counts of layers, got "
                f"{self.layers_per_chunk}"
            )
        if min(self.layers_per_chunk) < 1:
            raise ValueError(
                f"every chunk needs a layer, got the counts {self.layers_per_chunk}"
            )

    @property
    def num_layers(self) -> int:
        """L, layers of the model."""
        return sum(self.layers_per_chunk)

    @property
    def chunk_size(self) -> int:
        """n, layers of the largest chunk, and slots of every chunk."""
        return max(self.layers_per_chunk)

    @property
    def num_slots(self) -> int:
        """P v n, slots of all stages."""
        return len(self.layers_per_chunk) * self.chunk_size

    @property
    def first_layer(self) -> Int[np.ndarray, " K"]:
        """The first layer of each chunk, in the order of the model."""
        ends = np.cumsum(self.layers_per_chunk, dtype=np.int32)
        return ends - np.asarray(self.layers_per_chunk, np.int32)

    @property
    def layer_of_slot(self) -> Int[np.ndarray, " slots"]:
        """The layer in each slot, int32; EMPTY where there is none."""
        within = np.arange(self.chunk_size, dtype=np.int32)
        counts = np.asarray(self.layers_per_chunk, np.int32)
        layers = self.first_layer[:, None] + within
        by_chunk = np.where(within < counts[:, None], layers, np.int32(EMPTY))
        stored = by_chunk.reshape(self.num_chunks, self.num_stages, -1)
        return stored.swapaxes(0, 1).reshape(-1)

    @property
    def slot_of_layer(self) -> Int[np.ndarray, " L"]:
        """The slot that holds each layer, int32."""
        slots = np.flatnonzero(self.layer_of_slot != EMPTY)
        order = np.argsort(self.layer_of_slot[slots])
        return slots[order].astype(np.int32)

    @property
    def is_canonical(self) -> bool:
        """Whether the slots are the layers in their order, none of them empty."""
        return np.array_equal(self.layer_of_slot, np.arange(self.num_layers))


def split(
    num_layers: int,
    *,
    num_stages: int,
    num_chunks: int,
    period: int = 1,
    uneven: bool = False,
) -> Partition:
    """Assign the layers to the chunks.

    Args:
      num_layers: L.
      num_stages: P.
      num_chunks: v, of each stage.
      period: layers after which the pattern of layer kinds repeats; every chunk starts
        at a multiple of it.
      uneven: allow chunks that are one period shorter than others, by the rule in the
        docstring of this module.
    Raises:
      ValueError: the layers do not fill the chunks, or do not divide evenly and
        `uneven` is not set, or the pattern does not divide the layers; without advice.
    """
    num_parts = num_stages * num_chunks
    if num_parts == 1:
        return Partition(num_stages=1, num_chunks=1, layers_per_chunk=(num_layers,))
    units = num_layers // period
    of_pattern = ""
    if period > 1:
        of_pattern = f" x {period}, the pattern of --model.window and --model.rope,"
    parts = f"--mesh.pp {num_stages} x --pipeline.chunks {num_chunks}{of_pattern}"
    if uneven and num_layers % period:
        raise ValueError(
            f"the chunks of --mesh.pp {num_stages} x --pipeline.chunks {num_chunks} "
            f"hold whole patterns: --model.layers must be a multiple of {period}, the "
            f"pattern of --model.window and --model.rope, got {num_layers}"
        )
    if not uneven and num_layers % (num_parts * period):
        raise ValueError(
            "without --pipeline.uneven-layers, --model.layers must be a multiple of "
            f"{parts} = {num_parts * period}, got {num_layers}"
        )
    if units < num_parts:
        raise ValueError(
            f"--model.layers must be at least {parts} = {num_parts * period}, got "
            f"{num_layers}"
        )
    size = -(-units // num_parts)
    counts = np.full(num_parts, size)
    counts[_shortest_first(num_parts)[: num_parts * size - units]] -= 1
    return Partition(
        num_stages=num_stages,
        num_chunks=num_chunks,
        layers_per_chunk=tuple((counts * period).tolist()),
    )


def _shortest_first(num_parts: int) -> Int[np.ndarray, " K"]:
    """Order the chunks by their work outside the layers: K - 1, 0, K - 2, 1, ..."""
    inward = np.arange(num_parts) // 2
    return np.where(np.arange(num_parts) % 2, inward, num_parts - 1 - inward)
