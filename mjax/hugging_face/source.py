"""Where the tensors of a model are read from, box by box.

A source names its tensors as checkpoints do ("params.blocks.attention.wq"), in
canonical form: those of the blocks are stacked, `[L, ...]`. What reads one need not
know whether a checkpoint or files of another format lie behind.
"""

from collections.abc import Iterable
from types import EllipsisType
from typing import Protocol, runtime_checkable

import numpy as np

Index = tuple[slice, ...] | EllipsisType
"""A box of a tensor: one slice of step 1 for each dim, or all of it."""


@runtime_checkable
class TensorSource(Protocol):
    """Named tensors of which any box can be read, on the host."""

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype that `read` returns."""
        ...

    def read(self, name: str, index: Index = ...) -> np.ndarray:
        """Return one box of a tensor; reads what lies in the box, not the rest.

        `jax.make_array_from_callback(shape, sharding, lambda index: source.read(name,
        index))` puts a tensor straight onto a mesh.
        """
        ...
