"""Transformer blocks: parallel (PaLM, GPT-J, MegaScale) and serial.

In both, the residual stream is split along the sequence over tp ([B, t, D], t = T/tp).
A parallel block enters and leaves its tensor-parallel region once, a serial block
twice. So the parallel block needs half the communication.
"""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mjax.layers import linear, rope
from mjax.layers.adapters import column_parallel, row_parallel
from mjax.layers.attention import Attention, CachedCore
from mjax.layers.config import AdapterConfig, BlockConfig, LayerKind
from mjax.layers.dropout import DropoutKey, dropout
from mjax.layers.fp8 import QuantisedWeight, quantise_weight
from mjax.layers.linear import Joined
from mjax.layers.mlp import Mlp
from mjax.layers.norm import Norm
from mjax.mesh import collectives


class Context(NamedTuple):
    """Arrays that all layers of a forward pass share, over the whole sequence."""

    cos_sin: rope.Angles
    """Rotary angles of each position."""
    segments: Int[Array, "B T"] | None
    """Document of each position; None: one document per sequence."""
    cached: CachedCore | None = None
    """Function that replaces the attention core in generation; None in training."""
    windowed_cos_sin: rope.Angles | None = None
    """Rotary angles in layers with a window; None: the same as in other layers."""

    def angles(self, kind: LayerKind) -> rope.Angles | None:
        """Return the angles for a kind of layer; None if the kind has no rotation."""
        if not kind.rotate:
            return None
        other = self.windowed_cos_sin
        return self.cos_sin if other is None or kind.window is None else other


Params = dict[str, Any]
"""Nested dict of arrays: the parameters of a block."""

Group = tuple[str, tuple[str, ...]]
"""Name of a projection, and the parts of the block whose weights it joins."""


class JoinedParams(NamedTuple):
    """The parameters of a block whose weights are joined."""

    projections: Mapping[str, Joined]
    """Joined weights; keys are the projection names in `INPUTS` and `OUTPUTS`."""
    others: Params
    """The parameters that `Block.others` returns."""


class Block(nnx.Module):
    """Base of both blocks: attention, feed-forward layer, and joined weights.

    Training joins the weights of all layers once per step (`join`) and runs each layer
    on `JoinedParams`. At the end it splits the gradients of the joined matrices into
    gradients of the weights (`separate`).
    """

    INPUTS: ClassVar[tuple[Group, ...]]
    """Input projections, each [D, m], m the sum of the widths of its parts."""
    OUTPUTS: ClassVar[tuple[Group, ...]]
    """Output projections, each [m, D], m the sum of the widths of its parts."""

    def __init__(
        self,
        config: BlockConfig,
        *,
        rngs: nnx.Rngs,
        tp_chunks: int = 1,
        in_fp8: bool = False,
        adapters: AdapterConfig | None = None,
    ):
        """Create the attention and feed-forward layers.

        Args:
          config: sizes and options.
          rngs: streams to draw parameters from.
          tp_chunks: chunks of the sequence in tensor-parallel communication. Each is
            overlapped with the matmul of another chunk; 1 sends all at once.
          in_fp8: run the matmuls with weights in FP8; see `layers.fp8`.
          adapters: low-rank adapters of the weights; None adds none.
        """
        self.dropout = config.dropout
        self.tp_chunks, self.in_fp8 = tp_chunks, in_fp8
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
        projections: Mapping[str, Joined] | None = None,
    ) -> Float[Array, "B t D"]:
        """Apply the block to this device's part of the residual stream."""
        return self.apply(x, kind, context, key, projections)[0]

    @abc.abstractmethod
    def apply(
        self,
        x: Float[Array, "B t D"],
        kind: LayerKind,
        context: Context,
        key: DropoutKey | None,
        projections: Mapping[str, Joined] | None = None,
    ) -> tuple[Float[Array, "B t D"], Any]:
        """Apply the block to this device's part of the residual stream.

        Args:
          x: this device's part of the residual stream.
          kind: kind of the layer.
          context: context of these sequences.
          key: key of the dropout masks; None disables dropout.
          projections: the joined weights; None joins the weights of this module.
        Returns:
          the new residual stream, and the updated cache of `context.cached` (None in
          training).
        """

    def join(self, params: Params) -> dict[str, Float[Array, "*lead m n"]]:
        """Join weights into one matrix per projection.

        This is a linear function of the weights. If tp exceeds the number of key/value
        heads, it also selects this device's heads.

        Args:
          params: this device's parts of the parameters of one block, or of a stack of
            blocks, all of one dtype; D may be a part of the model's width.
        Returns:
          a matrix for each projection name: [..., D, m] in `INPUTS`, [..., m, D] in
          `OUTPUTS`.
        """
        joined = {}
        for name, parts in self.INPUTS:
            matrices = [m for p in parts for m in self._part(p).in_matrices(params[p])]
            joined[name] = jnp.concatenate(matrices, -1)
        for name, parts in self.OUTPUTS:
            matrices = [self._part(p).out_matrix(params[p]) for p in parts]
            joined[name] = jnp.concatenate(matrices, -2)
        return joined

    def separate(
        self, joined: Mapping[str, Float[Array, "*lead m n"]], like: Params
    ) -> Params:
        """Split the gradients of joined matrices into gradients of the weights.

        This is the transpose of `join`. If tp does not split a weight, the caller must
        still sum its gradient over tp.

        Args:
          joined: gradient of each matrix that `join` returns, all of one dtype.
          like: the parameters passed to `join`; only their shapes are read.
        Returns:
          gradients in the tree of `weights(like)`, in the dtype of `joined`.
        """
        sample = jax.tree.leaves(joined)[0]
        weights = self.weights(like)

        def typed(w: Array) -> Any:
            # The shape comes from the weight, the rest of the type from `joined`.
            return jax.typeof(sample).update(shape=w.shape)

        types = jax.tree.map(typed, weights)
        (separate,) = jax.linear_transpose(self.join, types)(dict(joined))
        return separate

    @property
    def joined_dims(self) -> dict[str, tuple[str, str]]:
        """Logical names of the last two dims of each matrix that `join` returns."""
        inputs = {name: ("embed", "mlp") for name, _ in self.INPUTS}
        return inputs | {name: ("mlp", "embed") for name, _ in self.OUTPUTS}

    def weights(self, params: Params) -> Params:
        """Return the subtree of the parameters that `join` reads."""
        return _picked(params, self._is_joined)

    def multiplied(
        self, joined: Mapping[str, Float[Array, "m n"]]
    ) -> dict[str, Float[Array, "m n"] | QuantisedWeight]:
        """Return the joined matrices of one layer in the form that matmuls use.

        In FP8 a matrix is quantised here once, not at each use.
        """
        if not self.in_fp8:
            return dict(joined)
        return {name: quantise_weight(w) for name, w in joined.items()}

    def others(self, params: Params) -> Params:
        """Return the parameters that `join` does not read: biases and norms."""
        return _picked(params, lambda path: not self._is_joined(path))

    def without_weights(self) -> "Block":
        """Return a copy of the block without the weights that `join` reads."""
        block = nnx.merge(*nnx.split(self))
        for part in (block.attention, block.mlp):
            for name in part.WEIGHTS:
                setattr(part, name, None)
        return block

    def _part(self, name: str) -> Attention | Mlp:
        return {"attention": self.attention, "mlp": self.mlp}[name]

    def _is_joined(self, path: tuple[str, ...]) -> bool:
        part, *names = path
        return part in ("attention", "mlp") and names[0] in self._part(part).WEIGHTS

    def _project_in(
        self,
        x: Float[Array, "B t D"],
        group: Group,
        context: Context,
        projections: Mapping[str, Joined] | None,
    ) -> list[Float[Array, "n B s _"]]:
        """Apply an input projection; return the output of each weight."""
        name, parts = group
        if projections is None:
            weights = [w for p in parts for w in self._part(p).in_weights()]
            apart = context.cached is not None
            return column_parallel(
                x, weights, self.tp_chunks, apart=apart, in_fp8=self.in_fp8
            )
        widths = [width for p in parts for width in self._part(p).in_widths()]
        return linear.column_parallel(
            x, projections[name], widths, self.tp_chunks, in_fp8=self.in_fp8
        )

    def _project_out(
        self,
        inputs: Sequence[Float[Array, "n B s _"]],
        group: Group,
        context: Context,
        projections: Mapping[str, Joined] | None,
    ) -> Float[Array, "B t D"]:
        """Apply an output projection, and add its biases."""
        name, parts = group
        if projections is None:
            weights = [self._part(p).out_weight() for p in parts]
            apart = context.cached is not None
            y = row_parallel(
                inputs, weights, self.tp_chunks, apart=apart, in_fp8=self.in_fp8
            )
        else:
            y = linear.row_parallel(
                inputs, projections[name], self.tp_chunks, in_fp8=self.in_fp8
            )
        for p in parts:
            bias = self._part(p).out_bias()
            y = y if bias is None else linear.add_bias(y, bias)
        return y

    def _mix(
        self,
        q: Float[Array, "n B s NH"],
        k: Float[Array, "n B s KH"],
        v: Float[Array, "n B s KH"],
        kind: LayerKind,
        context: Context,
    ) -> tuple[Float[Array, "n B s NH"], Any]:
        """Attend over the whole sequence; return the output and the updated cache.

        Inputs and output are in the shard order of the projections.
        """
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


def _picked(params: Params, is_picked: Any, path: tuple[str, ...] = ()) -> Params:
    """Return the subtree of the leaves whose path is picked, without empty dicts."""
    found = {}
    for name, child in params.items():
        at = (*path, name)
        if not isinstance(child, dict):
            if is_picked(at):
                found[name] = child
        elif part := _picked(child, is_picked, at):
            found[name] = part
    return found


class ParallelBlock(Block):
    """z = x + Attn(LN(x)) + MLP(LN(x)), one norm for both branches.

    One fused input projection (q | k | v | ffn-in), one fused output projection
    (attn-out | ffn-out).

    Source: Wang and Komatsuzaki 2021 (GPT-J); Chowdhery et al. 2022, arXiv:2204.02311,
    section 2; Jiang et al. 2024 (MegaScale), arXiv:2402.15627, section 3.1.
    """

    INPUTS = (("in", ("attention", "mlp")),)
    OUTPUTS = (("out", ("attention", "mlp")),)

    def __init__(
        self,
        config: BlockConfig,
        *,
        rngs: nnx.Rngs,
        tp_chunks: int = 1,
        in_fp8: bool = False,
        adapters: AdapterConfig | None = None,
    ):
        """Create the shared norm and the two branches; arguments as in `Block`."""
        super().__init__(
            config, rngs=rngs, tp_chunks=tp_chunks, in_fp8=in_fp8, adapters=adapters
        )
        self.norm = _norm(config)

    def apply(
        self,
        x: Float[Array, "B t D"],
        kind: LayerKind,
        context: Context,
        key: DropoutKey | None,
        projections: Mapping[str, Joined] | None = None,
    ) -> tuple[Float[Array, "B t D"], Any]:
        """Apply the block to this device's part of the residual stream."""
        (to_both,), (of_both,) = self.INPUTS, self.OUTPUTS
        x, normed = self.norm.branch(x)
        q, k, v, *up = self._project_in(normed, to_both, context, projections)
        mixed, kept = self._mix(q, k, v, kind, context)
        inputs = [mixed, self.mlp.activate(up)]
        y = self._project_out(inputs, of_both, context, projections)
        return x + dropout(y, self.dropout, None if key is None else key.at(0)), kept


class SerialBlock(Block):
    """y = x + Attn(LN1(x)); z = y + MLP(LN2(y)); each branch may end with a norm.

    Source: pre-norm transformer, Xiong et al. 2020, arXiv:2002.04745, figure 1b; norms
    on both sides of a branch, Gemma 2, arXiv:2408.00118, section 2.
    """

    INPUTS = (("attention_in", ("attention",)), ("mlp_in", ("mlp",)))
    OUTPUTS = (("attention_out", ("attention",)), ("mlp_out", ("mlp",)))

    def __init__(
        self,
        config: BlockConfig,
        *,
        rngs: nnx.Rngs,
        tp_chunks: int = 1,
        in_fp8: bool = False,
        adapters: AdapterConfig | None = None,
    ):
        """Create the norms and the two branches; arguments as in `Block`."""
        super().__init__(
            config, rngs=rngs, tp_chunks=tp_chunks, in_fp8=in_fp8, adapters=adapters
        )
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
        projections: Mapping[str, Joined] | None = None,
    ) -> tuple[Float[Array, "B t D"], Any]:
        """Apply the block to this device's part of the residual stream."""
        to_attention, to_mlp = self.INPUTS
        of_attention, of_mlp = self.OUTPUTS
        x, normed = self.norm_attention.branch(x)
        q, k, v = self._project_in(normed, to_attention, context, projections)
        mixed, kept = self._mix(q, k, v, kind, context)
        y = self._project_out([mixed], of_attention, context, projections)
        y = y if self.post_norm_attention is None else self.post_norm_attention(y)
        x = x + dropout(y, self.dropout, None if key is None else key.at(0))
        x, normed = self.norm_mlp.branch(x)
        up = self._project_in(normed, to_mlp, context, projections)
        y = self._project_out([self.mlp.activate(up)], of_mlp, context, projections)
        y = y if self.post_norm_mlp is None else self.post_norm_mlp(y)
        return x + dropout(y, self.dropout, None if key is None else key.at(1)), kept
