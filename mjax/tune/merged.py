"""Merge adapters into the weights of a base model.

Input: a source of tensors with adapters, such as a checkpoint of a tuned run. Output:
a source of the tensors of a plain model, in which each weight is W + scale A B. Sums
are computed in float32. Only the requested part of a tensor is read.
"""

import math
from collections.abc import Iterator

import numpy as np

from mjax.hugging_face.source import Index, TensorSource
from mjax.layers.adapters import ADAPTERS
from mjax.layers.config import AdapterConfig

_BLOCKS = "params.blocks."


def adapter_names(target: str) -> tuple[str, str]:
    """Return the names of A and B of a weight such as "attention.wq"."""
    part, _, name = target.rpartition(".")
    prefix = f"{_BLOCKS}{part}.{ADAPTERS}.{name}"
    return f"{prefix}.a", f"{prefix}.b"


def is_adapter(name: str) -> bool:
    """Return whether a tensor belongs to an adapter."""
    return ADAPTERS in name.split(".")


class Merged:
    """A `hugging_face.source.TensorSource` of the parameters with merged adapters."""

    def __init__(self, source: TensorSource, adapters: AdapterConfig) -> None:
        """Store the source; read nothing.

        Args:
          source: source of the parameters ("params...."), including those of the
            adapters.
          adapters: adapters of the run that wrote the source.
        """
        self._source = source
        self._scale = adapters.scale
        self._targets = {f"{_BLOCKS}{target}": target for target in adapters.targets}

    def names(self) -> Iterator[str]:
        """Return the names of all tensors except adapters and their moments."""
        return (name for name in self._source.names() if not is_adapter(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a complete tensor."""
        return self._source.shape(name)

    def dtype(self, name: str) -> np.dtype:
        """Return float32 for a weight with an adapter, otherwise the source's dtype."""
        if name in self._targets:
            return np.dtype(np.float32)
        return self._source.dtype(name)

    def read(self, name: str, index: Index = ...) -> np.ndarray:
        """Return the part of a tensor at an index."""
        box = self._source.read(name, index)
        if name not in self._targets:
            return box
        a_name, b_name = adapter_names(self._targets[name])
        shape = self.shape(name)
        slices = (slice(None),) * len(shape) if index is ... else index
        num_inputs = len(self._source.shape(a_name)) - 2  # besides layers and rank
        every = slice(None)
        a = self._source.read(a_name, (*slices[: 1 + num_inputs], every))
        b = self._source.read(b_name, (slices[0], every, *slices[1 + num_inputs :]))
        rank, num_layers = a.shape[-1], a.shape[0]
        num_rows, num_columns = math.prod(a.shape[1:-1]), math.prod(b.shape[2:])
        left = a.astype(np.float32).reshape(num_layers, num_rows, rank)
        right = b.astype(np.float32).reshape(num_layers, rank, num_columns)
        added = self._scale * (left @ right)
        return box.astype(np.float32) + added.reshape(box.shape).astype(np.float32)
