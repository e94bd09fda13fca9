"""The transformer: configuration, parameters, forward pass, counts.

`Transformer` is a Flax NNX module that only defines: it is split once into a graph
definition and a tree of parameters, and merged again inside the step. Its methods run
per device inside the step's shard_map. The parameters of all blocks are stacked,
`[L, ...]` in the order of the layers, or `[slots, ...]` as a partition over pipeline
stages orders them, so that one compiled layer serves all.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from mjax.layers.attention import AttentionConfig
from mjax.layers.block import (
    Block,
    BlockConfig,
    Context,
    LayerKind,
    ParallelBlock,
    SerialBlock,
)
from mjax.layers.dropout import DropoutKey as DropoutKey
from mjax.layers.dropout import dropout
from mjax.layers.embed import Embedding, Head
from mjax.layers.loss import NO_TARGET as NO_TARGET
from mjax.layers.loss import mask_padding
from mjax.layers.norm import Norm
from mjax.layers.rope import RopeConfig, angles
from mjax.layers.stack import BLOCK_INPUT, Guard, Layers
from mjax.layers.stack import Remat as Remat
from mjax.pipeline.partition import EMPTY, Partition

Params = dict[str, Any]
"""Nested dict of arrays; the leaves below "blocks" are stacked over layers."""

_SIZES = (
    *("layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff"),
    *("vocab_size", "vocab_multiple"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture; letters as in docs/vocabulary.md."""

    layers: int = 4
    """L, number of blocks."""
    d_model: int = 128
    """D, model width."""
    heads: int = 4
    """N, query heads."""
    kv_heads: int | None = None
    """K, key/value heads; None is as many as query heads."""
    head_dim: int | None = None
    """H, head width; None is d_model / heads."""
    d_ff: int | None = None
    """F, feed-forward width; None is 4 x d_model."""
    vocab_size: int = 257
    """V, tokens; the tokenizer's size replaces it unless --data.vocab model."""
    vocab_multiple: int = 128
    """The embedding is padded to a multiple of this; padded logits are masked."""
    block: Literal["parallel", "serial"] = "parallel"
    """parallel: x + Attn(LN(x)) + MLP(LN(x)); serial: one after the other."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation."""
    norm_eps: float = 1e-5
    """Added to the variance or mean square."""
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    """gelu: exact; gelu_tanh: tanh form; swiglu: silu(gate) x in."""
    window: tuple[int | None, ...] = (None,)
    """Keys a query sees, itself included; None is all; repeats over the layers."""
    rope: tuple[bool, ...] = (True,)
    """Which layers rotate queries and keys; repeats over the layers."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: float = 1.0
    """Positions are divided by this (linear scaling)."""
    rope_fraction: float = 1.0
    """Share of each head that is rotated (partial rotary)."""
    rope_interleaved: bool = False
    """Rotate neighbouring pairs (GPT-J) instead of the two halves (NeoX)."""
    tie_embeddings: bool = False
    """Use the embedding as output projection."""
    attn_bias: bool = False
    """Biases on the attention projections."""
    mlp_bias: bool = False
    """Biases on the feed-forward projections."""
    norm_bias: bool = False
    """Biases in LayerNorm."""
    head_bias: bool = False
    """Bias on the output projection."""
    logit_scale: float = 1.0
    """Factor on the logits."""
    dropout: float = 0.0
    """Probability of dropping an entry of the embedding and of each branch."""
    init: Literal["depth-scaled", "uniform-depth"] = "depth-scaled"
    """depth-scaled: projections that add to the residual stream are drawn with
    init_std / sqrt(2 L) (GPT-2); uniform-depth: all with init_std."""
    init_std: float | None = None
    """Standard deviation of weights; None is sqrt(2 / (5 D)) (small init)."""
    attention: Literal["auto", "reference", "blocked", "cudnn", "mosaic_gpu"] = "auto"
    """Attention backend; auto takes the fastest that can do the job."""
    remat: Remat = "full"
    """What the backward pass computes again; see docs/parallelism.md."""

    def __post_init__(self) -> None:
        """Refuse sizes that no mesh can carry."""
        for name in _SIZES:
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"model.{name} must be >= 1, got {size}")
        if self.d_model % self.heads and self.head_dim is None:
            raise ValueError(
                f"model.d_model={self.d_model} does not divide by model.heads="
                f"{self.heads}; choose a divisor, or set --model.head-dim"
            )
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"model.heads={self.heads} must be a multiple of model.kv_heads="
                f"{self.num_kv_heads}; choose a divisor of {self.heads}"
            )
        for name in ("norm_eps", "rope_base", "rope_scaling", "init_std"):
            number = getattr(self, name)
            if number is not None and not 0 < number < math.inf:
                raise ValueError(
                    f"model.{name} must be positive and finite, got {number}"
                )
        for name in ("window", "rope"):
            length = len(getattr(self, name))
            if not 1 <= length <= self.layers:
                raise ValueError(
                    f"model.{name} has {length} entries for {self.layers} layers; give "
                    "one, one a layer, or a pattern that repeats"
                )
        for window in self.window:
            if window is not None and window < 1:
                raise ValueError(
                    f"model.window must be >= 1 (a query sees itself), got {window}; "
                    "None is full causal attention"
                )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"model.dropout must be in [0, 1), got {self.dropout}")
        if not 0.0 < self.rope_fraction <= 1.0:
            raise ValueError(
                f"model.rope_fraction must be in (0, 1], got {self.rope_fraction}"
            )
        if any(self.rope) and self.rope_config.rotated_width < 2:
            raise ValueError(
                f"model.rope_fraction={self.rope_fraction} of a head of "
                f"{self.head_width} leaves no pair to rotate; give a larger share, or "
                "--model.rope False for layers without positions"
            )
        if not math.isfinite(self.logit_scale):
            raise ValueError(
                f"model.logit_scale must be finite, got {self.logit_scale}"
            )
        if self.norm == "rmsnorm" and self.norm_bias:
            raise ValueError("model.norm_bias needs --model.norm layernorm")

    @property
    def num_kv_heads(self) -> int:
        """K, key/value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """H, head width."""
        return self.d_model // self.heads if self.head_dim is None else self.head_dim

    @property
    def ffn_width(self) -> int:
        """F, feed-forward width."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def padded_vocab(self) -> int:
        """V rounded up to the multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, in order."""
        return tuple(
            LayerKind(
                window=self.window[i % len(self.window)],
                rotate=self.rope[i % len(self.rope)],
            )
            for i in range(self.layers)
        )

    @property
    def pattern_length(self) -> int:
        """Length of the smallest pattern of layer kinds that repeats."""
        kinds = self.kinds
        return next(
            n
            for n in range(1, self.layers + 1)
            if all(kinds[i] == kinds[i % n] for i in range(self.layers))
        )

    @property
    def rope_config(self) -> RopeConfig:
        """How queries and keys are rotated."""
        return RopeConfig(
            head_width=self.head_width,
            base=self.rope_base,
            scaling=self.rope_scaling,
            fraction=self.rope_fraction,
            interleaved=self.rope_interleaved,
        )

    @property
    def block_config(self) -> BlockConfig:
        """Sizes and options of every block."""
        std = (
            (2 / (5 * self.d_model)) ** 0.5 if self.init_std is None else self.init_std
        )
        depth = (2 * self.layers) ** 0.5 if self.init == "depth-scaled" else 1.0
        attention = AttentionConfig(
            d_model=self.d_model,
            num_heads=self.heads,
            num_kv_heads=self.num_kv_heads,
            head_width=self.head_width,
            use_bias=self.attn_bias,
            rope=self.rope_config,
            backend=self.attention,
            recompute=self.remat == "attention",
        )
        return BlockConfig(
            attention=attention,
            d_ff=self.ffn_width,
            activation=self.activation,
            mlp_bias=self.mlp_bias,
            norm=self.norm,
            norm_eps=self.norm_eps,
            norm_bias=self.norm_bias,
            dropout=self.dropout,
            std=std,
            out_std=std / depth,
        )


class Transformer(nnx.Module):
    """A decoder-only transformer.

    Attributes:
      embed: token embedding.
      blocks: one block module whose parameters carry a leading dim of layers, or of
        the slots of a partition.
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
    ):
        """Draw all parameters, float32, from the stream `rngs.params`.

        Args:
          config: the architecture.
          rngs: a layer's draw depends on it and on the layer's index alone.
          partition: the slots in which a run stores the layers; None is all layers in
            their order.
          tp_chunks: see `layers.block.Block`; parameters do not depend on it.
        """
        self.config = config
        std = config.block_config.std
        vocab, d = config.padded_vocab, config.d_model
        self.embed = Embedding(vocab, d, std=std, rngs=rngs)
        self.blocks = _stacked_blocks(config, rngs, partition, tp_chunks)
        self.final_norm = Norm(
            d, kind=config.norm, eps=config.norm_eps, use_bias=config.norm_bias
        )
        self.head = Head(
            vocab,
            d,
            tied=config.tie_embeddings,
            use_bias=config.head_bias,
            scale=config.logit_scale,
            std=std,
            rngs=rngs,
        )

    def start(
        self, tokens: Int[Array, "B T"], *, key: DropoutKey | None = None
    ) -> Float[Array, "B t D"]:
        """Embed the tokens: what enters the first block.

        Args:
          tokens: token ids.
          key: where dropout masks come from; None in evaluation.
        Returns:
          this device's t = T/tp positions.
        """
        at_start = None if key is None else key.at(0)
        return dropout(self.embed(tokens), self.config.dropout, at_start)

    def context(
        self, positions: Int[Array, "B T"], segments: Int[Array, "B T"] | None
    ) -> Context:
        """Compute what every block reads beside its input.

        Args:
          positions: position of each token in its document.
          segments: document of each token; None is one document a row.
        """
        return Context(
            cos_sin=angles(positions, self.config.rope_config), segments=segments
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
        """Run blocks: all of them, or those whose parameters are given.

        Args:
          x: input of the first.
          context: of these rows.
          stacked: parameters [n, ...] of a run of blocks; None is all.
          key: as in `start`.
          first_layer: index in the whole model of the first, a multiple of the pattern
            of kinds.
          guard: (layers before it here, layer, input) -> output; leaves out some.
        """
        if stacked is None:
            stacked = nnx.to_pure_dict(nnx.state(self.blocks))
        layers = self.layers(context, key=key, first_layer=first_layer, guard=guard)
        return layers.run(x, stacked)

    def layers(
        self,
        context: Context,
        *,
        key: DropoutKey | None = None,
        first_layer: Int[Array, ""] | int = 0,
        guard: Guard | None = None,
    ) -> Layers:
        """Return what applies blocks; arguments as in `run_layers`."""
        graph = nnx.graphdef(self.blocks)

        def layer(
            kind: LayerKind,
            x: jax.Array,
            params: Params,
            index: Int[Array, ""] | int,
            shared: tuple[Context, DropoutKey | None],
        ) -> jax.Array:
            context, key = shared
            x = checkpoint_name(x, BLOCK_INPUT)
            layer_key = None if key is None else key.at(index + 1)
            return nnx.merge(graph, params)(x, kind, context, layer_key)

        return Layers(
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
        """Return the targets' summed negative log-likelihood, nats.

        Args:
          x: what leaves the last block.
          targets: of the whole sequence; NO_TARGET adds 0.
        """
        x = self.final_norm(x)
        return self.head.nll(x, self.embed, targets, self.config.vocab_size)

    def logits_of(self, x: Float[Array, "B t D"]) -> Float[Array, "B T v"]:
        """Return this device's float32 logits, -inf where the vocabulary is padded.

        Args:
          x: what leaves the last block.
        """
        logits = self.head(self.final_norm(x), self.embed)
        return mask_padding(logits, self.config.vocab_size)


def _stacked_blocks(
    config: ModelConfig,
    rngs: nnx.Rngs,
    partition: Partition | None,
    tp_chunks: int,
) -> Block:
    """Make one block whose leaves are stacked, each layer its own draw.

    A partition orders the keys, not the parameters: each is drawn where it is stored.
    """
    parallel = config.block == "parallel"
    kind = ParallelBlock if parallel else SerialBlock

    def make(key: jax.Array) -> Block:
        rngs = nnx.Rngs(params=key)
        return kind(config.block_config, rngs=rngs, tp_chunks=tp_chunks)

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
    config: ModelConfig, partition: Partition | None = None, tp_chunks: int = 1
) -> tuple[Any, Any]:
    """Return the model's GraphDef and its abstract parameters (no memory, no device).

    Every leaf is an nnx.Param of a ShapeDtypeStruct, with metadata `logical` (the names
    of its dims, without the layer dim) and `decay`. Those of the blocks are stacked
    over the slots of `partition`; None is the L layers. `tp_chunks` is told to the
    blocks.
    """

    def make() -> Transformer:
        return Transformer(
            config, rngs=nnx.Rngs(0), partition=partition, tp_chunks=tp_chunks
        )

    return nnx.split(nnx.eval_shape(make))


def map_params(f: Callable[[nnx.Variable, bool], Any], state: Any) -> Params:
    """Map f(leaf, stacked) over the parameters; stacked: has a leading layer dim."""

    def leaf(path: Any, variable: nnx.Variable) -> Any:
        return f(variable, path[0].key == "blocks")

    def is_leaf(x: Any) -> bool:
        return isinstance(x, nnx.Variable)

    mapped = jax.tree_util.tree_map_with_path(leaf, state, is_leaf=is_leaf)
    return nnx.to_pure_dict(mapped)
