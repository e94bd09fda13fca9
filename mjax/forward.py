"""Loss, gradients and logits of a batch, computed per device.

Enters: stored parameters and a batch, as global arrays. Leaves: global results. Each
function is one `jax.shard_map` over all mesh axes. `Forward` has what all ways to go
through the layers share. `Plain` runs them all on every device: parameters are gathered
as the ZeRO level says, every microbatch adds to the gradients, and these are reduced
once. `mjax.pipelined` has the other way.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mjax.mesh import collectives, zero
from mjax.mesh.axes import DP, TP
from mjax.mesh.rules import BATCH_SPEC
from mjax.model import NO_TARGET, DropoutKey, Params, Transformer

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
        """Sum the negative log-likelihood over the batch; see `step.Program`."""

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
        """Return the logits that follow `length` tokens; see `step.Program`."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain(Forward):
    """Every device runs all layers, on its part of the batch."""

    def _loss_and_gradients(
        self, params: Params, key: Array, scale: Float[Array, ""], batch: Batch
    ) -> tuple[Float[Array, ""], Params]:
        def loss(compute: Params, micro: Batch) -> Float[Array, ""]:
            model, materialise = self._model(compute)
            nll = model.nll(micro, key=dropout_key(key, micro), materialise=materialise)
            return nll * scale

        losses, grads = self._accumulate(loss, self._compute_copy(params), batch)
        grads = zero.reduce_gradients(
            grads, self.specs, level=self.level, dtype=self.reduce
        )
        return losses, grads

    def _nll(self, params: Params, batch: Batch) -> Float[Array, ""]:
        compute = self._compute_copy(params)

        def nll(_: None, micro: Batch) -> tuple[None, Float[Array, ""]]:
            model, materialise = self._model(compute)
            return None, model.nll(micro, materialise=materialise)

        _, sums = jax.lax.scan(nll, None, self.split(batch))
        return sums.sum()

    def _last_logits(
        self, params: Params, tokens: Int[Array, "B T"], length: Int[Array, ""]
    ) -> Float[Array, "B v"]:
        model, materialise = self._model(self._compute_copy(params))
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        logits = model.logits(tokens, positions, materialise=materialise)
        return last_position(logits, length)

    def _compute_copy(self, params: Params) -> Params:
        """Gather what the ZeRO level gathers at the start of a step."""
        masters = jax.tree.map(collectives.vary, params)
        if self.level == 3:
            return masters
        return zero.gather(masters, self.specs, self.compute)

    def _model(self, compute: Params) -> tuple[Transformer, Callable[[Params], Params]]:
        """Bind parameters to the model; level 3 gathers all but the blocks here."""
        if self.level != 3:
            return nnx.merge(self.graph, compute), lambda params: params

        def whole(params: Params, specs: Params) -> Params:
            return zero.gather_with_gradient(params, specs, self.compute, self.reduce)

        def one_layer(spec: PartitionSpec) -> PartitionSpec:
            return PartitionSpec(*spec[1:])

        layer_specs = jax.tree.map(one_layer, self.specs["blocks"])
        rest = {name: p for name, p in compute.items() if name != "blocks"}
        rest = whole(rest, {name: self.specs[name] for name in rest})
        model = nnx.merge(self.graph, rest | {"blocks": compute["blocks"]})
        return model, lambda params: whole(params, layer_specs)

    def _accumulate(
        self,
        loss: Callable[[Params, Batch], Float[Array, ""]],
        compute: Params,
        batch: Batch,
    ) -> tuple[Float[Array, ""], Params]:
        """Sum loss and gradients over microbatches; no reduction in the loop."""
        with_gradient = jax.value_and_grad(loss)
        micro = self.split(batch)
        if self.microbatches == 1:
            return with_gradient(compute, jax.tree.map(lambda x: x[0], micro))

        def add(total: Params, micro: Batch) -> tuple[Params, Float[Array, ""]]:
            value, grads = with_gradient(compute, micro)
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), value

        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, self.reduce), compute)
        grads, values = jax.lax.scan(add, zeros, micro)
        return values.sum(), grads
