"""KV cache: one ring of keys and values per layer and slot.

Input: keys and values in the form of the attention core of training, positions
applied. Output: the attention of one new token per slot. All functions run per device
inside shard_map. A slot holds one text that is being continued.

The ring of a layer has as many entries as a query can see: its window, or the longest
text. The token at position p is in entry p mod S. At position p, entry i thus holds the
token at p - ((p - i) mod S), if that is not negative. The same rule holds for a ring as
long as the longest text, which never wraps.

Source: rolling buffer, Jiang et al. 2023 (Mistral 7B), arXiv:2310.06825, section 2.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


class Ring(NamedTuple):
    """The cache of one layer for all slots of a device."""

    k: Float[Array, "slots K S H"]
    """Keys after rotation."""
    v: Float[Array, "slots K S H"]


def ring_length(window: int | None, max_len: int) -> int:
    """Return S, the number of entries that a layer with this window needs."""
    return max_len if window is None else min(window, max_len)


def held_positions(last: Int[Array, "*slots"], length: int) -> Int[Array, "*slots S"]:
    """Return the position of the token in each entry; negative if the entry is empty.

    Args:
      last: position of the newest token.
      length: S.
    """
    entries = jnp.arange(length)
    return last[..., None] - (last[..., None] - entries) % length


def append(
    ring: Ring,
    k: Float[Array, "slots K H"],
    v: Float[Array, "slots K H"],
    positions: Int[Array, "slots"],
) -> Ring:
    """Return the ring with a new token per slot; it replaces one outside the window.

    Args:
      ring: ring with the earlier tokens.
      k: keys of the tokens at `positions`.
      v: values, as k.
      positions: positions of the tokens.
    """
    slots = jnp.arange(positions.shape[0])
    at = (slots, slice(None), positions % ring.k.shape[2])
    where = {"mode": "promise_in_bounds", "unique_indices": True}
    return Ring(ring.k.at[at].set(k, **where), ring.v.at[at].set(v, **where))


def fill(
    ring: Ring,
    k: Float[Array, "1 T K H"],
    v: Float[Array, "1 T K H"],
    *,
    length: Int[Array, ""],
    slot: Int[Array, ""],
    is_here: Bool[Array, ""],
) -> Ring:
    """Return the ring with the prompt of one slot; the slot's earlier text is lost.

    Args:
      ring: ring of all slots of the device.
      k: keys of the prompt, padded to T.
      v: values, as k.
      length: tokens of the prompt without padding.
      slot: index of the slot on this device.
      is_here: whether this device has the slot; otherwise the ring is unchanged.
    """
    held = held_positions(length - 1, ring.k.shape[2])

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        rows = new[0].at[held.clip(0)].get(mode="promise_in_bounds")
        rows = jnp.where((held >= 0)[:, None, None], rows, 0).astype(old.dtype)
        rows = jnp.moveaxis(rows, 0, 1)  # [K, S, H]
        before = lax.dynamic_index_in_dim(old, slot, 0, keepdims=False)
        rows = jnp.where(is_here, rows, before)
        return lax.dynamic_update_index_in_dim(old, rows, slot, 0)

    return Ring(put(ring.k, k), put(ring.v, v))


def attend(
    ring: Ring,
    q: Float[Array, "slots N H"],
    positions: Int[Array, "slots"],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "slots N H"]:
    """Return the attention of one query per slot to all tokens in its ring.

    Scores and softmax are float32, as in the attention of training.

    Args:
      ring: ring that includes the key and value of the query's token.
      q: queries, positions applied.
      positions: positions of the queries.
      scale: factor on the scores; None for 1 / sqrt(H).
      soft_cap: as in `kernels.attention.api.attention`.
    """
    slots, heads, width = q.shape
    kv_heads, length = ring.k.shape[1:3]
    grouped = q.reshape(slots, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum(
        "bkgh,bksh->bkgs", grouped, ring.k, preferred_element_type=jnp.float32
    )
    scores = scores * (width**-0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    is_held = held_positions(positions, length) >= 0
    scores = jnp.where(is_held[:, None, None, :], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum(
        "bkgs,bksh->bkgh",
        weights.astype(ring.v.dtype),
        ring.v,
        preferred_element_type=jnp.float32,
    )
    return out.astype(q.dtype).reshape(slots, heads, width)
