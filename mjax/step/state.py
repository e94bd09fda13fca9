"""The training state: initialisation, and layout in a run and in checkpoints.

A run stores the layers in the slots of its `pipeline.partition`, and each stage holds
its own slots. A checkpoint holds the *canonical form*: the layers in order, without
empty slots. So it can be restored with any number of stages and virtual stages. Without
a pipeline the two forms are the same.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from mjax.hardware.xla_flags import for_collectives
from mjax.layers.config import AdapterConfig
from mjax.mesh import rules
from mjax.mesh.axes import PP, AxisSizes
from mjax.mesh.host_memory import is_on_host, on_host, to_device, to_host
from mjax.model.config import ModelConfig
from mjax.model.transformer import Params, Transformer, map_params
from mjax.pipeline.partition import Partition
from mjax.step.optim import GuardState, guard_init
from mjax.step.trained import ALL_TRAINED, Trained


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "rng", "params", "opt_state", "guard"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a step reads and writes."""

    step: Any
    """int32 scalar: optimizer steps taken, skipped ones included."""
    rng: Any
    """uint32 [2]: data of the key for dropout masks."""
    params: Params
    """Stored (master) parameters; those of the blocks stacked over the slots of the
    partition in a run, over the L layers in canonical form."""
    opt_state: Any
    """Optax state; moments are laid out and sharded like `params`."""
    guard: GuardState
    """Running mean of the gradient norm, and counts of skipped steps."""


def param_specs(abstract: Any, sizes: AxisSizes, *, shard_over_dp: bool) -> Params:
    """Return the spec of every stored parameter; see `mesh.rules.param_spec`."""

    def leaf(variable: nnx.Variable, stacked: bool) -> PartitionSpec:
        logical = ("layers",) * stacked + variable.get_metadata()["logical"]
        return rules.param_spec(
            variable.shape, logical, sizes, shard_over_dp=shard_over_dp
        )

    return map_params(leaf, abstract)


def new_state(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    seed: jax.Array,
    dtype: DTypeLike,
    partition: Partition,
    *,
    adapters: AdapterConfig | None = None,
    trained: Trained = ALL_TRAINED,
    frozen_dtype: DTypeLike = jnp.float32,
) -> TrainState:
    """Draw a new state from `seed`. Pure: jit it with sharded outputs.

    A layer has the same values in every partition. Parameters that are not trained have
    `frozen_dtype` and no optimizer state.
    """
    init_key, step_key = jax.random.split(jax.random.key(seed))
    model = Transformer(
        config,
        rngs=nnx.Rngs(params=init_key),
        partition=partition,
        adapters=adapters,
    )
    params = nnx.to_pure_dict(nnx.state(model))
    of_optimizer = jax.tree.map(lambda p: p.astype(dtype), trained.of(params))
    params = trained.put(
        of_optimizer, jax.tree.map(lambda p: p.astype(frozen_dtype), params)
    )
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        rng=jax.random.key_data(step_key),
        params=params,
        opt_state=optimizer.init(of_optimizer),
        guard=guard_init(),
    )


def moments_on_host(
    abstract: TrainState, optimizer: optax.GradientTransformation, is_on_host: bool
) -> TrainState:
    """Return a tree of booleans: whether each leaf of the state is in host memory.

    Args:
      abstract: the state's shapes.
      optimizer: the optimizer that made `opt_state`.
      is_on_host: whether the moments are in host memory; other leaves never are.
    """
    nothing = jax.tree.map(lambda _: False, abstract)
    moments = optax.tree.map_params(
        optimizer,
        lambda _: is_on_host,
        abstract.opt_state,
        transform_non_params=lambda _: False,
    )
    return dataclasses.replace(nothing, opt_state=moments)


def state_shardings(
    abstract: TrainState,
    specs: Params,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    trained: Trained = ALL_TRAINED,
    in_host_memory: TrainState | None = None,
) -> TrainState:
    """Return a state's shardings: moments as their parameters, the rest replicated.

    Args:
      abstract: the state's shapes, as `jax.eval_shape` of `new_state` gives them.
      specs: PartitionSpecs of the parameters.
      optimizer: the optimizer that made `opt_state`.
      mesh: mesh of the run.
      trained: the parameters that have an optimizer state.
      in_host_memory: result of `moments_on_host`; None: no leaf is in host memory.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    opt_state = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        abstract.opt_state,
        trained.of(placed),
        transform_non_params=lambda _: everywhere,
    )
    shardings = TrainState(
        step=everywhere,
        rng=everywhere,
        params=placed,
        opt_state=opt_state,
        guard=jax.tree.map(lambda _: everywhere, abstract.guard),
    )
    if in_host_memory is None:
        return shardings
    return jax.tree.map(
        lambda s, is_: on_host(s) if is_ else s, shardings, in_host_memory
    )


# ---------------------------------------------------------------------- canonical form


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedForm:
    """The canonical form on a mesh, and the conversions to and from it."""

    abstract: TrainState
    """Shapes, dtypes and shardings."""
    of_run: Callable[[Any], Any]
    """Convert a state of a run to canonical form; jitted. Leaves outside the blocks do
    not change. If the partition is canonical, nothing changes."""
    to_run: Callable[[Any], Any]
    """Convert a state from canonical form to the form of a run; jitted."""


def saved_form(
    abstract: TrainState, partition: Partition, mesh: Mesh | AbstractMesh
) -> SavedForm:
    """Describe the canonical form of a state that lives on `mesh`.

    Stages may differ in their number of layers. So in canonical form pp splits another
    dim of each leaf. One all-to-all over pp converts a leaf, and each device then
    orders the layers of its part. The canonical form takes as much memory per device as
    the state. A device holds both forms for a short time between two steps, when no
    activations are alive.

    Args:
      abstract: shapes, dtypes and shardings of the state in the run's layout.
      partition: partition of the run.
      mesh: mesh of the run.
    """
    if partition.is_canonical:
        return SavedForm(abstract=abstract, of_run=lambda s: s, to_run=lambda s: s)
    leaves = jax.tree.leaves(abstract)
    stored = [leaves[place] for place in _places_of_blocks(abstract)]
    dims = [_dim_for_stages(leaf, partition.num_stages) for leaf in stored]
    saved = [
        _saved_leaf(leaf, dim, partition)
        for leaf, dim in zip(stored, dims, strict=True)
    ]

    def order(x: Array, dim: int | None) -> Array:
        return _layers_of(_all_slots(x, dim), partition)

    def disperse(x: Array, dim: int | None) -> Array:
        return _own_slots(_slots_of(x, partition), dim)

    def jitted(f: Callable[..., Array], source: Any, target: Any) -> Any:
        specs = [[leaf.sharding.spec for leaf in form] for form in (source, target)]
        one_by_one = functools.partial(_one_by_one, f, dims)
        return jax.jit(
            jax.shard_map(
                one_by_one, mesh=mesh, in_specs=(specs[0],), out_specs=specs[1]
            ),
            compiler_options=for_collectives(mesh),
        )

    return SavedForm(
        abstract=_on_blocks(lambda _: saved, abstract),
        of_run=functools.partial(_on_blocks, jitted(order, stored, saved)),
        to_run=functools.partial(_on_blocks, jitted(disperse, saved, stored)),
    )


def _one_by_one(
    f: Callable[[Array, int | None], Array],
    dims: list[int | None],
    leaves: list[Array],
) -> list[Array]:
    """Map f over the leaves, one after the other.

    Without this order the compiler would send all leaves first and hold all results. A
    leaf in host memory is copied to the device for f, and back.
    """
    done: list[Array] = []
    for x, dim in zip(leaves, dims, strict=True):
        if done:
            x, done[-1] = lax.optimization_barrier((x, done[-1]))
        y = f(to_device(x), dim)
        done.append(to_host(y) if is_on_host(x) else y)
    return done


def _on_blocks(f: Callable[[list[Any]], list[Any]], tree: Any) -> Any:
    """Replace the list of leaves of the blocks by the result of f for that list."""
    leaves, structure = jax.tree.flatten(tree)
    places = _places_of_blocks(tree)
    replaced = f([leaves[place] for place in places])
    for place, leaf in zip(places, replaced, strict=True):
        leaves[place] = leaf
    return jax.tree.unflatten(structure, leaves)


def _places_of_blocks(tree: Any) -> list[int]:
    """Return the positions in the flat tree of the leaves below "blocks"."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    blocks = jax.tree_util.DictKey("blocks")
    return [place for place, path in enumerate(paths) if blocks in path]


def _layers_of(
    x: Shaped[Array, "slots *dims"], partition: Partition
) -> Shaped[Array, "L *dims"]:
    """Take the layers from their slots, in order."""
    return x if partition.is_canonical else x[partition.slot_of_layer]


def _slots_of(
    x: Shaped[Array, "L *dims"], partition: Partition
) -> Shaped[Array, "slots *dims"]:
    """Put the layers into their slots, and zeros into empty slots."""
    if partition.is_canonical:
        return x
    # EMPTY (-1) does not index from the end here: it is out of bounds and filled.
    slots = x.at[partition.layer_of_slot]
    return slots.get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _dim_for_stages(leaf: jax.ShapeDtypeStruct, num_stages: int) -> int | None:
    """Choose the dim that pp splits in canonical form; None if pp divides no dim.

    The largest dim on a device gives the longest contiguous pieces to send and write.
    """
    local = leaf.sharding.shard_shape(leaf.shape)
    fits = [dim for dim in range(1, len(local)) if local[dim] % num_stages == 0]
    return max(fits, key=lambda dim: local[dim], default=None)


def _saved_leaf(
    leaf: jax.ShapeDtypeStruct, dim: int | None, partition: Partition
) -> jax.ShapeDtypeStruct:
    """Describe a leaf in canonical form: pp is moved from dim 0 to `dim`.

    On that dim, pp comes after the axes that already split it, as in `_all_slots`.
    """
    entries: list[Any] = [None, *leaf.sharding.spec[1:]]
    if dim is not None:
        there = entries[dim] or ()
        entries[dim] = (*((there,) if isinstance(there, str) else there), PP)
    return jax.ShapeDtypeStruct(
        (partition.num_layers, *leaf.shape[1:]),
        leaf.dtype,
        sharding=leaf.sharding.update(spec=PartitionSpec(*entries)),
    )


def _all_slots(x: Array, dim: int | None) -> Array:
    """Per device: gather all slots, each with a part of `dim` (whole if it is None)."""
    if dim is None:
        return lax.all_gather(x, PP, axis=0, tiled=True, to="invarying")
    return lax.all_to_all(x, PP, split_axis=dim, concat_axis=0, tiled=True)


def _own_slots(x: Array, dim: int | None) -> Array:
    """Per device: the inverse of `_all_slots`."""
    if dim is None:
        size = x.shape[0] // lax.axis_size(PP)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(PP) * size, size)
    return lax.all_to_all(x, PP, split_axis=0, concat_axis=dim, tiled=True)
