"""Embedding of tokens and positions; output projection, split over the vocabulary."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mjax.layers.initialise import normal, zeros
from mjax.layers.loss import summed_nll
from mjax.mesh import collectives


class Embedding(nnx.Module):
    """A table of token vectors, split over tp by token, and a table of positions.

    A device looks up the tokens that it owns and uses zeros for the rest. The sum over
    tp is a reduce-scatter, which also splits the sequence. Every device holds all
    position vectors and adds the vectors of its own part of the sequence.

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (vocabulary-parallel).
    """

    def __init__(
        self,
        vocab: int,
        d_model: int,
        *,
        std: float,
        rngs: nnx.Rngs,
        scale: float = 1.0,
        num_positions: int | None = None,
    ):
        """Create the token table [V, D], and a position table if positions are learned.

        Args:
          vocab: V, padded.
          d_model: D.
          std: standard deviation of both tables.
          rngs: streams to draw from.
          scale: factor on the token vectors.
          num_positions: number of position vectors; None creates no position table.
        """
        self.scale = scale
        self.table = normal((vocab, d_model), ("vocab", "embed"), std, rngs)
        table = None
        if num_positions is not None:
            shape = (num_positions, d_model)
            table = normal(shape, ("positions", "embed"), std, rngs)
        self.positions = table

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B t D"]:
        """Embed this device's t = T/tp positions of tokens [B, T].

        Args:
          tokens: tokens of the whole sequence.
          positions: position of each token in its document; used for learned positions.
        """
        table = self.table[...]
        local = tokens - collectives.vocab_offset(table.shape[0])
        mine = (local >= 0) & (local < table.shape[0])
        x = table[jnp.where(mine, local, 0)]
        x = jnp.where(mine[..., None], x, jnp.zeros_like(x))
        x = collectives.scatter_sequence(x)
        if self.scale != 1.0:
            x = x * jnp.asarray(self.scale, x.dtype)
        if self.positions is None:
            return x
        if positions is None:
            raise ValueError("learned positions need the position of each token")
        first, local_len = collectives.sequence_offset(x.shape[1]), x.shape[1]
        own = jax.lax.dynamic_slice_in_dim(positions, first, local_len, axis=1)
        return x + self.positions[...][own]


class Head(nnx.Module):
    """Output projection to the vocabulary; the table may be the embedding's."""

    def __init__(
        self,
        vocab: int,
        d_model: int,
        *,
        tied: bool,
        use_bias: bool,
        scale: float,
        std: float,
        rngs: nnx.Rngs,
        soft_cap: float | None = None,
    ):
        """Create the table [V, D] unless tied, and an optional bias [V]."""
        self.scale = scale
        self.soft_cap = soft_cap
        dims = ("vocab", "embed")
        self.table = None if tied else normal((vocab, d_model), dims, std, rngs)
        self.bias = zeros((vocab,), ("vocab",)) if use_bias else None

    def __call__(
        self, x: Float[Array, "B t D"], embedding: Embedding
    ) -> Float[Array, "B T v"]:
        """Return float32 logits of the whole sequence for this device's tokens."""
        x = collectives.gather_sequence(x)
        logits = jnp.einsum(
            "btd,vd->btv", x, self._table(embedding), preferred_element_type=jnp.float32
        )
        if self.bias is not None:
            logits = logits + self.bias[...].astype(jnp.float32)
        logits = logits * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        return logits

    def nll(
        self,
        x: Float[Array, "B t D"],
        embedding: Embedding,
        targets: Int[Array, "B T"],
        vocab_size: int,
    ) -> Float[Array, ""]:
        """Return the targets' summed negative log-likelihood, chunk by chunk.

        Args:
          x: this device's t = T/tp positions.
          embedding: the embedding whose table is used if tied.
          targets: targets of the whole sequence; `loss.NO_TARGET` adds 0.
          vocab_size: size of the vocabulary without padding.
        """
        return summed_nll(
            collectives.gather_sequence(x),
            self._table(embedding),
            None if self.bias is None else self.bias[...],
            targets,
            scale=self.scale,
            vocab_size=vocab_size,
            soft_cap=self.soft_cap,
        )

    def _table(self, embedding: Embedding) -> Float[Array, "v D"]:
        table = embedding.table if self.table is None else self.table
        return table[...]
