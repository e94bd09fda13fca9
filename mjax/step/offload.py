"""Keep what layers keep for the backward pass in host memory, and load it ahead.

Enters: what each layer keeps in the forward pass, its input. Leaves: the same, in
pinned host memory; in the backward pass, on the device again. While the backward pass
of layer l runs, the input of layer l - K is copied to the device: K is the loading
horizon. So a copy has K layers of time, and the device holds K inputs beside the one
in use and the one that arrives. The last K layers of a model keep theirs on the device
if they are outside the loop over layers, since their backward pass comes first.

Rejected: the offload policy of `jax.checkpoint`, which loads an input in the turn of
the loop that reads it, so that nothing runs meanwhile.

All of it runs per device inside shard_map.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from mjax.mesh.host_memory import to_device, to_host

Ahead = tuple[PyTree, ...]
"""What the next K layers of the backward pass kept, on the device, the next first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offload:
    """Layers whose inputs are in host memory between forward and backward pass."""

    num_layers: int
    """L."""
    num_scanned: int
    """Layers in the loop, the first ones: whole patterns."""
    period: int
    """Layers of a pattern."""
    horizon: int
    """K, from 1 to L - 1."""

    def store(self, kept: PyTree, index: Int[Array, ""] | int) -> PyTree:
        """Copy what a layer keeps to the host.

        Args:
          kept: arrays on the device.
          index: of the layer; a plain number after the loop.
        Returns:
          the same in host memory; unchanged for the last K layers after the loop.
        """
        if isinstance(index, int) and index >= self.num_layers - self.horizon:
            return kept
        return jax.tree.map(to_host, kept)

    def start(self, scanned: tuple[PyTree, ...], rest: tuple[PyTree, ...]) -> Ahead:
        """Load what the last K layers kept, those after the loop excepted.

        Args:
          scanned: over the pattern, as a loop stacks what `store` returns.
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
        """Return what a layer after the loop kept, and load that of K layers below.

        Args:
          ahead: from the layer above.
          scanned: as for `start`.
          rest: likewise.
          index: of the layer.
          dy: gradient of its output, before which the load does not start.
        """
        # Below the first layer there is none: its input is loaded to no end.
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
        """Do the same for a layer in the loop, whose turns keep the loads in order.

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
