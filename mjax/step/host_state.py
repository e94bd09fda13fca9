"""Update parameters whose moments are in host memory, piece by piece.

Input: gradients, parameters, and an optimizer state whose moments are in pinned host
memory. Output: the updated parameters and state, each in its original memory.

A piece is one layer of every stage, or one leaf outside the blocks. LAMB and AdamW
treat each layer independently once the global norm is known, so `step.optim` updates a
piece like a smaller tree. The moments of a layer are copied to the device while the
previous layer is updated. Each leaf is copied back as soon as the same leaf of the next
layer has arrived. The device holds the moments of at most three layers: the current
one, the next one, and the one being copied back.

Rejected: one `device_put` of the whole state around the update (MaxText,
`optimizer_memory_host_offload`), because nothing bounds the moments on the device; and
the update on the host (`compute_on`), whose memory is slower than the link.

Everything runs under jit, outside shard_map, on global arrays.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from mjax.config.optim import OptimConfig
from mjax.mesh.host_memory import to_device, to_host
from mjax.step import optim

Leaves = list[Array]


class Moments(NamedTuple):
    """Moments of some leaves, named as in Optax."""

    mu: Leaves
    """Running means of the gradients."""
    nu: Leaves
    """Running means of the squared gradients."""


Update = Callable[[Leaves, Leaves, Moments], tuple[Leaves, Moments]]
"""(gradients, parameters, moments) of a piece -> new parameters and moments, on the
device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostUpdate:
    """The update of an optimizer whose moments are in host memory."""

    config: OptimConfig
    num_steps: int
    """Optimizer steps of the whole run."""
    stacked: PyTree[bool]
    """Booleans in the tree of the trained parameters: True for leaves [slots, ...]. A
    slot is a place for one layer; some slots are empty if stages differ in size."""
    decayed: PyTree[bool]
    """Booleans in the same tree: True for leaves with weight decay."""
    num_stages: int
    """P. Each stage holds slots / P consecutive slots."""

    def __call__(
        self,
        accept: Bool[Array, ""],
        norm: Float[Array, ""],
        grads: PyTree,
        opt_state: Any,
        params: PyTree,
    ) -> tuple[PyTree, Any]:
        """Return updated parameters and state, or the old ones if not accepted.

        Args:
          accept: [], whether to keep the update.
          norm: [], result of `optim.norm_to_clip`.
          grads: gradients, like `params`.
          opt_state: state of `optim.build_optimizer`, with its moments in host memory.
          params: the trained parameters, in device memory.
        """
        adam = opt_state["adam"]
        leaves, structure = jax.tree.flatten(params)
        of_grads, mu, nu = map(jax.tree.leaves, (grads, adam.mu, adam.nu))
        is_stacked = jax.tree.leaves(self.stacked)
        layers = [n for n, stacked in enumerate(is_stacked) if stacked]
        others = [[n] for n, stacked in enumerate(is_stacked) if not stacked]
        done: list[Array] = [norm, norm]  # norm is ready after all gradients
        for places in [layers] * bool(layers) + others:
            gradients, values = ([x[n] for n in places] for x in (of_grads, leaves))
            waiting = Moments([mu[n] for n in places], [nu[n] for n in places])
            # The copy starts when the piece before the previous one is done.
            waiting, _ = lax.optimization_barrier((waiting, done[-2]))
            update = self._update(accept, norm, opt_state, places)
            run = self._layer_by_layer if places is layers else self._at_once
            new, moments = run(update, gradients, values, waiting)
            done.append(new[0])
            for n, *found in zip(places, new, *moments, strict=True):
                leaves[n], mu[n], nu[n] = found
        moments = Moments(*map(structure.unflatten, (mu, nu)))
        counted = self._counted(accept, norm, opt_state)
        return structure.unflatten(leaves), _with_moments(counted, moments)

    def bytes_on_device(self, moments: PyTree) -> int:
        """Return the maximum bytes of moments that a device holds at once.

        These are the moments of the current piece, the next piece, and the piece being
        copied back.

        Args:
          moments: shapes, dtypes and shardings of mu, or of nu.
        """
        layer, *others = 0, 0
        for leaf, is_stacked in zip(
            *map(jax.tree.leaves, (moments, self.stacked)), strict=True
        ):
            shape = leaf.sharding.shard_shape(leaf.shape)
            if is_stacked:
                layer += math.prod(shape[1:]) * leaf.dtype.itemsize
            else:
                others.append(math.prod(shape) * leaf.dtype.itemsize)
        return 2 * 3 * max(layer, *others)

    def _update(
        self,
        accept: Bool[Array, ""],
        norm: Float[Array, ""],
        opt_state: Any,
        places: Sequence[int],
    ) -> Update:
        """Update the leaves with these indices in the flat tree of parameters."""
        stacked, decayed = map(jax.tree.leaves, (self.stacked, self.decayed))
        tx = optim.build_optimizer(
            self.config,
            num_steps=self.num_steps,
            stacked=[stacked[n] for n in places],
            decayed=[decayed[n] for n in places],
        )

        def update(
            grads: Leaves, params: Leaves, moments: Moments
        ) -> tuple[Leaves, Moments]:
            state = _with_moments(opt_state, moments)
            updates, after = tx.update(grads, state, params, norm=norm)
            new = optax.apply_updates(params, updates), _moments_of(after)
            return optim.select(accept, new, (params, moments))

        return update

    def _counted(
        self, accept: Bool[Array, ""], norm: Float[Array, ""], opt_state: Any
    ) -> Any:
        """Return the state with its step counts advanced by one, if accepted.

        The updates of pieces return only moments. The moments of this result are empty.
        """
        tx = optim.build_optimizer(
            self.config, num_steps=self.num_steps, stacked=[], decayed=[]
        )
        state = _with_moments(opt_state, Moments([], []))
        return optim.select(accept, tx.update([], state, [], norm=norm)[1], state)

    def _layer_by_layer(
        self, update: Update, grads: Leaves, params: Leaves, moments: Moments
    ) -> tuple[Leaves, Moments]:
        """Return updated leaves [slots, ...]: one slot of every stage at a time."""
        stages = self.num_stages
        num = params[0].shape[0] // stages
        fold = _on_leaves(lambda x: x.reshape(stages, num, *x.shape[1:]))
        grads, params, moments = map(fold, (grads, params, moments))

        def one(carry: Any, index: Int[Array, ""]) -> tuple[Any, None]:
            params, moments, here = carry
            following = _load(moments, jnp.minimum(index + 1, num - 1))
            at = _on_leaves(lambda x: _at(x, index))
            new, back = update(at(grads), at(params), here)
            following, back = _read_before_written(following, back)
            put = functools.partial(_put, index=index)
            params = jax.tree.map(put, params, new)
            moments = jax.tree.map(put, moments, _on_leaves(to_host)(back))
            return (params, moments, following), None

        carry = params, moments, _load(moments, 0)
        (params, moments, _), _ = lax.scan(one, carry, jnp.arange(num))
        unfold = _on_leaves(lambda x: x.reshape(stages * num, *x.shape[2:]))
        return unfold(params), unfold(moments)

    def _at_once(
        self, update: Update, grads: Leaves, params: Leaves, moments: Moments
    ) -> tuple[Leaves, Moments]:
        """Return updated leaves, updated in one piece."""
        new, back = update(grads, params, _on_leaves(to_device)(moments))
        return new, _on_leaves(to_host)(back)


def _moments_of(opt_state: Any) -> Moments:
    return Moments(opt_state["adam"].mu, opt_state["adam"].nu)


def _with_moments(opt_state: Any, moments: Moments) -> Any:
    """Return the state with other moments; their trees may differ from the old ones."""
    adam = opt_state["adam"]._replace(mu=moments.mu, nu=moments.nu)
    return type(opt_state)(opt_state | {"adam": adam})


def _read_before_written(following: Moments, back: Moments) -> tuple[Moments, Moments]:
    """Return both trees; leaves of `back` wait for the same leaves of `following`.

    The copy of `following` reads an array in host memory; the copy of `back` writes
    it. Without this order XLA would keep a second copy of that array on the host.
    """
    ahead, structure = jax.tree.flatten(following)
    pairs = zip(ahead, jax.tree.leaves(back), strict=True)
    ordered = zip(*map(lax.optimization_barrier, pairs), strict=True)
    following, back = map(structure.unflatten, ordered)
    return following, back


def _on_leaves(f: Callable[[Array], Array]) -> Callable[[Any], Any]:
    return lambda tree: jax.tree.map(f, tree)


def _at(x: Shaped[Array, "P n ..."], index: Int[Array, ""] | int) -> Array:
    return lax.dynamic_index_in_dim(x, index, 1, keepdims=False)


def _put(x: Array, y: Array, *, index: Int[Array, ""]) -> Array:
    return lax.dynamic_update_index_in_dim(x, y, index, 1)


def _load(moments: Moments, index: Int[Array, ""] | int) -> Moments:
    """Copy the moments of a layer to the device."""
    return jax.tree.map(lambda x: to_device(_at(x, index)), moments)
