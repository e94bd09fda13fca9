"""Loss, gradients and logits of a batch, with all layers on every device.

Input and output: as in `mjax.step.forward`, per device. The ZeRO level decides when
parameters are gathered. Every microbatch adds to the gradients. Levels 0 to 2 reduce
them once per step; level 3 also reduces them within dp_shard in every microbatch.
`mjax.step.prefetch` runs the layers.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mjax.mesh import collectives, zero
from mjax.mesh.axes import DP, PP, SHARDS, TP
from mjax.model.transformer import DropoutKey, Params, Transformer
from mjax.step.forward import Batch, Forward, dropout_key, last_position
from mjax.step.prefetch import OverlappedLayers, Weights, gather_first_layer
from mjax.step.stamps import Log, Place, mark, mark_smallest
from mjax.trace import scopes


class _First(NamedTuple):
    """Weights gathered before the step, as `zero.gather_split` returns them."""

    embed: Params
    layer: Params
    """Gathered weights of the first layer, leaves [1, ...]."""


class _Sum(NamedTuple):
    """Sum of the gradients of the microbatches so far, as `zero.summand` returns it."""

    ends: Params
    blocks: Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain(Forward):
    """Run all layers on every device, each on its part of the batch.

    Weights are gathered layer by layer in the first microbatch, and gradients are
    reduced layer by layer in the last one (level 3: see `mesh.zero`). The embedding and
    the head (all but the blocks) are gathered before the first layer, and their
    gradients are reduced after the last.
    """

    @property
    def _num_stamps(self) -> int:
        return 1 + 2 * self.microbatches

    def _gather_first(self, params: Params) -> _First:
        embed = zero.gather_split(params["embed"], self.specs["embed"], self.compute)
        blocks = params["blocks"], self.specs["blocks"]
        return _First(embed, gather_first_layer(*blocks, self.compute))

    def _loss_and_gradients(
        self,
        params: Params,
        key: Array,
        scale: Float[Array, ""],
        batch: Batch,
        log: Log,
        first: _First | None,
    ) -> tuple[Float[Array, ""], Params, Log]:
        params = jax.tree.map(collectives.vary, params)
        micro = self.split(batch)

        def one(
            weights: Weights,
            ends: Params,
            so_far: tuple[_Sum | None, Log],
            index: Any,
            last: bool,
            first: _First | None = None,
        ) -> tuple[Weights, Float[Array, ""], tuple[_Sum, Log]]:
            rows = jax.tree.map(lambda x: x[index], micro)
            # Microbatches run one after another, without overlap.
            rows, (total, log) = jax.lax.optimization_barrier((rows, so_far))
            if total is not None:
                # Before the barrier, the stamp would wait for reduced gradients, and
                # delay kernels that overlap the reduction.
                log, tokens = mark(log, rows["tokens"], Place.BACKWARD)
                rows = rows | {"tokens": tokens}
            so_far = (total, log)
            return self._microbatch(
                weights, ends, so_far, rows, key, scale, finish=last, first=first
            )

        weights, ends = self._weights(params, first=first)
        final = self.microbatches - 1
        with jax.named_scope(scopes.single("microbatches", 0)):
            weights, value, so_far = one(
                weights, ends, (None, log), 0, final == 0, first
            )
        if final > 1:

            def add(so_far: Any, index: Array) -> tuple[Any, Float[Array, ""]]:
                _, value, so_far = one(weights, ends, so_far, index, False)
                return so_far, value

            with jax.named_scope(scopes.loop("microbatches", 1, final - 1)):
                so_far, values = jax.lax.scan(add, so_far, jnp.arange(1, final))
            value += values.sum()
        if final > 0:
            with jax.named_scope(scopes.single("microbatches", final)):
                _, last_value, so_far = one(weights, ends, so_far, final, True)
            value += last_value
        total, log = so_far
        grads = self.trained.of(total.ends | {"blocks": total.blocks})
        with jax.named_scope(scopes.phase("backward")):
            specs = self.trained.of(self.specs)
            return value, zero.reduce_over((PP, TP), grads, specs), log

    def _microbatch(
        self,
        weights: Weights,
        ends: Params,
        so_far: tuple[_Sum | None, Log],
        micro: Batch,
        key: Array,
        scale: Float[Array, ""],
        *,
        finish: bool,
        first: _First | None,
    ) -> tuple[Weights, Float[Array, ""], tuple[_Sum, Log]]:
        """Return weights, loss, and (sum of gradients, log) after a microbatch.

        With `finish`, the sum is reduced over dp.
        """
        total, log = so_far
        at = dropout_key(key, micro)
        whole = self._whole(ends, first) if self.level == 3 else ends

        def start(embed: Params) -> Array:
            model = self._bind(whole | {"embed": embed}, weights.stacked)
            return model.start(micro["tokens"], micro["positions"], key=at)

        def loss(ends: Params, y: Array) -> Float[Array, ""]:
            return self._bind(ends, weights.stacked).loss(y, micro["targets"]) * scale

        x, pull_start = jax.vjp(start, whole["embed"])
        layers = self._layers(self._bind(whole, weights.stacked), micro, at)
        places = layers.places(x, weights)
        y, weights, kept = layers.forward(
            x, weights, places, first=first and first.layer
        )
        with jax.named_scope(scopes.phase("loss")):
            value, pull_loss = jax.vjp(loss, whole, y)
            d_ends, dy = pull_loss(jnp.ones_like(value))
        if layers.horizon is None:
            log, kept = mark_smallest(log, Place.FORWARD, kept)
        else:  # the residuals are on the host
            log, dy = mark_smallest(log, Place.FORWARD, dy)
        with jax.named_scope(scopes.phase("backward")):
            dx, blocks = layers.backward(
                dy, weights, kept, total and total.blocks, places, finish=finish
            )
            if finish:
                log, blocks = mark_smallest(log, Place.BACKWARD, blocks)
            (d_embed,) = pull_start(dx)
            d_ends["embed"] = jax.tree.map(
                lambda *parts: sum(part.astype(jnp.float32) for part in parts),
                *(d_ends["embed"], d_embed),
            )
            d_ends, specs = map(self.trained.of, (d_ends, self._end_specs))
            d_ends = zero.summand(d_ends, specs, level=self.level, dtype=self.reduce)
            if total is not None:
                d_ends = jax.tree.map(jnp.add, total.ends, d_ends)
            if finish:
                d_ends = zero.scatter(d_ends, specs, level=self.level)
                d_ends = zero.reduce_over(DP, d_ends, specs)
        return weights, value, (_Sum(d_ends, blocks), log)

    def _nll(self, params: Params, batch: Batch) -> Float[Array, ""]:
        weights, ends = self._weights(params, at_once=True)

        def nll(_: None, micro: Batch) -> tuple[None, Float[Array, ""]]:
            model, y = self._evaluate(weights, ends, micro)
            return None, model.loss(y, micro["targets"])

        _, sums = jax.lax.scan(nll, None, self.split(batch))
        return sums.sum()

    def _last_logits(
        self, params: Params, tokens: Int[Array, "B T"], length: Int[Array, ""]
    ) -> Float[Array, "B v"]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        weights, ends = self._weights(params, at_once=True)
        model, y = self._evaluate(
            weights, ends, {"tokens": tokens, "positions": positions}
        )
        return last_position(model.logits_of(y), length)

    def _evaluate(
        self, weights: Weights, ends: Params, micro: Batch
    ) -> tuple[Transformer, Float[Array, "B t D"]]:
        """Return the bound model and the output of the last block, without dropout."""
        whole = self._whole(ends) if self.level == 3 else ends
        model = self._bind(whole, weights.stacked)
        x = model.start(micro["tokens"], micro["positions"])
        y, *_ = self._layers(model, micro, None).forward(x, weights, None)
        return model, y

    def _weights(
        self, params: Params, *, at_once: bool = False, first: _First | None = None
    ) -> tuple[Weights, Params]:
        """Return the weights of the blocks, and the weights of embedding and head.

        At levels 0 to 2 embedding and head are gathered; the blocks too, with `at_once`
        or if they are not sharded. At level 3 this device's parts of embedding and head
        are returned, and of the blocks if they are sharded.
        """
        params = jax.tree.map(collectives.vary, params)
        ends = {name: p for name, p in params.items() if name != "blocks"}
        weights = Weights(params["blocks"], is_stored=True)
        has_parts = self.level > 0 and any(self.mesh.shape[axis] > 1 for axis in SHARDS)
        if (self.level < 3 and at_once) or not has_parts:
            copy = zero.gather(weights.stacked, self.specs["blocks"], self.compute)
            weights = Weights(copy, is_stored=False)
        return weights, ends if self.level == 3 else self._whole(ends, first)

    def _whole(self, ends: Params, first: _First | None = None) -> Params:
        def gather(name: str, gathered: Params | None = None) -> Params:
            return zero.gather(ends[name], self.specs[name], self.compute, gathered)

        return {
            name: gather(name, first and first.embed if name == "embed" else None)
            for name in ends
        }

    def _layers(
        self, model: Transformer, micro: Batch, key: DropoutKey | None
    ) -> OverlappedLayers:
        context = model.context(micro["positions"], micro.get("segments"))
        return OverlappedLayers(
            pattern=model.pattern(context, key=key),
            num_layers=model.config.layers,
            specs=self.specs["blocks"],
            trained=self.trained,
            level=self.level,
            compute=self.compute,
            reduce=self.reduce,
            horizon=model.config.loading_horizon,
        )
