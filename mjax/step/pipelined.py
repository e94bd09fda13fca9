"""Loss, gradients and logits of a batch, computed by a pipeline of stages.

`Pipelined` has the signature of `mjax.step.plain.Plain`, and its results. It tells
the executor (`mjax.pipeline.run`) what a Transformer does before the first chunk, in a
chunk and after the last one; what all stages share is gathered and reduced here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mjax import scopes
from mjax.mesh import collectives, zero
from mjax.model.transformer import Params
from mjax.pipeline import run
from mjax.pipeline.make import Pipeline
from mjax.pipeline.pieces import Pieces
from mjax.pipeline.schedule import build_forward
from mjax.step.forward import Batch, Forward, dropout_key, last_position
from mjax.step.stamps import Log, Place, mark


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipelined(Forward):
    """Each stage runs its chunks of the layers; microbatches go through all stages."""

    pipeline: Pipeline

    @property
    def _num_stamps(self) -> int:
        return 2 + self.pipeline.schedule.num_ticks

    def _loss_and_gradients(
        self,
        params: Params,
        key: Array,
        scale: Float[Array, ""],
        batch: Batch,
        log: Log,
    ) -> tuple[Float[Array, ""], Params, Log]:
        weights = self._weights(params)

        def loss(ends: Params, x: Array, micro: Batch) -> Float[Array, ""]:
            return self._bind(ends, weights.chunks).loss(x, micro["targets"]) * scale

        total, grads, log = run.gradients(
            self.pipeline.schedule,
            self._model(weights, key, loss),
            weights,
            self.split(batch),
            options=self.pipeline.options,
            dtype=self.reduce,
            pieces=self._pieces(split=True),
            log=log,
            mark=lambda log, x: mark(log, x, Place.TICK),
        )
        log, total = mark(log, total, Place.BACKWARD)
        with jax.named_scope(scopes.phase("backward")):
            ends = zero.reduce_gradients(
                grads.ends, self._end_specs, level=self.level, dtype=self.reduce
            )
        return total, ends | {"blocks": self._join(grads.chunks)}, log

    def _nll(self, params: Params, batch: Batch) -> Float[Array, ""]:
        def nll(ends: Params, x: Array, micro: Batch) -> Float[Array, ""]:
            return self._bind(ends, weights.chunks).loss(x, micro["targets"])

        weights = self._whole_weights(params)
        return self._forward(weights, nll, self.split(batch))

    def _last_logits(
        self, params: Params, tokens: Int[Array, "B T"], length: Int[Array, ""]
    ) -> Float[Array, "B v"]:
        def logits(ends: Params, x: Array, micro: Batch) -> Float[Array, "B v"]:
            del micro
            logits = self._bind(ends, weights.chunks).logits_of(x)
            return last_position(logits, length)

        weights = self._whole_weights(params)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        one = {"tokens": tokens[None], "positions": collectives.vary(positions)[None]}
        return self._forward(weights, logits, one)

    def _forward(
        self, weights: run.Weights, head: Any, microbatches: run.Microbatches
    ) -> Array:
        schedule = build_forward(
            num_stages=self.pipeline.partition.num_stages,
            num_chunks=self.pipeline.partition.num_chunks,
            num_microbatches=microbatches["tokens"].shape[0],
        )
        model = self._model(weights, None, head)
        idle = self.pipeline.options.idle
        return run.forward(schedule, model, weights, microbatches, idle=idle)

    def _model(self, weights: run.Weights, key: Array | None, head: Any) -> run.Model:
        """Say what a Transformer does at each place; without a key, no dropout."""
        first_layer = jnp.asarray(self.pipeline.partition.first_layer)
        num_layers = jnp.asarray(self.pipeline.partition.layers_per_chunk)
        is_even = len(set(self.pipeline.partition.layers_per_chunk)) == 1

        model = self._bind(weights.ends, weights.chunks)

        def at(micro: Batch) -> Any:
            return None if key is None else dropout_key(key, micro)

        def embed(ends: Params, micro: Batch) -> Array:
            bound = self._bind(ends, weights.chunks)
            return bound.start(micro["tokens"], micro["positions"], key=at(micro))

        def context(micro: Batch) -> Any:
            positions, segments = micro["positions"], micro.get("segments")
            return model.context(positions, segments), at(micro)

        def chunk(x: Array, layers: Params, context: Any, number: Array) -> Array:
            def guard(local: Array, layer: Any, x: Array) -> Array:
                return _if_true(
                    local < num_layers[number],
                    layer,
                    x,
                    idle=self.pipeline.options.idle,
                )

            context, layer_key = context
            return model.run_layers(
                x,
                context,
                layers,
                key=layer_key,
                first_layer=first_layer[number],
                guard=None if is_even else guard,
            )

        return run.Model(embed=embed, context=context, chunk=chunk, head=head)

    def _pieces(self, *, split: bool) -> Pieces:
        sizes = self.mesh.shape
        has_others = sizes["dp_replicate"] * sizes["dp_shard"] > 1
        return Pieces(
            num_stages=self.pipeline.partition.num_stages,
            num_chunks=self.pipeline.partition.num_chunks,
            split=split and has_others,
            specs=self.specs["blocks"],
            level=self.level,
            compute_dtype=self.compute,
            reduce_dtype=self.reduce,
        )

    def _weights(self, params: Params) -> run.Weights:
        """Gather the ends; give the chunks as they are stored, [v, n, ...]."""
        params = jax.tree.map(collectives.vary, params)
        num_chunks, size = (
            self.pipeline.partition.num_chunks,
            self.pipeline.partition.chunk_size,
        )

        def by_chunk(x: Array) -> Array:
            return x.reshape(num_chunks, size, *x.shape[1:])

        ends = {name: p for name, p in params.items() if name != "blocks"}
        return run.Weights(
            chunks=jax.tree.map(by_chunk, params["blocks"]),
            ends=zero.gather(ends, self._end_specs, self.compute),
        )

    def _whole_weights(self, params: Params) -> run.Weights:
        """Gather everything at once."""
        weights = self._weights(params)
        chunks = self._pieces(split=False).start(weights.chunks)
        return weights._replace(chunks=chunks)

    def _join(self, chunks: Params) -> Params:
        """Give [v, n, ...] back as [slots of this stage, ...]."""
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), chunks)


def _if_true(
    condition: Bool[Array, ""],
    compute: Callable[[Array], Array],
    x: Array,
    *,
    idle: run.Idle,
) -> Array:
    """Return compute(x) where the condition holds, else x; idle: `run.Options`."""
    if idle == "skip":
        return jax.lax.cond(condition, compute, lambda x: x, x)
    return jnp.where(condition, compute(x), x)
