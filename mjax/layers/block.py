"""Transformer blocks: parallel (PaLM, GPT-J, MegaScale) and serial.

The residual stream is split along the sequence over tp ([B, t, D], t = T/tp) in both.
A parallel block enters and leaves its tensor-parallel region once, a serial block
twice: half the traffic for the same work.
"""

import abc
from typing import Any, NamedTuple

from flax import nnx
from jaxtyping import Array, Float, Int

from mjax.layers import rope
from mjax.layers.adapters import column_parallel, row_parallel
from mjax.layers.attention import Attention, CachedCore
from mjax.layers.config import AdapterConfig, BlockConfig, LayerKind
from mjax.layers.dropout import DropoutKey, dropout
from mjax.layers.mlp import Mlp
from mjax.layers.norm import Norm
from mjax.mesh import collectives


class Context(NamedTuple):
    """What every layer of one forward pass shares, over the whole sequence."""

    cos_sin: rope.Angles
    """Rotary angles of each position."""
    segments: Int[Array, "B T"] | None
    """Document of each position; None is one document a row."""
    cached: CachedCore | None = None
    """In place of the attention core, in generation; None is training."""
    windowed_cos_sin: rope.Angles | None = None
    """Angles in layers with a window; None is those of the others."""

    def angles(self, kind: LayerKind) -> rope.Angles | None:
        """Return the angles of a kind of layer; None leaves positions out."""
        if not kind.rotate:
            return None
        other = self.windowed_cos_sin
        return self.cos_sin if other is None or kind.window is None else other


class Block(nnx.Module):
    """What both blocks share: their parts."""

    def __init__(
        self,
        config: BlockConfig,
        *,
        rngs: nnx.Rngs,
        tp_chunks: int = 1,
        adapters: AdapterConfig | None = None,
    ):
        """Create attention and feed-forward layer.

        Args:
          config: sizes and options.
          rngs: streams to draw parameters from.
          tp_chunks: chunks in which the sequence crosses tp, each behind the product
            of another one; 1 is all at once.
          adapters: low-rank adapters of its weights; None is none.
        """
        self.dropout = config.dropout
        self.tp_chunks = tp_chunks
        self.attention = Attention(
            config.attention,
            std=config.std,
            out_std=config.out_std,
            rngs=rngs,
            adapters=adapters,
        )
        self.mlp = Mlp(
            config.attention.d_model,
            config.d_ff,
            activation=config.activation,
            use_bias=config.mlp_bias,
            std=config.std,
            out_std=config.out_std,
            rngs=rngs,
            adapters=adapters,
        )

    def __call__(
        self,
        x: Float[Array, "B t D"],
        kind: LayerKind,
        context: Context,
        key: DropoutKey | None,
    ) -> Float[Array, "B t D"]:
        """Apply the block to this device's part of the residual stream."""
        return self.apply(x, kind, context, key)[0]

    @abc.abstractmethod
    def apply(
        self,
        x: Float[Array, "B t D"],
        kind: LayerKind,
        context: Context,
        key: DropoutKey | None,
    ) -> tuple[Float[Array, "B t D"], Any]:
        """Apply the block; return also what `context.cached` keeps, else None."""

    def _mix(
        self,
        q: Float[Array, "n B s NH"],
        k: Float[Array, "n B s KH"],
        v: Float[Array, "n B s KH"],
        kind: LayerKind,
        context: Context,
    ) -> tuple[Float[Array, "n B s NH"], Any]:
        """Attend over the whole sequence; shards in, shards out."""
        mixed, kept = self.attention.mix(
            *map(collectives.to_natural, (q, k, v)),
            window=kind.window,
            cos_sin=context.angles(kind),
            segments=context.segments,
            cached=context.cached,
        )
        return collectives.to_relative(mixed, whole=self.tp_chunks == 1), kept


def _norm(config: BlockConfig) -> Norm:
    return Norm(config.attention.d_model, config.norm)


def _add_biases(
    y: Float[Array, "B t D"], *biases: Float[Array, " D"] | None
) -> Float[Array, "B t D"]:
    for bias in biases:
        y = y if bias is None else y + bias
    return y


class ParallelBlock(Block):
    """z = x + Attn(LN(x)) + MLP(LN(x)), one norm for both branches.

    One fused projection in (q | k | v | ffn-in), one out (attn-out | ffn-out).

    Source: Wang and Komatsuzaki 2021 (GPT-J); Chowdhery et al. 2022, arXiv:2204.02311,
    section 2; Jiang et al. 2024 (MegaScale), arXiv:2402.15627, section 3.1.
    """

    def __init__(
        self,
        config: BlockConfig,
        *,
        rngs: nnx.Rngs,
        tp_chunks: int = 1,
        adapters: AdapterConfig | None = None,
    ):
        """Create the shared norm and the two branches; arguments as in `Block`."""
        super().__init__(config, rngs=rngs, tp_chunks=tp_chunks, adapters=adapters)
        self.norm = _norm(config)

    def apply(
        self,
        x: Float[Array, "B t D"],
        kind: LayerKind,
        context: Context,
        key: DropoutKey | None,
    ) -> tuple[Float[Array, "B t D"], Any]:
        """Apply the block to this device's part of the residual stream."""
        weights = self.attention.in_weights() + self.mlp.in_weights()
        x, normed = self.norm.branch(x)
        joined = context.cached is None
        q, k, v, *up = column_parallel(normed, weights, self.tp_chunks, joined=joined)
        mixed, kept = self._mix(q, k, v, kind, context)
        y = row_parallel(
            [mixed, self.mlp.activate(up)],
            [self.attention.out_weight(), self.mlp.out_weight()],
            self.tp_chunks,
            joined=joined,
        )
        y = _add_biases(y, self.attention.out_bias(), self.mlp.out_bias())
        return x + dropout(y, self.dropout, None if key is None else key.at(0)), kept


class SerialBlock(Block):
    """y = x + Attn(LN1(x)); z = y + MLP(LN2(y)); each branch may end with a norm.

    Source: pre-norm transformer, Xiong et al. 2020, arXiv:2002.04745, figure 1b; norms
    on both sides of a branch, Gemma 2, arXiv:2408.00118, section 2.
    """

    def __init__(
        self,
        config: BlockConfig,
        *,
        rngs: nnx.Rngs,
        tp_chunks: int = 1,
        adapters: AdapterConfig | None = None,
    ):
        """Create the norms and the two branches; arguments as in `Block`."""
        super().__init__(config, rngs=rngs, tp_chunks=tp_chunks, adapters=adapters)
        self.norm_attention = _norm(config)
        self.norm_mlp = _norm(config)
        post = config.post_norms
        self.post_norm_attention = _norm(config) if post else None
        self.post_norm_mlp = _norm(config) if post else None

    def apply(
        self,
        x: Float[Array, "B t D"],
        kind: LayerKind,
        context: Context,
        key: DropoutKey | None,
    ) -> tuple[Float[Array, "B t D"], Any]:
        """Apply the block to this device's part of the residual stream."""
        x, normed = self.norm_attention.branch(x)
        joined = context.cached is None
        q, k, v = column_parallel(
            normed, self.attention.in_weights(), self.tp_chunks, joined=joined
        )
        mixed, kept = self._mix(q, k, v, kind, context)
        y = row_parallel([mixed], [self.attention.out_weight()], self.tp_chunks)
        y = _add_biases(y, self.attention.out_bias())
        y = y if self.post_norm_attention is None else self.post_norm_attention(y)
        x = x + dropout(y, self.dropout, None if key is None else key.at(0))
        x, normed = self.norm_mlp.branch(x)
        up = column_parallel(
            normed, self.mlp.in_weights(), self.tp_chunks, joined=joined
        )
        y = row_parallel(
            [self.mlp.activate(up)], [self.mlp.out_weight()], self.tp_chunks
        )
        y = _add_biases(y, self.mlp.out_bias())
        y = y if self.post_norm_mlp is None else self.post_norm_mlp(y)
        return x + dropout(y, self.dropout, None if key is None else key.at(1)), kept
