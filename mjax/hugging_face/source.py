"""Sources of the tensors of a model, read part by part.

A source names its tensors as checkpoints do ("params.blocks.attention.wq"), in
canonical form: tensors of the blocks are stacked, `[L, ...]`. Readers do not depend on
whether the source is a checkpoint or files of another format.
"""

from collections.abc import Iterable
from types import EllipsisType
from typing import Protocol, runtime_checkable

import numpy as np

Index = tuple[slice, ...] | EllipsisType
"""A box of a tensor: one slice of step 1 per dim, or ... for all of it."""


@runtime_checkable
class TensorSource(Protocol):
    """Named tensors; a host can read any box of them."""

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a complete tensor."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype that `read` returns."""
        ...

    def read(self, name: str, index: Index = ...) -> np.ndarray:
        """Return one box of a tensor; read only the data in the box.

        `jax.make_array_from_callback(shape, sharding, lambda index: source.read(name,
        index))` puts a tensor straight onto a mesh.
        """
        ...
