"""Offload the residuals of layers to host memory, and load them ahead of their use.

Input: the residual of each layer, which is its input. Output: the same array in pinned
host memory, and on the device again in the backward pass. While the backward pass of
layer l runs, the input of layer l - h is copied to the device; h is the loading
horizon. So each copy can take as long as h layers. The device holds h inputs, plus the
one in use and the one that is arriving. Layers outside the loop over layers keep their
inputs on the device if they are among the last h, whose backward pass runs first.

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
"""Residuals of the next h layers of the backward pass, on the device, in the order in
which it uses them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload:
    """Offload the inputs of layers to host memory until their backward pass."""

    num_layers: int
    """L."""
    num_scanned: int
    """Number of leading layers that run in the loop, a multiple of `period`."""
    period: int
    """Number of layers in a pattern."""
    horizon: int
    """h, from 1 to L - 1."""

    def store(self, kept: PyTree, index: Int[Array, ""] | int) -> PyTree:
        """Copy the residuals of a layer to the host.

        Args:
          kept: residuals of the layer, on the device.
          index: index of the layer; a Python int for a layer after the loop.
        Returns:
          the residuals in host memory; unchanged if the layer is after the loop and one
          of the last h.
        """
        if isinstance(index, int) and index >= self.num_layers - self.horizon:
            return kept
        return jax.tree.map(to_host, kept)

    def start(self, scanned: tuple[PyTree, ...], rest: tuple[PyTree, ...]) -> Ahead:
        """Return the residuals of the last h layers on the device.

        Residuals of layers after the loop are there already; the rest are copied.

        Args:
          scanned: for each layer of the pattern, the results of `store`, stacked by the
            loop.
          rest: the results of `store` for each layer after the loop.
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
        """Load the residuals of layer index - h, for a layer after the loop.

        Args:
          ahead: residuals loaded so far, from `start` or the layer above.
          scanned: as for `start`.
          rest: as for `start`.
          index: index of the layer.
          dy: gradient of the output of the layer; the load starts when this is ready.
        Returns:
          the residuals of layer `index`, and `ahead` for the layer below.
        """
        # If there is no layer index - h, layer 0 is loaded again and not used.
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
        """Load like `advance`, but for a layer in the loop.

        The iterations of the loop put the loads in order.

        Args:
          ahead: residuals loaded so far, from the layer above.
          scanned: as for `start`.
          place: index of the layer in the pattern.
          first: index of the first layer of this iteration's pattern.
        Returns:
          as `advance`.
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
