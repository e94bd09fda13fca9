"""Collectives by role, for code that runs per device inside the step's shard_map.

Layers call a collective by its role (gather the sequence, sum over the vocabulary
shards); this module maps the role to a mesh axis. Every value here is *varying* over
all mesh axes unless a function says otherwise; see `vary`. On an axis of size 1 a
collective returns its input; this is decided when the step is traced.

Sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2): outside
tensor-parallel regions, activations are split along the sequence over tp. So a
tensor-parallel region starts with an all-gather and ends with a reduce-scatter. Each is
the transpose of the other, so the backward pass has the same cost.
"""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from mjax.mesh.axes import AXES, DP, PP, TP


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Return the mesh axes over which the type of x says that x may differ."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary[X: jax.Array](x: X) -> X:
    """Cast x to varying over all mesh axes; no data moves.

    Parameters are cast before differentiation. Otherwise the transpose of each implicit
    cast would insert a reduction at every use (in every tick and layer).
    """
    missing = tuple(axis for axis in AXES if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def gather_sequence(x: Shaped[Array, "B t D"]) -> Shaped[Array, "B T D"]:
    """All-gather the sequence over tp: t = T/tp positions become all T."""
    if lax.axis_size(TP) == 1:
        return x
    return lax.all_gather(x, TP, axis=1, tiled=True)


def scatter_sequence(x: Shaped[Array, "B T D"]) -> Shaped[Array, "B t D"]:
    """Sum partial results over tp and keep this device's t = T/tp positions."""
    if lax.axis_size(TP) == 1:
        return x
    return lax.psum_scatter(x, TP, scatter_dimension=1, tiled=True)


def gather_chunks(
    x: Shaped[Array, "B t D"], num: int
) -> list[Shaped[Array, "_ B s D"]]:
    """All-gather the sequence over tp as `num` chunks, so that each can be used alone.

    A chunk is a range of shards. The first chunk is this device's own shard, which
    needs no transfer. The others hold the shards of the next devices on the axis, in
    order from this device on (*relative order*). Each owner sends its shard directly,
    so no transfer waits for another one.

    Args:
      x: this device's positions, t = T/tp.
      num: 2 to tp; 1 means one all-gather, in the order of the sequence.
    Returns:
      `num` arrays [g, B, s, D], g the number of shards: 1 in the first array, about
      (tp - 1)/(num - 1) in the others; if `num` is 1, one array [1, B, T, D].
    """
    if num == 1:
        return [gather_sequence(x)[None]]
    shards = [x] + [_send_by(x, -distance) for distance in range(1, lax.axis_size(TP))]
    ends = [0, *_chunk_ends(num), len(shards)]
    return [jnp.stack(shards[a:b]) for a, b in itertools.pairwise(ends)]


def cut_chunks(x: Shaped[Array, "n B s D"], num: int) -> list[Shaped[Array, "_ B s D"]]:
    """Split shards in relative order into chunks like those of `gather_chunks`."""
    return [x] if num == 1 else jnp.split(x, _chunk_ends(num))


def _chunk_ends(num: int) -> list[int]:
    others = lax.axis_size(TP) - 1
    return [1 + others * k // (num - 1) for k in range(num - 1)]


def scatter_chunks(
    chunks: Sequence[Shaped[Array, "_ B _ D"]],
) -> Shaped[Array, "B t D"]:
    """Sum partial results over tp and keep this device's t = T/tp positions.

    This is the transpose of `gather_chunks`. A partial sum is sent once, in the dtype
    of the chunks, and its receiver adds it in float32. A ring would round at every hop.

    Args:
      chunks: partial sums, in the order of `gather_chunks`.
    """
    if len(chunks) == 1:
        return scatter_sequence(chunks[0][0])
    shards = [shard for chunk in chunks for shard in chunk]
    total = shards[0].astype(jnp.float32)
    for distance, shard in enumerate(shards[1:], 1):
        total += _send_by(shard, distance).astype(jnp.float32)
    return total.astype(shards[0].dtype)


def _send_by(x: jax.Array, distance: int) -> jax.Array:
    """Send x to the device `distance` further on tp; return the received array."""
    size = lax.axis_size(TP)
    return lax.ppermute(x, TP, [(j, (j + distance) % size) for j in range(size)])


@jax.custom_vjp
def to_natural(x: Shaped[Array, "n B s F"]) -> Shaped[Array, "B T F"]:
    """Join n shards in relative order into a sequence; one shard is the sequence."""
    num_shards, batch, length, width = x.shape
    if num_shards > 1:
        x = _roll(x, -lax.axis_index(TP))
    return jnp.moveaxis(x, 0, 1).reshape(batch, num_shards * length, width)


def to_relative(x: Shaped[Array, "B T F"], *, whole: bool) -> Shaped[Array, "n B s F"]:
    """Split a sequence into shards in relative order, n = tp; if `whole`, n = 1."""
    return _to_relative(1 if whole else lax.axis_size(TP), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _to_relative(num_shards: int, x: jax.Array) -> jax.Array:
    batch, _, width = x.shape
    x = jnp.moveaxis(x.reshape(batch, num_shards, -1, width), 1, 0)
    return _roll(x, lax.axis_index(TP)) if num_shards > 1 else x


def _roll(x: jax.Array, distance: jax.Array) -> jax.Array:
    """Return x[(k + distance) mod n] for each k."""
    order = (jnp.arange(x.shape[0]) + distance) % x.shape[0]
    return x.at[order].get(mode="promise_in_bounds", unique_indices=True)


# Each is the transpose of the other; jax would transpose indexing to a scatter.
to_natural.defvjp(
    lambda x: (to_natural(x), x.shape[0]), lambda num, g: (_to_relative(num, g),)
)
_to_relative.defvjp(
    lambda num, x: (_to_relative(num, x), None), lambda num, _, g: (to_natural(g),)
)


def max_over_sequence(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """Return the maximum over the parts of the sequence; not differentiable."""
    return x if lax.axis_size(TP) == 1 else lax.pmax(x, TP)


def sequence_offset(local_len: int) -> Shaped[Array, ""]:
    """Return the global position of the first entry of this device's sequence part."""
    return lax.axis_index(TP) * local_len


def sum_over_vocab(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """Sum over the vocabulary shards; if tp > 1, the result is invariant over tp."""
    return x if lax.axis_size(TP) == 1 else lax.psum(x, TP)


def max_over_vocab(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """Return the maximum over the vocabulary shards; not differentiable."""
    return x if lax.axis_size(TP) == 1 else lax.pmax(x, TP)


def vocab_offset(local_vocab: int) -> Shaped[Array, ""]:
    """Return the id of the first token in this device's vocabulary shard."""
    return lax.axis_index(TP) * local_vocab


def local_size(size: int) -> int:
    """Return the size on this device of a dim that tp splits, given its global size."""
    return size // lax.axis_size(TP)


def num_local_kv_heads(num_kv_heads: int) -> int:
    """Return this device's number of key/value heads: K/tp, at least one."""
    return max(num_kv_heads // lax.axis_size(TP), 1)


def local_kv_heads(
    w: Shaped[Array, "*lead K H"], num_kv_heads: int
) -> Shaped[Array, "*lead k H"]:
    """Return the key/value heads that this device's query heads use.

    If tp divides K, the parameter is already split and is returned unchanged. If
    K < tp, every device holds all K heads and selects one. Devices that share a head
    each get a partial gradient; the sum over tp (see `mesh.zero`) adds them.

    Args:
      w: a parameter whose dim before the last is the key/value heads.
      num_kv_heads: K, the total number of key/value heads.
    """
    tp = lax.axis_size(TP)
    if num_kv_heads >= tp:
        return w
    head = lax.axis_index(TP) * num_kv_heads // tp
    return lax.dynamic_slice_in_dim(w, head, 1, axis=w.ndim - 2)


def batch_offset(local_rows: int) -> Shaped[Array, ""]:
    """Return the index in the global batch of this device's first sequence."""
    return lax.axis_index(DP) * local_rows


def sum_over_mesh(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """Sum x over all axes over which it varies; the result is equal on all devices."""
    axes = tuple(axis for axis in AXES if axis in varying_axes(x))
    return lax.psum(x, axes) if axes else x


def sum_over_stages(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Return on all stages the value that one stage holds; x is zero on the others."""
    return lax.psum(x, PP)


def stage_index() -> Int[Array, ""]:
    """Return the pipeline stage of this device."""
    return lax.axis_index(PP)


def send_to_next_stage(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """Send x to the next stage (the last to the first); return the received array."""
    return _send_around(x, 1)


def send_to_previous_stage(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """Send x to the stage before (the first to the last); return the received array."""
    return _send_around(x, -1)


def _send_around(x: jax.Array, step: int) -> jax.Array:
    # All stages always send: idle ones send data that nobody reads.
    num_stages = lax.axis_size(PP)
    if num_stages == 1:
        return x
    ring = [(stage, (stage + step) % num_stages) for stage in range(num_stages)]
    return lax.ppermute(x, PP, ring)


def gather_vocab(x: Shaped[Array, "*dims v"]) -> Shaped[Array, "*dims V"]:
    """All-gather the last dim, the vocabulary, over tp."""
    if lax.axis_size(TP) == 1:
        return x
    return lax.all_gather(x, TP, axis=x.ndim - 1, tiled=True)


def settle[Tree](tree: Tree, *, over_dp: bool = True) -> Tree:
    """Remove from the types of arrays the mesh axes over which they are equal.

    The values are equal over tp and pp, and also over dp if `over_dp`, but their types
    vary over these axes. Use this for small arrays: it computes a maximum over the
    axes.
    """
    axes = (PP, TP, *(DP if over_dp else ()))
    return jax.tree.map(lambda x: lax.pmax(x, axes), tree)
