"""Arguments of the executor: a model as functions, its weights and its options.

In names, `chunk` is a virtual stage.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float, Int, PyTree

Microbatch = dict[str, Int[Array, "b T"]]
Microbatches = dict[str, Int[Array, "M b T"]]
Row = dict[str, Int[Array, ""]]
"""This stage's entry in each table of the schedule for one tick, by table name."""


STASH = "pipeline_stash"
"""Name, in the traced step, of the arrays kept from forward to backward half-ticks."""


class Chunks(NamedTuple):
    """Weights of a stage's virtual stages in training, or their gradients.

    Leaves are [v, n, ...]: v virtual stages per stage, n layers per virtual stage.
    """

    joined: PyTree
    """The weights of each projection of a layer, joined into one matrix per projection
    (`layers.linear.Joined`). The backward pass accumulates their gradients in place;
    see `pipeline.held.Held`."""
    others: PyTree
    """All other weights."""


class Weights(NamedTuple):
    """Weights, or their gradients, on one device."""

    chunks: PyTree
    """Weights of the layers, leaves [v, n, ...] as in `Chunks`; in training a
    `Chunks`."""
    embedding: PyTree
    """Weights of the embedding, which makes the input of the first virtual stage; the
    same on every stage. A tied head reads them too."""
    head: PyTree
    """Weights that only the head reads (norm, matrix); the same on every stage."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model as functions for the executor; they run per device."""

    embed: Callable[[PyTree, Microbatch], Float[Array, "b t D"]]
    """(embedding, microbatch) -> input of the first virtual stage."""
    context: Callable[[Microbatch], PyTree]
    """(microbatch) -> arrays that all layers read besides their input; these are not
    stored and have no gradient."""
    chunk: Callable[[Array, PyTree, PyTree, Array], Float[Array, "b t D"]]
    """(input, weights, context, index of the virtual stage in the model) -> output.
    The weights are [n, ...]; in training `pipeline.held.Held`. An idle half-tick may
    run the function on zeros or on the output of another virtual stage; the results
    must be finite in that case too."""
    head: Callable[[PyTree, PyTree, Array, Microbatch], Float[Array, "*dims"]]
    """(embedding, head, output of the last virtual stage, microbatch) -> the loss in
    training; any result in `run.forward`."""
    hold: Callable[[PyTree], PyTree] = lambda joined: joined
    """(joined weights of a layer) -> the weights that `chunk` uses in training, for
    example in FP8; called when a stage selects the weights of a virtual stage."""
