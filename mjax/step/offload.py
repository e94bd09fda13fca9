"""Offload the residuals of layers to host memory, and load them ahead of their use.

Input: the residual of each layer, which is its input. Output: the same array in pinned
host memory, and in the backward pass on the device again. While the backward pass of
layer l runs, the input of layer l - K is copied to the device, where K is the loading
horizon. So each copy has the time of K layers. The device holds K inputs, plus the one
in use and the one that is arriving. The last K layers of a model keep their inputs on
the device if they are outside the loop over layers, because their backward pass runs
first.

Rejected: the offload policy of `jax.checkpoint`. It loads an input in the iteration
that reads it, so no compute overlaps the copy.

Everything runs per device inside shard_map.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from mjax.mesh.host_memory import to_device, to_host

Ahead = tuple[PyTree, ...]
"""Residuals on the device of the next K layers of the backward pass, in its order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload:
    """Offloads the inputs of layers to host memory until their backward pass."""

    num_layers: int
    """L."""
    num_scanned: int
    """Layers in the loop: the first ones, in whole patterns."""
    period: int
    """Layers of a pattern."""
    horizon: int
    """K, from 1 to L - 1."""

    def store(self, kept: PyTree, index: Int[Array, ""] | int) -> PyTree:
        """Copy the residuals of a layer to the host.

        Args:
          kept: arrays on the device.
          index: index of the layer; a Python int after the loop.
        Returns:
          the same in host memory; unchanged if it is one of the last K layers and after
          the loop.
        """
        if isinstance(index, int) and index >= self.num_layers - self.horizon:
            return kept
        return jax.tree.map(to_host, kept)

    def start(self, scanned: tuple[PyTree, ...], rest: tuple[PyTree, ...]) -> Ahead:
        """Load the residuals of the last K layers, except those after the loop.

        Args:
          scanned: for each place in the pattern, the results of `store`, stacked by the
            loop.
          rest: what `store` returned for each layer after the loop.
        """
        last = range(self.num_layers - self.horizon, self.num_layers)
        return tuple(self._load(scanned, rest, index) for index in reversed(last))

    def advance(
        self,
        ahead: Ahead,
        scanned: tuple[PyTree, ...],
        rest: tuple[PyTree, ...],
        *,
        index: int,
        dy: Array,
    ) -> tuple[PyTree, Ahead]:
        """Return the residuals of a layer after the loop; load those of layer - K.

        Args:
          ahead: from the layer above.
          scanned: as for `start`.
          rest: likewise.
          index: index of the layer.
          dy: gradient of its output; the load starts when this is ready.
        """
        # Below the first layer there is none: the first input is loaded again, unused.
        below = max(index - self.horizon, 0)
        loaded = self._load(scanned, rest, below, after=dy)
        return ahead[0], (*ahead[1:], loaded)

    def advance_in_loop(
        self,
        ahead: Ahead,
        scanned: tuple[PyTree, ...],
        *,
        place: int,
        first: Int[Array, ""],
    ) -> tuple[PyTree, Ahead]:
        """Do the same for a layer in the loop, where the iterations order the loads.

        Args:
          ahead: from the layer above.
          scanned: as for `start`.
          place: in the pattern.
          first: index of the pattern's first layer.
        """
        patterns, below = divmod(place - self.horizon, self.period)
        number = jnp.maximum(first // self.period + patterns, 0)
        return ahead[0], (*ahead[1:], _load_at(scanned[below], number))

    def _load(
        self,
        scanned: tuple[PyTree, ...],
        rest: tuple[PyTree, ...],
        index: int,
        after: Array | None = None,
    ) -> PyTree:
        if index < self.num_scanned:
            number, place = divmod(index, self.period)
            number = jnp.int32(number)
            if after is not None:
                number, _ = lax.optimization_barrier((number, after))
            return _load_at(scanned[place], number)
        kept = rest[index - self.num_scanned]
        if after is not None:
            kept, _ = lax.optimization_barrier((kept, after))
        return jax.tree.map(to_device, kept)


def _load_at(stacked: PyTree, number: Int[Array, ""]) -> PyTree:
    """Copy an entry of stacks in host memory to the device."""

    def leaf(x: Array) -> Array:
        return to_device(lax.dynamic_index_in_dim(x, number, keepdims=False))

    return jax.tree.map(leaf, stacked)
