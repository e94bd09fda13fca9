"""Arguments of the executor: a model as functions, its weights, its options."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float, Int, PyTree

Microbatch = dict[str, Int[Array, "b T"]]
Microbatches = dict[str, Int[Array, "M b T"]]
Row = dict[str, Int[Array, ""]]
"""The entries of one tick in this stage's column of the tables."""


STASH = "pipeline_stash"
"""Name in the traced step of the ring buffers between forward and backward slots."""


class Chunks(NamedTuple):
    """Weights of a stage's chunks in training, or their gradients, [v, n, ...]."""

    joined: PyTree
    """Matrices whose gradients the backward pass adds to their sums in place; see
    `pipeline.held.Held`."""
    others: PyTree
    """All other weights."""


class Weights(NamedTuple):
    """Weights or their gradients, as one device holds them."""

    chunks: PyTree
    """Leaves [v, n, ...]: the n layers of each of this stage's v chunks; in training
    `Chunks`."""
    embedding: PyTree
    """Weights that make the first chunk's input, the same on every stage. A tied head
    reads them too."""
    head: PyTree
    """Weights that only the head reads, the same on every stage: final norm, matrix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model as a pipeline sees it: functions that run per device."""

    embed: Callable[[PyTree, Microbatch], Float[Array, "b t D"]]
    """(embedding, microbatch) -> input of the first chunk."""
    context: Callable[[Microbatch], PyTree]
    """Arrays that all layers read beside their input; never stored, no gradient."""
    chunk: Callable[[Array, PyTree, PyTree, Array], Float[Array, "b t D"]]
    """(input, weights, context, the chunk's number in the model) -> output. The weights
    are [n, ...], in training `pipeline.held.Held`. An idle slot may run it on zeros and
    on outputs of other chunks. The results must then be finite."""
    head: Callable[[PyTree, PyTree, Array, Microbatch], Float[Array, "*dims"]]
    """(embedding, head, output of the last chunk, microbatch) -> the loss, or any
    result."""
    hold: Callable[[PyTree], PyTree] = lambda joined: joined
    """(joined weights of a layer) -> the weights as `chunk` uses them in training, for
    example in 8 bits; called when a stage begins to hold them."""
