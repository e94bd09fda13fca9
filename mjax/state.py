"""The training state: what lives between steps, and how it is born sharded."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from mjax.mesh import rules
from mjax.mesh.axes import AxisSizes
from mjax.model import ModelConfig, Params, Transformer, map_params
from mjax.optim import GuardState, guard_init


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "rng", "params", "opt_state", "guard"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a step reads and writes, in the canonical layout."""

    step: Any
    """int32 scalar: optimizer steps taken, skipped ones included."""
    rng: Any
    """uint32 [2]: data of the key from which dropout masks are drawn."""
    params: Params
    """Stored (master) parameters; blocks stacked `[L, ...]` in layer order."""
    opt_state: Any
    """Optax state; moments are laid out and sharded like `params`."""
    guard: GuardState
    """Running mean of the gradient norm, and counts of skipped steps."""


def param_specs(abstract: Any, sizes: AxisSizes, *, shard_over_dp: bool) -> Params:
    """Place every stored parameter; see `mesh.rules.param_spec`."""

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
) -> TrainState:
    """Draw a new state from `seed`; pure, to be jitted with sharded outputs."""
    init_key, step_key = jax.random.split(jax.random.key(seed))
    model = Transformer(config, rngs=nnx.Rngs(params=init_key))
    params = nnx.to_pure_dict(nnx.state(model))
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        rng=jax.random.key_data(step_key),
        params=params,
        opt_state=optimizer.init(params),
        guard=guard_init(),
    )


def state_shardings(
    abstract: TrainState,
    specs: Params,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
) -> TrainState:
    """Place a state: moments like their parameters, everything else on all devices.

    Args:
      abstract: the state's shapes, as `jax.eval_shape` of `new_state` gives them.
      specs: PartitionSpecs of the parameters.
      optimizer: that made the state.
      mesh: to place it on.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    opt_state = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        abstract.opt_state,
        placed,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(
        step=everywhere,
        rng=everywhere,
        params=placed,
        opt_state=opt_state,
        guard=jax.tree.map(lambda _: everywhere, abstract.guard),
    )
