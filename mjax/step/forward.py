"""Loss, gradients and logits of a batch, computed per device.

Enters: stored parameters and a batch, as global arrays. Leaves: global results. Each
function is one `jax.shard_map` over all mesh axes. `Forward` has what all ways to go
through the layers share. `Plain` runs them all on every device: parameters are gathered
as the ZeRO level says, every microbatch adds to the gradients, and these are reduced
once. `mjax.step.pipelined` has the other way.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mjax.mesh import collectives, zero
from mjax.mesh.axes import DP, DP_SHARD, PP, TP
from mjax.mesh.rules import BATCH_SPEC
from mjax.model.transformer import NO_TARGET, DropoutKey, Params, Transformer
from mjax.step.prefetch import OverlappedLayers, Weights

Batch = dict[str, Int[Array, "B T"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward(abc.ABC):
    """The functions of a batch, and what they are about."""

    graph: Any
    """GraphDef of a Transformer."""
    specs: Params
    """PartitionSpecs of the stored parameters."""
    mesh: Mesh | AbstractMesh
    level: int
    """ZeRO level; see `mesh.zero`."""
    compute: DTypeLike
    """Dtype of activations and of the gathered parameters."""
    reduce: DTypeLike
    """Dtype in which gradients are accumulated and reduced."""
    microbatches: int
    isolate_documents: bool

    def gradients(
        self, params: Params, rng: Array, step: Array, batch: Batch
    ) -> tuple[Float[Array, ""], Int[Array, ""], Params]:
        """Return mean loss (nats per target), number of targets, summed gradients."""

        def per_device(
            params: Params, rng: Array, step: Array, batch: Batch
        ) -> tuple[Array, Array, Params]:
            key = jax.random.fold_in(jax.random.wrap_key_data(rng), step)
            num_targets = _count_targets(batch)
            scale = 1.0 / jnp.maximum(num_targets, 1).astype(jnp.float32)
            loss, grads = self._loss_and_gradients(params, key, scale, batch)
            return collectives.sum_over_mesh(loss), num_targets, grads

        everywhere = PartitionSpec()
        mapped = jax.shard_map(
            per_device,
            mesh=self.mesh,
            in_specs=(self.specs, everywhere, everywhere, BATCH_SPEC),
            out_specs=(everywhere, everywhere, self.specs),
        )
        return mapped(params, rng, step, batch)

    def evaluate(self, params: Params, batch: Batch) -> dict[str, Array]:
        """Sum the negative log-likelihood over the batch; see
        `step.program.Program`."""

        def per_device(params: Params, batch: Batch) -> tuple[Array, Array]:
            nll = self._nll(params, batch)
            return collectives.sum_over_mesh(nll), _count_targets(batch)

        everywhere = PartitionSpec()
        nll, tokens = jax.shard_map(
            per_device,
            mesh=self.mesh,
            in_specs=(self.specs, BATCH_SPEC),
            out_specs=(everywhere, everywhere),
        )(params, batch)
        return {"nll": nll, "tokens": tokens}

    def next_token_logits(
        self, params: Params, tokens: Int[Array, "B T"], length: Int[Array, ""]
    ) -> Float[Array, "B V"]:
        """Return the logits that follow `length` tokens; see `step.program.Program`."""

        def per_device(params: Params, tokens: Array, length: Array) -> Array:
            logits = self._last_logits(params, tokens, length)
            return collectives.sum_over_stages(logits)

        return jax.shard_map(
            per_device,
            mesh=self.mesh,
            in_specs=(self.specs, BATCH_SPEC, PartitionSpec()),
            out_specs=PartitionSpec(DP, TP),
        )(params, tokens, length)

    @abc.abstractmethod
    def _loss_and_gradients(
        self, params: Params, key: Array, scale: Float[Array, ""], batch: Batch
    ) -> tuple[Float[Array, ""], Params]:
        """Per device: this device's part of scale x summed loss; reduced gradients."""

    @abc.abstractmethod
    def _nll(self, params: Params, batch: Batch) -> Float[Array, ""]:
        """Per device: this device's part of the summed loss."""

    @abc.abstractmethod
    def _last_logits(
        self, params: Params, tokens: Int[Array, "B T"], length: Int[Array, ""]
    ) -> Float[Array, "B v"]:
        """Per device: the logits after `length` tokens; zeros on all stages but one."""

    def split(self, batch: Batch) -> dict[str, Int[Array, "M b T"]]:
        """Cut this device's rows into microbatches; drop segments if not used.

        Each gets "rows" [M, b, 1] beside its fields: the rows' numbers in the batch.
        """
        local_rows = batch["tokens"].shape[0]
        rows = collectives.batch_offset(local_rows) + jnp.arange(local_rows)
        fields = batch | {"rows": rows[:, None]}
        if not self.isolate_documents:
            del fields["segments"]
        m = self.microbatches
        return {name: x.reshape(m, -1, x.shape[1]) for name, x in fields.items()}


def dropout_key(key: Array, micro: Batch) -> DropoutKey:
    """Return where the dropout masks of a microbatch come from."""
    return DropoutKey(key=key, rows=micro["rows"][:, 0])


def last_position(
    logits: Float[Array, "B T v"], length: Int[Array, ""]
) -> Float[Array, "B v"]:
    """Return the logits after `length` tokens."""
    return jax.lax.dynamic_index_in_dim(logits, length - 1, 1, keepdims=False)


def _count_targets(batch: Batch) -> Int[Array, ""]:
    """Count the targets of the whole batch."""
    return collectives.sum_over_mesh((batch["targets"] != NO_TARGET).sum())


class _Sum(NamedTuple):
    """Gradients of the microbatches so far, as `zero.summand` makes them."""

    ends: Params
    blocks: Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain(Forward):
    """Every device runs all layers, on its part of the batch.

    Parameters are gathered in the first microbatch, gradients reduced in the last one
    (level 3: see `mesh.zero`), layer by layer; the ends, which are all but the blocks,
    before the first layer and after the last.
    """

    def _loss_and_gradients(
        self, params: Params, key: Array, scale: Float[Array, ""], batch: Batch
    ) -> tuple[Float[Array, ""], Params]:
        params = jax.tree.map(collectives.vary, params)
        micro = self.split(batch)

        def one(
            weights: Weights, ends: Params, total: _Sum | None, index: Any, last: bool
        ) -> tuple[Weights, Float[Array, ""], _Sum]:
            rows = jax.tree.map(lambda x: x[index], micro)
            # One after the other: nothing of a microbatch is made while another runs.
            rows, total = jax.lax.optimization_barrier((rows, total))
            return self._microbatch(weights, ends, total, rows, key, scale, finish=last)

        weights, ends = self._weights(params)
        final = self.microbatches - 1
        weights, value, total = one(weights, ends, None, 0, final == 0)
        if final > 1:

            def add(total: _Sum, index: Array) -> tuple[_Sum, Float[Array, ""]]:
                _, value, total = one(weights, ends, total, index, False)
                return total, value

            total, values = jax.lax.scan(add, total, jnp.arange(1, final))
            value += values.sum()
        if final > 0:
            _, last_value, total = one(weights, ends, total, final, True)
            value += last_value
        return value, zero.reduce_over(
            (PP, TP), total.ends | {"blocks": total.blocks}, self.specs
        )

    def _microbatch(
        self,
        weights: Weights,
        ends: Params,
        total: _Sum | None,
        micro: Batch,
        key: Array,
        scale: Float[Array, ""],
        *,
        finish: bool,
    ) -> tuple[Weights, Float[Array, ""], _Sum]:
        """Add the gradients of a microbatch; `finish`: reduce the sum over dp."""
        at = dropout_key(key, micro)
        whole = self._whole(ends) if self.level == 3 else ends

        def start(embed: Params) -> Array:
            model = self._bind(whole | {"embed": embed}, weights)
            return model.start(micro["tokens"], key=at)

        def loss(ends: Params, y: Array) -> Float[Array, ""]:
            return self._bind(ends, weights).loss(y, micro["targets"]) * scale

        x, pull_start = jax.vjp(start, whole["embed"])
        layers = self._layers(self._bind(whole, weights), micro, at)
        y, weights, kept = layers.forward(x, weights, keep=True)
        value, pull_loss = jax.vjp(loss, whole, y)
        d_ends, dy = pull_loss(jnp.ones_like(value))
        dx, blocks = layers.backward(
            dy, weights, kept, total and total.blocks, finish=finish
        )
        (d_embed,) = pull_start(dx)
        d_ends["embed"] = jax.tree.map(jnp.add, d_ends["embed"], d_embed)
        d_ends = zero.summand(
            d_ends, self._end_specs, level=self.level, dtype=self.reduce
        )
        if total is not None:
            d_ends = jax.tree.map(jnp.add, total.ends, d_ends)
        if finish:
            d_ends = zero.scatter(d_ends, self._end_specs, level=self.level)
            d_ends = zero.reduce_over(DP, d_ends, self._end_specs)
        return weights, value, _Sum(d_ends, blocks)

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
        """Return the bound model, and what leaves the last block; no dropout."""
        model = self._bind(self._whole(ends) if self.level == 3 else ends, weights)
        x = model.start(micro["tokens"])
        y, *_ = self._layers(model, micro, None).forward(x, weights, keep=False)
        return model, y

    def _weights(
        self, params: Params, *, at_once: bool = False
    ) -> tuple[Weights, Params]:
        """Return the blocks' weights, and the ends.

        Levels 0 to 2 have the compute copy of the ends, and that of the blocks too if
        it is wanted at once or there is nothing to gather; level 3 has the parts.
        """
        params = jax.tree.map(collectives.vary, params)
        ends = {name: p for name, p in params.items() if name != "blocks"}
        weights = Weights(params["blocks"], is_stored=True)
        has_parts = self.level > 0 and self.mesh.shape[DP_SHARD] > 1
        if (self.level < 3 and at_once) or not has_parts:
            copy = zero.gather(weights.stacked, self.specs["blocks"], self.compute)
            weights = Weights(copy, is_stored=False)
        return weights, ends if self.level == 3 else self._whole(ends)

    def _whole(self, ends: Params) -> Params:
        return zero.gather(ends, self._end_specs, self.compute)

    @property
    def _end_specs(self) -> Params:
        return {name: spec for name, spec in self.specs.items() if name != "blocks"}

    def _bind(self, ends: Params, weights: Weights) -> Transformer:
        """Make the model; of its blocks only what they are is used."""
        return nnx.merge(self.graph, ends | {"blocks": weights.stacked})

    def _layers(
        self, model: Transformer, micro: Batch, key: DropoutKey | None
    ) -> OverlappedLayers:
        context = model.context(micro["positions"], micro.get("segments"))
        return OverlappedLayers(
            pattern=model.pattern(context, key=key),
            num_layers=model.config.layers,
            specs=self.specs["blocks"],
            level=self.level,
            compute=self.compute,
            reduce=self.reduce,
        )
