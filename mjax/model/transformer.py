"""The transformer: its parameters, embedding, layers and loss.

`Transformer` is a Flax NNX module that defines the model and holds no training state.
It is split once into a graph definition and a tree of parameters, and merged inside the
step. Its methods run per device inside the step's shard_map. The parameters of all
blocks are stacked, so all layers share one compiled program. Stacked parameters are
`[L, ...]` in the order of the layers, or `[slots, ...]` in the order of a partition
over pipeline stages.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from mjax.layers.block import (
    Block,
    Context,
    JoinedParams,
    ParallelBlock,
    SerialBlock,
)
from mjax.layers.config import AdapterConfig, LayerKind
from mjax.layers.config import Remat as Remat
from mjax.layers.dropout import DropoutKey as DropoutKey
from mjax.layers.dropout import dropout
from mjax.layers.embed import Embedding, Head
from mjax.layers.loss import NO_TARGET as NO_TARGET
from mjax.layers.loss import mask_padding
from mjax.layers.norm import Norm
from mjax.layers.rope import angles
from mjax.layers.stack import BLOCK_INPUT, Guard, LayerPattern
from mjax.model.config import ModelConfig
from mjax.pipeline.partition import EMPTY, Partition

Params = dict[str, Any]
"""Nested dict of arrays; leaves below "blocks" have a leading dim of layers."""


class Transformer(nnx.Module):
    """A decoder-only transformer.

    Attributes:
      embed: token embedding.
      blocks: one block module; its parameters have a leading dim of layers, or of the
        slots of a partition.
      final_norm: norm before the output projection.
      head: output projection.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        partition: Partition | None = None,
        tp_chunks: int = 1,
        in_fp8: bool = False,
        adapters: AdapterConfig | None = None,
    ):
        """Draw all parameters from the stream `rngs.params`, in float32.

        Args:
          config: the architecture.
          rngs: source of randomness; it and a layer's index determine the parameters of
            the layer.
          partition: the slots in which a run stores the layers; None stores all layers
            in order.
          tp_chunks: see `layers.block.Block`; parameters do not depend on it.
          in_fp8: see `layers.block.Block`; parameters do not depend on it.
          adapters: adapters of the blocks; parameters of the model do not depend on
            them.
        """
        self.config = config
        std = config.block_config.std
        vocab, d = config.padded_vocab, config.d_model
        self.embed = Embedding(
            vocab,
            d,
            std=std,
            rngs=rngs,
            scale=config.embed_scale,
            num_positions=config.learned_positions,
        )
        self.blocks = _stacked_blocks(
            *(config, rngs, partition), tp_chunks, in_fp8=in_fp8, adapters=adapters
        )
        self.final_norm = Norm(d, config.norm_config)
        self.head = Head(
            vocab,
            d,
            tied=config.tie_embeddings,
            use_bias=config.head_bias,
            scale=config.logit_scale,
            std=std,
            rngs=rngs,
            soft_cap=config.logit_soft_cap,
        )

    def start(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        *,
        key: DropoutKey | None = None,
    ) -> Float[Array, "B t D"]:
        """Embed the tokens; return the input of the first block.

        Args:
          tokens: token ids.
          positions: position of each token in its document; required for learned
            positions.
          key: key of the dropout masks; None in evaluation.
        Returns:
          Hidden states at this device's t = T/tp positions.
        """
        at_start = None if key is None else key.at(0)
        return dropout(self.embed(tokens, positions), self.config.dropout, at_start)

    def context(
        self, positions: Int[Array, "B T"], segments: Int[Array, "B T"] | None
    ) -> Context:
        """Compute the arrays that every block reads besides its input.

        Args:
          positions: position of each token in its document.
          segments: document number of each token; None means one document per sequence.
        """
        windowed = self.config.windowed_rope_config
        return Context(
            cos_sin=angles(positions, self.config.rope_config),
            segments=segments,
            windowed_cos_sin=None if windowed is None else angles(positions, windowed),
        )

    def run_layers(
        self,
        x: Float[Array, "B t D"],
        context: Context,
        stacked: Params | None = None,
        *,
        key: DropoutKey | None = None,
        first_layer: Int[Array, ""] | int = 0,
        guard: Guard | None = None,
    ) -> Float[Array, "B t D"]:
        """Run all blocks, or those whose parameters are given.

        Args:
          x: input of the first block.
          context: result of `context` for these sequences.
          stacked: parameters [n, ...] of n consecutive blocks; None uses all blocks.
          key: as in `start`.
          first_layer: index of the first block in the whole model, a multiple of the
            length of the pattern of layer kinds.
          guard: applies or skips a layer, see `layers.stack.Guard`; None applies all.
        """
        if stacked is None:
            stacked = nnx.to_pure_dict(nnx.state(self.blocks))
        pattern = self.pattern(context, key=key, first_layer=first_layer, guard=guard)
        return pattern.run(x, stacked)

    def pattern(
        self,
        context: Context,
        *,
        key: DropoutKey | None = None,
        first_layer: Int[Array, ""] | int = 0,
        guard: Guard | None = None,
    ) -> LayerPattern:
        """Return the pattern that applies blocks; arguments as in `run_layers`.

        The parameters of a layer may be `JoinedParams`.
        """
        graph = nnx.graphdef(self.blocks)
        bare_graph = nnx.graphdef(self.blocks.without_weights())

        def layer(
            kind: LayerKind,
            x: jax.Array,
            params: Params | JoinedParams,
            index: Int[Array, ""] | int,
            shared: tuple[Context, DropoutKey | None],
        ) -> jax.Array:
            context, key = shared
            x = checkpoint_name(x, BLOCK_INPUT)
            layer_key = None if key is None else key.at(index + 1)
            if isinstance(params, JoinedParams):
                block = nnx.merge(bare_graph, params.others)
                return block(x, kind, context, layer_key, params.projections)
            return nnx.merge(graph, params)(x, kind, context, layer_key)

        return LayerPattern(
            layer=layer,
            kinds=self.config.kinds[: self.config.pattern_length],
            remat=self.config.remat,
            context=(context, key),
            first_layer=first_layer,
            guard=guard,
        )

    def loss(
        self, x: Float[Array, "B t D"], targets: Int[Array, "B T"]
    ) -> Float[Array, ""]:
        """Return the targets' summed negative log-likelihood, in nats.

        Args:
          x: output of the last block.
          targets: targets of the whole sequence; NO_TARGET adds 0.
        """
        x = self.final_norm(x)
        return self.head.nll(x, self.embed, targets, self.config.vocab_size)

    def logits_of(self, x: Float[Array, "B t D"]) -> Float[Array, "B T v"]:
        """Return this device's float32 logits, -inf for the padding of the vocabulary.

        Args:
          x: output of the last block.
        """
        logits = self.head(self.final_norm(x), self.embed)
        return mask_padding(logits, self.config.vocab_size)


def _stacked_blocks(
    config: ModelConfig,
    rngs: nnx.Rngs,
    partition: Partition | None,
    tp_chunks: int,
    *,
    in_fp8: bool,
    adapters: AdapterConfig | None,
) -> Block:
    """Make one block with stacked leaves; each layer has its own random key.

    A partition permutes the keys, not the parameters, so each layer is drawn directly
    in the slot that stores it.
    """
    parallel = config.block == "parallel"
    kind = ParallelBlock if parallel else SerialBlock

    def make(key: jax.Array) -> Block:
        rngs = nnx.Rngs(params=key)
        return kind(
            config.block_config,
            rngs=rngs,
            tp_chunks=tp_chunks,
            in_fp8=in_fp8,
            adapters=adapters,
        )

    def draw(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(make(key)))

    def draw_slot(key: jax.Array, holds_layer: jax.Array) -> Params:
        return jax.tree.map(lambda p: jnp.where(holds_layer, p, 0), draw(key))

    keys = jax.random.split(rngs.params(), config.layers)
    graph = nnx.graphdef(nnx.eval_shape(make, keys[0]))
    if partition is None or partition.is_canonical:
        return nnx.merge(graph, jax.vmap(draw)(keys))
    layers = partition.layer_of_slot
    return nnx.merge(graph, jax.vmap(draw_slot)(keys[layers.clip(0)], layers != EMPTY))


def abstract_params(
    config: ModelConfig,
    partition: Partition | None = None,
    tp_chunks: int = 1,
    adapters: AdapterConfig | None = None,
    in_fp8: bool = False,
) -> tuple[Any, Any]:
    """Return the model's GraphDef and abstract parameters, without using a device.

    Every leaf is an nnx.Param of a ShapeDtypeStruct, with metadata `logical` (the names
    of its dims, without the layer dim) and `decay`. Leaves of the blocks are stacked
    over the slots of `partition`, or over the L layers if it is None. `tp_chunks`,
    `adapters` and `in_fp8` are passed to the blocks.
    """

    def make() -> Transformer:
        return Transformer(
            config,
            rngs=nnx.Rngs(0),
            partition=partition,
            tp_chunks=tp_chunks,
            in_fp8=in_fp8,
            adapters=adapters,
        )

    return nnx.split(nnx.eval_shape(make))


def map_params(f: Callable[[nnx.Variable, bool], Any], state: Any) -> Params:
    """Map f(leaf, is_stacked) over the parameters; stacked leaves have a layer dim."""

    def leaf(path: Any, variable: nnx.Variable) -> Any:
        return f(variable, path[0].key == "blocks")

    def is_leaf(x: Any) -> bool:
        return isinstance(x, nnx.Variable)

    mapped = jax.tree_util.tree_map_with_path(leaf, state, is_leaf=is_leaf)
    return nnx.to_pure_dict(mapped)
