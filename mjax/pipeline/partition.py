"""Assign the layers to virtual stages and to storage slots. NumPy only.

Input: L layers, P stages, v virtual stages per stage (`chunk` in names). Output: the
number of layers of each of the v P virtual stages (in annotations, K is this number),
and the order in which a run stores the layers.

Stage s holds the virtual stages s, s + P, s + 2P, ..., its local ones 0 to v - 1
(`pipeline.schedule`). The parameters of all layers are stacked along a dim of P v n
*slots*, where n is the number of layers of the largest virtual stage. Slot (s v + c)
n + i holds layer i of the local virtual stage c of stage s. So the slots of a stage are
contiguous, and sharding that dim over pp gives each stage its own layers. A virtual
stage with fewer than n layers leaves its last slots *empty*.

Layers differ in kind (window, rotation), and the kinds repeat with a period. The kind
is a compile-time constant of a kernel, and all stages run the same program. So layers
are assigned in *units* of one period. If the units do not divide evenly, some virtual
stages are one unit shorter: first the last one, which also computes the head, then the
first, which also computes the embedding, then the last but one, the second, and so on
inward.
"""

import dataclasses

import numpy as np
from jaxtyping import Int

EMPTY = -1
"""Entry of `Partition.layer_of_slot` if the slot has no layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partition:
    """The layers of each virtual stage, and the slots that store them."""

    num_stages: int
    """P, stages."""
    num_chunks: int
    """v, virtual stages per stage."""
    layers_per_chunk: tuple[int, ...]
    """Number of layers of each of the v P virtual stages, in the order of the model."""

    def __post_init__(self) -> None:
        """Refuse a wrong number of counts, and virtual stages without layers."""
        if len(self.layers_per_chunk) != self.num_stages * self.num_chunks:
            raise ValueError(
                f"{self.num_stages} stages of {self.num_chunks} virtual stages need "
                f"{self.num_stages * self.num_chunks} counts of layers, got "
                f"{self.layers_per_chunk}"
            )
        if min(self.layers_per_chunk) < 1:
            raise ValueError(
                "every virtual stage must have a layer, got the counts "
                f"{self.layers_per_chunk}"
            )

    @property
    def num_layers(self) -> int:
        """L, layers of the model."""
        return sum(self.layers_per_chunk)

    @property
    def chunk_size(self) -> int:
        """n, slots of every virtual stage: the layers of the largest one."""
        return max(self.layers_per_chunk)

    @property
    def num_slots(self) -> int:
        """P v n, the slots of all stages."""
        return len(self.layers_per_chunk) * self.chunk_size

    @property
    def first_layer(self) -> Int[np.ndarray, " K"]:
        """The first layer of each virtual stage, in the order of the model."""
        ends = np.cumsum(self.layers_per_chunk, dtype=np.int32)
        return ends - np.asarray(self.layers_per_chunk, np.int32)

    @property
    def layer_of_slot(self) -> Int[np.ndarray, " slots"]:
        """The layer in each slot, int32; EMPTY for an empty slot."""
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
        """Whether slot i holds layer i for all layers, and no slot is empty."""
        return np.array_equal(self.layer_of_slot, np.arange(self.num_layers))


def split(
    num_layers: int,
    *,
    num_stages: int,
    num_chunks: int,
    period: int = 1,
    uneven: bool = False,
) -> Partition:
    """Assign the layers to the virtual stages.

    Args:
      num_layers: L.
      num_stages: P.
      num_chunks: v, virtual stages per stage.
      period: layers after which the pattern of layer kinds repeats; every virtual stage
        starts at a multiple of it.
    Raises:
      ValueError: there are too few layers for the virtual stages, or they do not divide
        evenly and `uneven` is False, or the period does not divide them. The message
        states the rule without advice.
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
            f"the virtual stages of --mesh.pp {num_stages} x --pipeline.chunks "
            f"{num_chunks} hold whole patterns: --model.layers must be a multiple of "
            f"{period}, the pattern of --model.window and --model.rope, got "
            f"{num_layers}"
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
    """Order v P virtual stages from both ends inward: v P - 1, 0, v P - 2, 1, ..."""
    inward = np.arange(num_parts) // 2
    return np.where(np.arange(num_parts) % 2, inward, num_parts - 1 - inward)
