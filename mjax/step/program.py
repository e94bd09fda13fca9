"""One training step as a pure function of state and batch.

The gradients come from one `jax.shard_map` over all mesh axes (`Forward` of
`mjax.step.plain` or `mjax.step.pipelined`). The optimizer runs in the same jit
outside the shard_map, on the global sharded arrays, so that norms (clipping, trust
ratios) are global by construction.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, CombineConfig, PrecisionConfig
from mjax.hardware.combining import Thresholds, Weight, choose_thresholds
from mjax.hardware.fp8 import describe_fp8
from mjax.hardware.xla_flags import Chosen, choose
from mjax.layers.config import AdapterConfig
from mjax.mesh.axes import AXES, TP, AxisSizes
from mjax.mesh.collectives import sum_over_mesh
from mjax.mesh.host_memory import check_host_memory, is_on_host, to_device, to_host
from mjax.mesh.rules import BATCH_SPEC, dim_of
from mjax.model.config import ModelConfig
from mjax.model.transformer import Params, abstract_params, map_params
from mjax.pipeline.config import PipelineConfig
from mjax.pipeline.make import Pipeline, make_pipeline
from mjax.step import optim
from mjax.step.forward import Batch, First, Forward
from mjax.step.host_state import HostUpdate
from mjax.step.pipelined import Pipelined
from mjax.step.plain import Plain
from mjax.step.replicas import Corruption, make_find_corruption
from mjax.step.stamps import LOG_SPEC, Place, mark_global
from mjax.step.state import (
    TrainState,
    moments_on_host,
    new_state,
    param_specs,
    saved_form,
    state_shardings,
)
from mjax.step.trained import Trained
from mjax.trace import scopes

Metrics = dict[str, Array]
Gradients = tuple[Float[Array, ""], Int[Array, ""], Params]
"""Mean loss in nats per target, number of targets, gradients laid out like the trained
parameters."""

METRICS = ("loss", "grad_norm", "lr", "tokens", "visible_pairs", "skipped")
"""Names of the numbers that a step returns."""
BATCH_FIELDS = ("tokens", "targets", "segments", "positions")
"""Names of the arrays of a batch."""


@runtime_checkable
class Jitted[**P, R](Protocol):
    """A jitted function with parameters P and result R."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function, compiled at its first call."""
        ...

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower the function for arguments or for their types."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """The functions of a run, each compiled once, and their argument shardings."""

    mesh: Mesh | AbstractMesh
    xla_options: Chosen
    """Compiler options of the functions that compute the model or its gradients."""
    pipeline: Pipeline | None
    """The pipeline of the step; None with one stage of one virtual stage."""
    abstract_state: TrainState
    """Shapes, dtypes and shardings of the state."""
    on_host: TrainState
    """True for each leaf of the state that is in pinned host memory between steps."""
    host_update: HostUpdate | None
    """The update if the moments are in host memory, otherwise None."""
    trained: Trained
    """The parameters that have gradients and optimizer state."""
    abstract_saved: TrainState
    """Shapes, dtypes and shardings of the state in the canonical form of checkpoints;
    see `state.saved_form`."""
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    """Shapes, dtypes and shardings of a batch."""
    batch_sharding: NamedSharding
    """Sharding of `[B, T]` arrays: B over dp, T not split."""
    init: Callable[[], TrainState]
    """Make the sharded state of step 0. Each device only ever holds its own shards."""
    to_saved: Callable[[TrainState], TrainState]
    """Convert a state to canonical form; the identity if it is always canonical."""
    from_saved: Callable[[TrainState], TrainState]
    """The inverse of `to_saved`."""
    gradients: Jitted[[Params, Array, Array, Batch], Gradients]
    """(params, rng, step, batch) -> loss, targets and gradients, with or without a
    pipeline."""
    is_finite: Jitted[[TrainState], Bool[Array, ""]]
    """Return whether all floats of a state are finite."""
    find_corruption: Callable[[TrainState], Corruption | None] | None
    """Compare the replicas of a state; None if dp_replicate has size 1."""
    gather_first: Callable[[Params], First] | None
    """Gather the weights that a step uses first; jitted or compiled. None if the step
    itself gathers all its weights."""
    abstract_first: First | None
    """Shapes, dtypes and shardings of the result of `gather_first`."""
    train_step: Callable[..., tuple[TrainState, Metrics]]
    """(state, batch) -> (state, metrics); jitted or compiled; donates the state. With
    `gather_first`, the arguments are (state, batch, first)."""
    eval_step: Jitted[[Params, Batch], Metrics]
    """(params, batch) -> summed nats `nll` and number of targets `tokens`."""
    next_token_logits: Jitted[[Params, ArrayLike, ArrayLike], Float[Array, "B V"]]
    """(params, tokens [B, T], length) -> float32 [B, V]: logits of the token after the
    first `length` tokens; B is a multiple of dp."""

    @property
    def abstract_args(self) -> tuple[Any, ...]:
        """Shapes, dtypes and shardings of the arguments of the training step."""
        first = () if self.gather_first is None else (self.abstract_first,)
        return self.abstract_state, self.abstract_batch, *first

    def trace(self) -> jax.stages.Traced:
        """Trace the training step; do not compile it."""
        step = cast(jax.stages.Wrapped, self.train_step)
        return step.trace(*self.abstract_args)


def build_program(
    *,
    model: ModelConfig,
    optimizer: OptimConfig,
    batch: BatchConfig,
    precision: PrecisionConfig,
    combine: CombineConfig | None = None,
    seq_len: int,
    num_steps: int,
    seed: int,
    zero_level: int,
    isolate_documents: bool,
    mesh: Mesh | AbstractMesh,
    pipeline: PipelineConfig | None = None,
    tp_chunks: int = 1,
    stamps: bool = False,
    adapters: AdapterConfig | None = None,
    frozen_dtype: DTypeLike = jnp.float32,
    gather_first: bool = False,
) -> Program:
    """Build the run's functions; compile none of them and allocate no array.

    Args:
      model: the architecture.
      optimizer: the optimizer and its schedule.
      batch: global batch and microbatches.
      precision: dtypes.
      combine: size limits of combined collectives; None chooses them.
      seq_len: T.
      num_steps: steps of the whole run, for the schedule.
      seed: seed of initialisation and dropout.
      zero_level: 0 to 3, see `mesh.zero`.
      isolate_documents: restrict attention to each document of a packed sequence. False
        ignores the segments of a batch; more attention backends support False.
      mesh: mesh with all axes of `mesh.axes.AXES`.
      pipeline: settings of the pipeline; None uses the defaults.
      tp_chunks: chunks of the sequence in tensor-parallel communication, as
        `mesh.axes.tp_chunks` returns.
      stamps: add `stamps` to the metrics of a step, int32 [devices * rows, 2]: the
        times at which each device reached the places of `step.stamps`.
      adapters: adapters of the blocks; only these are trained. None trains all
        parameters.
      frozen_dtype: dtype of stored parameters that are not trained.
      gather_first: gather the embedding and the first layer in a separate call, which
        does not need the batch.
    Raises:
      ValueError: the pipeline or the schedule does not fit, a dim cannot be split, the
        GPUs have no FP8 matmuls, or the devices cannot access pinned host memory.
      NotImplementedError: adapters in a pipeline.
    """
    in_fp8 = precision.matmul == "fp8"
    if in_fp8:
        describe_fp8(mesh)  # refuses GPUs without FP8 matmuls
    if model.remat == "offload":
        check_host_memory(mesh, "--model.remat offload", "use --model.remat full")
    sizes = AxisSizes(**{axis: mesh.shape[axis] for axis in AXES})
    platform = mesh.abstract_mesh.abstract_device.platform
    stages = make_pipeline(
        pipeline or PipelineConfig(),
        num_layers=model.layers,
        period=model.pattern_length,
        num_stages=sizes.pp,
        num_microbatches=batch.microbatches,
        platform=platform,
        permutes=tp_chunks > 1,
    )
    partition = stages.partition
    is_pipeline = sizes.pp * partition.num_chunks > 1
    if is_pipeline and adapters is not None:
        raise NotImplementedError(
            f"adapters need one stage with one virtual stage, got {sizes.pp} stages "
            f"with {partition.num_chunks} virtual stages each"
        )
    trained = Trained(adapters_only=adapters is not None)
    graph, abstract = abstract_params(model, partition, tp_chunks, adapters, in_fp8)
    specs = param_specs(abstract, sizes, shard_over_dp=zero_level >= 1)
    kinds: dict[str, Any] = {
        "stacked": trained.of(map_params(lambda _, stacked: stacked, abstract)),
        "decayed": trained.of(
            map_params(lambda v, _: v.get_metadata()["decay"], abstract)
        ),
    }
    tx = optim.build_optimizer(optimizer, num_steps=num_steps, **kinds)
    host_update = None
    if optimizer.state_memory == "host":
        check_host_memory(
            *(mesh, "--optim.state-memory host", "use --optim.state-memory device")
        )
        host_update = HostUpdate(
            config=optimizer, num_steps=num_steps, num_stages=sizes.pp, **kinds
        )

    def make_state(seed: jax.Array) -> TrainState:
        return new_state(
            *(model, tx, seed, precision.params, partition),
            adapters=adapters,
            trained=trained,
            frozen_dtype=precision.params if adapters is None else frozen_dtype,
        )

    shapes = jax.eval_shape(make_state, jnp.uint32(0))
    on_host = moments_on_host(shapes, tx, host_update is not None)
    shardings = state_shardings(shapes, specs, tx, mesh, trained, on_host)
    abstract_state = jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    saved = saved_form(abstract_state, partition, mesh)
    batch_sharding = NamedSharding(mesh, BATCH_SPEC)
    row = jax.ShapeDtypeStruct(
        (batch.size, seq_len), jnp.int32, sharding=batch_sharding
    )
    make_state = jax.jit(make_state, out_shardings=shardings)
    make_forward = partial(Pipelined, pipeline=stages) if is_pipeline else Plain
    forward = make_forward(
        graph=graph,
        specs=specs,
        mesh=mesh,
        level=zero_level,
        compute=precision.compute,
        reduce=precision.reduce,
        microbatches=batch.microbatches,
        isolate_documents=isolate_documents,
        windows=tuple(kind.window for kind in model.kinds),
        trained=trained,
        stamps=stamps,
    )
    thresholds = _thresholds(
        shapes.params["blocks"],
        specs["blocks"],
        trained=trained,
        sizes=sizes,
        precision=precision,
        level=zero_level,
        is_pipeline=is_pipeline,
        combine=combine or CombineConfig(),
    )
    chosen = choose(mesh, tp_chunks=tp_chunks, thresholds=thresholds)
    options = chosen.as_compiler_options()
    gather, first = None, None
    if gather_first:
        of_each_device = NamedSharding(mesh, PartitionSpec(AXES))
        gather = jax.jit(
            forward.gather_first,
            out_shardings=of_each_device,
            compiler_options=options,
        )
        first = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of_each_device),
            jax.eval_shape(forward.gather_first, abstract_state.params),
        )
    return Program(
        mesh=mesh,
        xla_options=chosen,
        pipeline=stages if is_pipeline else None,
        abstract_state=abstract_state,
        on_host=on_host,
        host_update=host_update,
        trained=trained,
        abstract_saved=saved.abstract,
        abstract_batch=dict.fromkeys(BATCH_FIELDS, row),
        batch_sharding=batch_sharding,
        init=lambda: make_state(jnp.uint32(seed)),
        to_saved=saved.of_run,
        from_saved=saved.to_run,
        gradients=jax.jit(forward.gradients, compiler_options=options),
        is_finite=jax.jit(_make_is_finite(shardings, mesh)),
        find_corruption=make_find_corruption(shardings, mesh),
        gather_first=gather,
        abstract_first=first,
        train_step=jax.jit(
            _make_train_step(forward, tx, host_update, optimizer, num_steps, on_host),
            donate_argnums=0,
            out_shardings=(shardings, _metric_shardings(shardings.step, mesh, stamps)),
            compiler_options=options,
        ),
        eval_step=jax.jit(forward.evaluate, compiler_options=options),
        next_token_logits=jax.jit(forward.next_token_logits, compiler_options=options),
    )


def _thresholds(
    blocks: Params,
    specs: Params,
    *,
    trained: Trained,
    sizes: AxisSizes,
    precision: PrecisionConfig,
    level: int,
    is_pipeline: bool,
    combine: CombineConfig,
) -> Thresholds:
    """Return size limits of combined collectives: the user's, or by a layer's size."""

    def weight(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> Weight:
        size = math.prod(leaf.shape[1:])  # dim 0 is the layers
        split = 1 if dim_of(spec, TP) is None else sizes.tp
        return Weight(size=size // split, is_matrix=leaf.ndim > 2)

    def weights(blocks: Params, specs: Params) -> list[Weight]:
        return jax.tree.leaves(jax.tree.map(weight, blocks, specs))

    return choose_thresholds(
        weights(blocks, specs),
        weights(trained.of(blocks), trained.of(specs)),
        gather_bytes=combine.gather_bytes,
        reduce_bytes=combine.reduce_bytes,
        gather_itemsize=np.dtype(precision.compute).itemsize,
        reduce_itemsize=np.dtype(precision.reduce).itemsize,
        level=level,
        shards=sizes.shards,
        shards_per_node=sizes.dp_shard,
        is_pipeline=is_pipeline,
    )


def _metric_shardings(
    everywhere: NamedSharding, mesh: Mesh | AbstractMesh, stamps: bool
) -> NamedSharding | dict[str, NamedSharding]:
    """Return the shardings of the metrics: replicated, except each device's stamps."""
    if not stamps:
        return everywhere
    named = dict.fromkeys(METRICS, everywhere)
    return named | {"stamps": NamedSharding(mesh, LOG_SPEC)}


def _make_is_finite(
    shardings: TrainState, mesh: Mesh | AbstractMesh
) -> Callable[[TrainState], Bool[Array, ""]]:
    """Return a jittable check that all floats of a state are finite.

    Each device checks its own floats; one number is all-reduced.
    """

    def num_bad(state: TrainState) -> Array:  # per device
        leaves = jax.tree.leaves(state)
        leaves = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        num = jnp.zeros((), jnp.int32)
        for x in leaves:
            if is_on_host(x):  # copy leaves to the device one at a time
                x, num = jax.lax.optimization_barrier((x, num))
            num += jnp.any(~jnp.isfinite(to_device(x))).astype(jnp.int32)
        return sum_over_mesh(num)

    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    counted = jax.shard_map(
        num_bad, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec()
    )
    return lambda state: counted(state) == 0


def _make_train_step(
    forward: Forward,
    tx: optax.GradientTransformationExtraArgs,
    host_update: HostUpdate | None,
    config: OptimConfig,
    num_steps: int,
    on_host: TrainState,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Return the function of a step: gradients, guard and optimizer."""

    def update(
        accept: Array, norm: Array, grads: Params, opt_state: Any, params: Params
    ) -> tuple[Params, Any]:
        if host_update is not None:
            return host_update(accept, norm, grads, opt_state, params)
        updates, after = tx.update(grads, opt_state, params, norm=norm)
        new = optax.apply_updates(params, updates), after
        return optim.select(accept, new, (params, opt_state))

    def train_step(
        state: TrainState, batch: Batch, first: First | None = None
    ) -> tuple[TrainState, Metrics]:
        # jax drops the memory kind of described devices, so it is set again here.
        state = jax.tree.map(lambda x, is_: to_host(x) if is_ else x, state, on_host)
        loss, tokens, grads, log, pairs = forward.gradients_and_log(
            state.params, state.rng, state.step, batch, first
        )
        with jax.named_scope(scopes.phase("grad_norm")):
            grad_norm = optax.tree.norm(
                jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            )
        with jax.named_scope(scopes.phase("optimizer")):
            accept, guard = optim.guard_check(config, state.guard, loss, grad_norm)
            # One fused kernel makes these outputs. Marking only some would split it.
            scalars = grad_norm, accept, guard
            log, scalars = mark_global(log, scalars, Place.NORM, forward.mesh)
            grad_norm, accept, guard = scalars
            lr = optim.current_learning_rate(state.opt_state, config, num_steps)
            before = forward.trained.of(state.params)
            norm = optim.norm_to_clip(config, grads, grad_norm)
            params, opt_state = update(accept, norm, grads, state.opt_state, before)
            params = forward.trained.put(params, state.params)
            step = state.step + 1
            skipped = 1 - accept.astype(jnp.int32)
        new = TrainState(
            step=step,
            rng=state.rng,
            params=params,
            opt_state=opt_state,
            guard=guard,
        )
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": tokens,
            "visible_pairs": pairs,
            "skipped": skipped,
        }
        return new, metrics if log is None else metrics | {"stamps": log}

    return train_step
