"""The repeating pattern of layers, with remat, applied by a scan or one by one.

Evaluation uses the scan. In training, pipeline stages apply their layers one by one,
and `mjax.step.prefetch` has its own scan, which gathers weights one layer ahead.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from mjax.kernels.attention.api import keep_core
from mjax.layers.block import JoinedParams
from mjax.layers.config import LayerKind, Remat
from mjax.layers.linear import PROJECTION, keep_totals

Layer = Callable[[jax.Array], jax.Array]
Guard = Callable[[jax.Array, Layer, Layer, jax.Array], jax.Array]
"""Function that applies or skips a layer: (index, layer, function to call instead of a
skipped layer, input) -> output."""


BLOCK_INPUT = "block_input"
"""Name, in remat policies, of the residual stream before a block."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPattern:
    """A repeating pattern of layer kinds, applied one by one or by a scan.

    The kinds are static, so windows are constants of the kernels. In a scan, compile
    time grows with the length of the pattern, not with the number of layers.
    """

    layer: Callable[..., jax.Array]
    """(kind, input, parameters, index in the model, context) -> output."""
    kinds: Sequence[LayerKind]
    """One period of the pattern; the first layer has the first kind."""
    remat: Remat
    context: PyTree
    """Arrays that all layers read besides their input."""
    first_layer: Int[Array, ""] | int
    guard: Guard | None

    def run(self, x: jax.Array, stacked: PyTree) -> jax.Array:
        """Apply stacked layers [n, ...]: whole patterns in a scan, then the rest."""
        period = len(self.kinds)
        num_layers = jax.tree.leaves(stacked)[0].shape[0]
        num_patterns = num_layers // period if num_layers > period else 0
        num_scanned = num_patterns * period
        if num_patterns:
            x = self.scan(x, jax.tree.map(lambda a: a[:num_scanned], stacked))
        rest = jax.tree.map(lambda a: a[num_scanned:], stacked)
        for place in range(num_layers - num_scanned):
            x = self.apply(place, x, rest, num_scanned)
        return x

    def scan(self, x: jax.Array, stacked: PyTree) -> jax.Array:
        """Apply layers in a scan; their number is a multiple of the pattern length."""
        period = len(self.kinds)
        folded = jax.tree.map(lambda a: a.reshape(-1, period, *a.shape[1:]), stacked)

        def pattern(
            x: jax.Array, xs: tuple[PyTree, jax.Array]
        ) -> tuple[jax.Array, None]:
            params, first = xs
            for place in range(period):
                x = self.apply(place, x, params, first)
            return x, None

        num_patterns = jax.tree.leaves(folded)[0].shape[0]
        firsts = period * jnp.arange(num_patterns)
        return jax.lax.scan(pattern, x, (folded, firsts))[0]

    def apply(
        self, place: int, x: jax.Array, pattern: PyTree, first: jax.Array | int
    ) -> jax.Array:
        """Apply one layer of a pattern whose parameters are [period, ...].

        Parameters are selected inside the rematerialised function. If they were
        selected outside, they would be residuals: a copy of all weights.
        """
        local = first + place

        def layer(x: jax.Array, pattern: PyTree) -> jax.Array:
            params = jax.tree.map(lambda a: a[place], pattern)
            index = self.first_layer + local
            return self.layer(self.kinds[place], x, params, index, self.context)

        layer = checkpointed(layer, self.remat)
        if self.guard is None:
            return layer(x, pattern)
        return self.guard(
            jnp.asarray(local), lambda x: layer(x, pattern), lambda x: x, x
        )

    def unrolled(self, x: jax.Array, layers: Sequence[JoinedParams]) -> jax.Array:
        """Apply layers one by one; the first has the first kind of the pattern.

        Each matmul adds the gradient of its weight in place to the sum over
        microbatches. A scan over the layers would keep these sums in stacked arrays,
        and copy the sum of each layer out of one stack and into another.
        """

        def apply(x: jax.Array, local: int, params: JoinedParams) -> jax.Array:
            one = self.one(local % len(self.kinds), in_loop=False)
            return one(x, params, self.first_layer + local, self.context)

        for local, params in enumerate(layers):
            layer = functools.partial(apply, local=local, params=params)
            if self.guard is None:
                x = layer(x)
            else:
                leave_out = functools.partial(keep_totals, joined=params.projections)
                x = self.guard(jnp.asarray(local), layer, leave_out, x)
        return x

    def one(self, place: int, *, in_loop: bool) -> Callable[..., jax.Array]:
        """Return (input, parameters, index, context) -> output of one kind of layer.

        Args:
          place: index in the pattern.
          in_loop: whether the forward and the backward pass are in separate loops, so
            that XLA cannot merge a recomputed operation with the original.
        """

        def layer(x: jax.Array, *args: PyTree) -> jax.Array:
            return self.layer(self.kinds[place], x, *args)

        return checkpointed(layer, self.remat, prevent_cse=not in_loop)


def checkpointed(
    layer: Callable[..., Any], policy: Remat, *, prevent_cse: bool = True
) -> Callable[..., Any]:
    """Wrap a layer so that the backward pass recomputes it as the policy says.

    By policy, the backward pass recomputes:

    - "none": nothing;
    - "attention": only the attention core (in `layers.attention`);
    - "core": all but the outputs of projections and of the attention core;
    - "dots": all but the outputs of projections;
    - "full": the whole layer;
    - "offload": the whole layer, whose input is kept in host memory.

    With "core", the backward pass recomputes neither the attention core nor a matmul
    with a weight. It recomputes only the operations between them (norms, rotation,
    activation, dropout, sums) and the low-rank matmuls of adapters. The output of a
    projection into the residual stream is kept only if the backward pass reads it. In
    the parallel block the backward pass reads no such output. In the serial block it
    reads the output of attention, because the second norm reads the sum of that output
    and the residual stream. With norms after the branches, the backward pass reads the
    outputs of both branches.
    """
    policies = jax.checkpoint_policies
    if policy in ("none", "attention"):
        return layer
    if policy == "full":
        chosen = policies.nothing_saveable
    elif policy == "dots":
        chosen = policies.save_only_these_names(PROJECTION)
    elif policy == "core":
        chosen = policies.save_from_both_policies(
            policies.save_only_these_names(PROJECTION), keep_core
        )
    else:
        chosen = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[BLOCK_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        )
    return jax.checkpoint(layer, policy=chosen, prevent_cse=prevent_cse)
