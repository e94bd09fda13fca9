"""Loss, gradients and logits of a batch, computed by a pipeline of stages.

`Pipelined` has the methods of `mjax.step.plain.Plain` and computes the same results. It
describes a Transformer to the executor (`mjax.pipeline.run`) as three functions:
embedding, virtual stage, and head with the loss.

In training the weights of the blocks are cast and joined once per step, before they are
gathered over dp_shard. So the pipeline gathers the joined matrices, and reduces their
gradients, in pieces. At the end the reduced gradients are separated. If dp_shard does
not divide the model width, `mesh.rules.param_spec` splits other dims of the weights,
and the parts cannot be joined. Then all weights are gathered before they are joined,
and the gradients are all-reduced.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mjax.layers.block import Block, JoinedParams
from mjax.layers.linear import Joined
from mjax.mesh import collectives, rules, zero
from mjax.mesh.axes import DP, SHARDS, TP
from mjax.model.transformer import Params, Transformer
from mjax.pipeline import run
from mjax.pipeline.make import Pipeline
from mjax.pipeline.pieces import First, Pieces
from mjax.pipeline.schedule import build_forward
from mjax.step.forward import Batch, Forward, dropout_key, last_position
from mjax.step.stamps import Log, Place, mark
from mjax.trace import scopes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipelined(Forward):
    """Run microbatches through all stages; each stage runs its virtual stages."""

    pipeline: Pipeline

    @property
    def _num_stamps(self) -> int:
        return 2 + self.pipeline.schedule.num_ticks

    def _gather_first(self, params: Params) -> First:
        stored = _by_use(params)
        model = self._bind({**stored.embedding, **stored.head}, stored.chunks)
        joins_parts = self._joins_parts(model)
        assert joins_parts  # config.sizes refuses other values
        # Slot 0 holds the first layer of the first virtual stage.
        first_slot = jax.tree.map(lambda w: w[:1].astype(self.compute), stored.chunks)
        joined = jax.tree.map(lambda w: w[None], model.blocks.join(first_slot))
        others = self._by_chunk(model.blocks.others(stored.chunks))
        pieces = self._pieces(model.blocks, joins_parts)
        return pieces.gather_first(stored._replace(chunks=run.Chunks(joined, others)))

    def _loss_and_gradients(
        self,
        params: Params,
        key: Array,
        scale: Float[Array, ""],
        batch: Batch,
        log: Log,
        first: First | None,
    ) -> tuple[Float[Array, ""], Params, Log]:
        stored = _by_use(jax.tree.map(collectives.vary, params))
        blocks = stored.chunks
        ends = {**stored.embedding, **stored.head}
        joins_parts = self._joins_parts(self._bind(ends, blocks))
        parts = jax.tree.map(lambda w: w.astype(self.compute), blocks)
        if not joins_parts:
            parts = zero.gather(blocks, self.specs["blocks"], self.compute)
        block = self._bind(ends, blocks).blocks
        chunks = run.Chunks(joined=block.join(parts), others=block.others(blocks))

        def loss(
            embedding: Params, head: Params, x: Array, micro: Batch
        ) -> Float[Array, ""]:
            model = self._bind(embedding | head, blocks)
            return model.loss(x, micro["targets"]) * scale

        total, grads, log = run.gradients(
            self.pipeline.schedule,
            self._model(ends, blocks, key, loss),
            stored._replace(chunks=self._by_chunk(chunks)),
            self.split(batch),
            options=self.pipeline.options,
            dtype=self.reduce,
            pieces=self._pieces(block, joins_parts),
            first=first,
            log=log,
            mark=lambda log, x: mark(log, x, Place.TICK),
        )
        log, total = mark(log, total, Place.BACKWARD)
        with jax.named_scope(scopes.phase("backward")):
            joined, others = self._by_slot(grads.chunks)
            weights = block.separate(joined, parts)
            specs = block.weights(self.specs["blocks"])
            # Sum over tp the gradients of key/value heads that tp does not split.
            weights = zero.reduce_over((TP,), weights, specs)
            if not joins_parts:
                weights = zero.own_parts(weights, specs)
        ends = {**grads.embedding, **grads.head}
        return total, ends | {"blocks": _merge(weights, others)}, log

    def _nll(self, params: Params, batch: Batch) -> Float[Array, ""]:
        def nll(
            embedding: Params, head: Params, x: Array, micro: Batch
        ) -> Float[Array, ""]:
            model = self._bind(embedding | head, params["blocks"])
            return model.loss(x, micro["targets"])

        return self._forward(params, nll, self.split(batch))

    def _last_logits(
        self, params: Params, tokens: Int[Array, "B T"], length: Int[Array, ""]
    ) -> Float[Array, "B v"]:
        def logits(
            embedding: Params, head: Params, x: Array, micro: Batch
        ) -> Float[Array, "B v"]:
            del micro
            logits = self._bind(embedding | head, params["blocks"]).logits_of(x)
            return last_position(logits, length)

        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        one = {"tokens": tokens[None], "positions": collectives.vary(positions)[None]}
        return self._forward(params, logits, one)

    def _forward(
        self, params: Params, head: Any, microbatches: run.Microbatches
    ) -> Array:
        """Run forward with all stored parameters gathered at once."""
        params = jax.tree.map(collectives.vary, params)
        whole = zero.gather(params, self.specs, self.compute)
        weights = _by_use(whole)
        weights = weights._replace(chunks=self._by_chunk(weights.chunks))
        schedule = build_forward(
            num_stages=self.pipeline.partition.num_stages,
            num_chunks=self.pipeline.partition.num_chunks,
            num_microbatches=microbatches["tokens"].shape[0],
        )
        model = self._model(params, params["blocks"], None, head)
        idle = self.pipeline.options.idle
        return run.forward(schedule, model, weights, microbatches, idle=idle)

    def _model(
        self, ends: Params, blocks: Params, key: Array | None, head: Any
    ) -> run.Model:
        """Describe the Transformer as a pipeline model; a key turns dropout on."""
        first_layer = jnp.asarray(self.pipeline.partition.first_layer)
        num_layers = jnp.asarray(self.pipeline.partition.layers_per_chunk)
        is_even = len(set(self.pipeline.partition.layers_per_chunk)) == 1

        model = self._bind(ends, blocks)

        def at(micro: Batch) -> Any:
            return None if key is None else dropout_key(key, micro)

        def embed(embedding: Params, micro: Batch) -> Array:
            bound = self._bind({**ends, **embedding}, blocks)
            return bound.start(micro["tokens"], micro["positions"], key=at(micro))

        def context(micro: Batch) -> Any:
            positions, segments = micro["positions"], micro.get("segments")
            return model.context(positions, segments), at(micro)

        def chunk(
            x: Array, weights: Params | run.Held, context: Any, number: Array
        ) -> Array:
            def guard(local: Array, layer: Any, leave_out: Any, x: Array) -> Array:
                is_used = local < num_layers[number]
                if self.pipeline.options.idle == "skip":
                    return jax.lax.cond(is_used, layer, leave_out, x)
                return jnp.where(is_used, layer(x), x)

            context, layer_key = context
            pattern = model.pattern(
                context,
                key=layer_key,
                first_layer=first_layer[number],
                guard=None if is_even else guard,
            )
            if isinstance(weights, run.Held):
                return pattern.unrolled(x, _layers(weights))
            return pattern.run(x, weights)

        return run.Model(
            embed=embed,
            context=context,
            chunk=chunk,
            head=head,
            hold=model.blocks.multiplied,
        )

    def _joins_parts(self, model: Transformer) -> bool:
        """Return whether parts of weights can be joined before they are gathered.

        They can if `SHARDS` divide the model width, or if nothing is sharded.
        """
        num_shards = math.prod(self.mesh.shape[axis] for axis in SHARDS)
        return self.level == 0 or model.config.d_model % num_shards == 0

    def _pieces(self, block: Block, joins_parts: bool) -> Pieces:
        has_others = any(self.mesh.shape[axis] > 1 for axis in DP)
        embed_over_dp = self.level > 0 and joins_parts
        joined = {
            name: rules.joined_spec(dims, embed_over_dp=embed_over_dp)
            for name, dims in block.joined_dims.items()
        }
        specs = _by_use(self.specs)
        return Pieces(
            num_stages=self.pipeline.partition.num_stages,
            num_chunks=self.pipeline.partition.num_chunks,
            split=has_others,
            specs=specs._replace(
                chunks=run.Chunks(joined, block.others(self.specs["blocks"]))
            ),
            level=self.level,
            compute_dtype=self.compute,
            reduce_dtype=self.reduce,
        )

    def _by_chunk[Tree](self, slots: Tree) -> Tree:
        """Reshape [slots of this stage, ...] to [v, n, ...]."""
        num_chunks = self.pipeline.partition.num_chunks
        return jax.tree.map(lambda x: x.reshape(num_chunks, -1, *x.shape[1:]), slots)

    def _by_slot[Tree](self, chunks: Tree) -> Tree:
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), chunks)


def _by_use(params: Any) -> run.Weights:
    """Split parameters, or a tree like them, into blocks, embedding and head."""
    head = {n: p for n, p in params.items() if n not in ("blocks", "embed")}
    embedding = {"embed": params["embed"]}
    return run.Weights(chunks=params["blocks"], embedding=embedding, head=head)


def _layers(held: run.Held) -> list[JoinedParams]:
    """Return the parameters of each layer of a virtual stage."""
    return [
        JoinedParams(
            {name: Joined(w, totals[name]) for name, w in joined.items()},
            jax.tree.map(lambda p, layer=layer: p[layer], held.others),
        )
        for layer, (joined, totals) in enumerate(
            zip(held.joined, held.totals, strict=True)
        )
    ]


def _merge(a: Params, b: Params) -> Params:
    """Merge nested dicts that share no leaf."""
    both = a | b
    for name in a.keys() & b.keys():
        both[name] = _merge(a[name], b[name])
    return both
