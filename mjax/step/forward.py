"""Loss, gradients and logits of a batch, computed per device.

Input: stored parameters and a batch, as global arrays. Output: global results. Each
function is one `jax.shard_map` over all mesh axes. `Forward` is the common base of two
ways to run the layers: all on every device (`mjax.step.plain`), or stage by stage
(`mjax.step.pipelined`).
"""

import abc
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mjax.mesh import collectives
from mjax.mesh.axes import AXES, DP, TP
from mjax.mesh.ordering import in_order
from mjax.mesh.rules import BATCH_SPEC
from mjax.model.transformer import NO_TARGET, DropoutKey, Params, Transformer
from mjax.step import stamps
from mjax.step.stamps import LOG_SPEC, Log
from mjax.step.trained import ALL_TRAINED, Trained
from mjax.trace import scopes

Batch = dict[str, Int[Array, "B T"]]

First = Any
"""Gathered weights that a step uses first: arrays [devices, ...], one entry per device,
split over all mesh axes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward(abc.ABC):
    """The functions that take a batch, and the settings they share."""

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
    windows: tuple[int | None, ...]
    """Attention window of each layer."""
    trained: Trained = ALL_TRAINED
    """The parameters that have gradients."""
    stamps: bool = False
    """Whether each device records the time at which it reaches each place of a step."""

    def gradients(
        self, params: Params, rng: Array, step: Array, batch: Batch
    ) -> tuple[Float[Array, ""], Int[Array, ""], Params]:
        """Return mean loss (nats per target), number of targets, summed gradients.

        Gradients are laid out like the trained parameters.
        """
        return self.gradients_and_log(params, rng, step, batch)[:3]

    def gather_first(self, params: Params) -> First:
        """Gather the weights that a step uses first; this does not need the batch."""

        def per_device(params: Params) -> Any:
            first = self._gather_first(jax.tree.map(collectives.vary, params))
            return jax.tree.map(lambda x: x[None], first)

        return jax.shard_map(
            self._in_order(per_device),
            mesh=self.mesh,
            in_specs=(self.specs,),
            out_specs=PartitionSpec(AXES),
        )(params)

    def gradients_and_log(
        self,
        params: Params,
        rng: Array,
        step: Array,
        batch: Batch,
        first: First | None = None,
    ) -> tuple[Float[Array, ""], Int[Array, ""], Params, Log, Float[Array, ""]]:
        """Return the result of `gradients`, the log of stamps (None if off), and the
        visible pairs.

        The log holds the stamps of all devices, is sharded as `LOG_SPEC`, and has space
        for one more row. Visible pairs of query and key are those of all layers whose
        query has a target; FLOPs are counted from them. `first` is the result of
        `gather_first` for the same parameters; None gathers these weights here.
        """

        def per_device(
            params: Params, rng: Array, step: Array, batch: Batch, first: First | None
        ) -> tuple[Array, Array, Params, Log, Array]:
            log = None
            if self.stamps:
                log, tokens = stamps.begin(self._num_stamps + 1, batch["tokens"])
                batch = batch | {"tokens": tokens}
            key = jax.random.fold_in(jax.random.wrap_key_data(rng), step)
            num_targets = _count_targets(batch)
            num_pairs = _count_pairs(batch, self.windows)
            scale = 1.0 / jnp.maximum(num_targets, 1).astype(jnp.float32)
            first = jax.tree.map(lambda x: x[0], first)
            loss, grads, log = self._loss_and_gradients(
                params, key, scale, batch, log, first
            )
            with jax.named_scope(scopes.phase("loss")):
                loss = collectives.sum_over_mesh(loss)
            return loss, num_targets, grads, log, num_pairs

        everywhere = PartitionSpec()
        mapped = jax.shard_map(
            self._in_order(per_device),
            mesh=self.mesh,
            in_specs=(
                *(self.specs, everywhere, everywhere, BATCH_SPEC),
                PartitionSpec(AXES),
            ),
            out_specs=(
                *(everywhere, everywhere, self.trained.of(self.specs), LOG_SPEC),
                everywhere,
            ),
        )
        # The loss and the backward pass have their own scopes inside this one.
        with jax.named_scope(scopes.phase("forward")):
            return mapped(params, rng, step, batch, first)

    def evaluate(self, params: Params, batch: Batch) -> dict[str, Array]:
        """Sum the negative log-likelihood over the batch; see
        `step.program.Program`."""

        def per_device(params: Params, batch: Batch) -> tuple[Array, Array]:
            nll = self._nll(params, batch)
            return collectives.sum_over_mesh(nll), _count_targets(batch)

        everywhere = PartitionSpec()
        mapped = jax.shard_map(
            self._in_order(per_device),
            mesh=self.mesh,
            in_specs=(self.specs, BATCH_SPEC),
            out_specs=(everywhere, everywhere),
        )
        with jax.named_scope(scopes.phase("eval")):
            nll, tokens = mapped(params, batch)
        return {"nll": nll, "tokens": tokens}

    def next_token_logits(
        self, params: Params, tokens: Int[Array, "B T"], length: Int[Array, ""]
    ) -> Float[Array, "B V"]:
        """Return the logits that follow `length` tokens; see `step.program.Program`."""

        def per_device(params: Params, tokens: Array, length: Array) -> Array:
            logits = self._last_logits(params, tokens, length)
            return collectives.sum_over_stages(logits)

        return jax.shard_map(
            self._in_order(per_device),
            mesh=self.mesh,
            in_specs=(self.specs, BATCH_SPEC, PartitionSpec()),
            out_specs=PartitionSpec(DP, TP),
        )(params, tokens, length)

    @property
    @abc.abstractmethod
    def _num_stamps(self) -> int:
        """Number of rows that `gradients_and_log` appends to the log of stamps."""

    @abc.abstractmethod
    def _gather_first(self, params: Params) -> Any:
        """Per device: gather the weights that `_loss_and_gradients` uses first."""

    @abc.abstractmethod
    def _loss_and_gradients(
        self,
        params: Params,
        key: Array,
        scale: Float[Array, ""],
        batch: Batch,
        log: Log,
        first: Any | None,
    ) -> tuple[Float[Array, ""], Params, Log]:
        """Per device: return this device's part of scale x summed loss, the reduced
        gradients, and the log.

        `first` is the result of `_gather_first`, or None.
        """

    @abc.abstractmethod
    def _nll(self, params: Params, batch: Batch) -> Float[Array, ""]:
        """Per device: return this device's part of the summed loss."""

    @abc.abstractmethod
    def _last_logits(
        self, params: Params, tokens: Int[Array, "B T"], length: Int[Array, ""]
    ) -> Float[Array, "B v"]:
        """Per device: return the logits after `length` tokens; zeros except on one
        stage.
        """

    def _in_order[R](self, per_device: Callable[..., R]) -> Callable[..., R]:
        """Return the function; on simulated devices its collectives are ordered."""
        platform = self.mesh.abstract_mesh.abstract_device.platform
        is_simulated = platform == "cpu" and self.mesh.size > 1
        return in_order(per_device) if is_simulated else per_device

    def split(self, batch: Batch) -> dict[str, Int[Array, "M b T"]]:
        """Split this device's sequences into microbatches; drop unused segments.

        Adds the field "rows" [M, b, 1]: the index of each sequence in the global batch.
        """
        local_rows = batch["tokens"].shape[0]
        rows = collectives.batch_offset(local_rows) + jnp.arange(local_rows)
        fields = batch | {"rows": rows[:, None]}
        if not self.isolate_documents:
            del fields["segments"]
        m = self.microbatches
        return {name: x.reshape(m, -1, x.shape[1]) for name, x in fields.items()}

    @property
    def _end_specs(self) -> Params:
        """Return the specs of all parameters outside the blocks."""
        return {name: spec for name, spec in self.specs.items() if name != "blocks"}

    def _bind(self, ends: Params, layers: Params) -> Transformer:
        """Make a model; callers use the definition of its blocks, not their weights."""
        return nnx.merge(self.graph, ends | {"blocks": layers})


def dropout_key(key: Array, micro: Batch) -> DropoutKey:
    """Return the key of the dropout masks of a microbatch."""
    return DropoutKey(key=key, rows=micro["rows"][:, 0])


def last_position(
    logits: Float[Array, "B T v"], length: Int[Array, ""]
) -> Float[Array, "B v"]:
    """Return the logits after `length` tokens."""
    return jax.lax.dynamic_index_in_dim(logits, length - 1, 1, keepdims=False)


def _count_targets(batch: Batch) -> Int[Array, ""]:
    """Count the targets of the whole batch."""
    return collectives.sum_over_mesh((batch["targets"] != NO_TARGET).sum())


def _count_pairs(batch: Batch, windows: tuple[int | None, ...]) -> Float[Array, ""]:
    """Count the keys that the queries with a target see, over all layers and devices.

    The query at position p of a document sees p + 1 keys, or the window if that is
    less. The sum is in float32, because it exceeds the integers.
    """
    keys = batch["positions"] + 1
    has_target = batch["targets"] != NO_TARGET
    total = jnp.zeros((), jnp.float32)
    for window, num_layers in Counter(windows).items():
        seen = keys if window is None else jnp.minimum(keys, window)
        seen = jnp.where(has_target, seen, 0).astype(jnp.float32)
        total += num_layers * seen.sum()
    return collectives.sum_over_mesh(total)
