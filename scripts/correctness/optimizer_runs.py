"""Runs of the optimizer on given gradients, and the same runs by the paper's LAMB.

The tests of the optimizer and `scripts.correctness.optimizer_accuracy` compare them.
Parameters are a tree with stacked layers [L, ...] and tensors that are not stacked;
gradients have the steps in front: [steps, ...].
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from mjax.config.optim import OptimConfig
from mjax.step import optim
from scripts.correctness.lamb_numpy import LambLayer

NUM_STEPS = 50
NUM_LAYERS = 3
LAMB = OptimConfig(name="lamb", lr=0.01, warmup_steps=5, clip_norm=None)
ADAMW = dataclasses.replace(LAMB, name="adamw")
CLIP_NORM = 0.5
"""Below the norm of about half of the gradients."""
STACKED = {
    "block": {"kernel": True, "scale": True, "bias": True},
    "embed": False,
    "norm": {"scale": False},
}
DECAYED = {
    "block": {"kernel": True, "scale": False, "bias": False},
    "embed": True,
    "norm": {"scale": False},
}
SPECS = {
    "block": {
        "kernel": P(None, "dp_shard", "tp"),
        "scale": P(None, "dp_shard"),
        "bias": P(None, ("dp_shard", "tp")),
    },
    "embed": P("tp", "dp_shard"),
    "norm": {"scale": P("dp_shard")},
}

# Float32 rounds a parameter by at most 6e-8 of itself at each step. Over 50 steps the
# roundings walk randomly to about 2e-7; the bound leaves room for a factor of five
# and is 1e-4 of what one wrong trust ratio does (see `optax_lamb`).
TOLERANCE = 1e-6
# Optax rounds beta2 to float32 before it takes 1 - beta2^t: with beta2 0.999 the first
# bias correction is off by up to 3e-8 / (1 - 0.999) = 3e-5, its root by half of that. A
# bias that starts at zero keeps the error of its first steps.
TOLERANCE_LARGE_BETA2 = 1e-5
# Without the rounding of float32 only the formula is left: 50 steps of 1e-16 each,
# amplified by at most the 1 / (1 - beta2) = 20 of the first bias corrections.
TOLERANCE_FLOAT64 = 1e-12


def make_params(dtype: DTypeLike = np.float32) -> Any:
    """Draw layers of different scales, so that one ratio cannot serve for all."""
    rng = np.random.default_rng(0)
    layer_scale = 10.0 ** np.arange(NUM_LAYERS)[:, None, None] * 0.02
    params = {
        "block": {
            "kernel": rng.normal(size=(NUM_LAYERS, 16, 24)) * layer_scale,
            "scale": np.ones((NUM_LAYERS, 16)),
            "bias": np.zeros((NUM_LAYERS, 24)),
        },
        "embed": rng.normal(size=(40, 16)),
        "norm": {"scale": np.ones(16)},
    }
    return jax.tree.map(lambda x: x.astype(dtype), params)


def make_gradients(params: Any, num_steps: int = NUM_STEPS) -> Any:
    """Draw noise around a constant, with a norm that varies by a factor of 100.

    Stacked over the steps, so that `run` is one call.
    """
    rng = np.random.default_rng(1)
    size = 10.0 ** rng.uniform(-3, -1, size=num_steps)

    def leaf(x: Any) -> Any:
        noisy = rng.normal(size=x.shape) + rng.normal(size=(num_steps, *x.shape))
        return (noisy * size.reshape(-1, *[1] * x.ndim)).astype(x.dtype)

    return jax.tree.map(leaf, params)


def at(gradients: Any, step: int) -> Any:
    """Return the gradients of one step, counted from 0."""
    return jax.tree.map(lambda g: g[step], gradients)


def build(config: OptimConfig, **changed: Any) -> Any:
    """Build the optimizer.

    Any: Optax types its states so widely that no field of one can be read.
    """
    trees = {"stacked": STACKED, "decayed": DECAYED} | changed
    return optim.build_optimizer(config, num_steps=NUM_STEPS, **trees)


def optax_lamb() -> Any:
    """Return Optax's LAMB, which has one trust ratio for a stack of layers."""
    return optax.lamb(
        optim.learning_rate(LAMB, NUM_STEPS),
        LAMB.beta1,
        LAMB.beta2,
        LAMB.eps,
        weight_decay=LAMB.weight_decay,
        mask=DECAYED,
    )


def optax_adamw() -> Any:
    """Return Optax's AdamW."""
    return optax.adamw(
        optim.learning_rate(ADAMW, NUM_STEPS),
        ADAMW.beta1,
        ADAMW.beta2,
        ADAMW.eps,
        weight_decay=ADAMW.weight_decay,
        mask=DECAYED,
    )


def run(optimizer: Any, params: Any, gradients: Any, mesh: Mesh | None = None) -> Any:
    """Return the parameters after all gradients; the update is jitted as in training.

    Args:
      optimizer: an Optax transformation.
      params: before the first step.
      gradients: of all steps.
      mesh: with the axes of `SPECS`, over which both are sharded; None for one device.
    """

    def update(state: Any, grads: Any) -> tuple[Any, None]:
        params, opt_state = state
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    if mesh is not None:
        params = jax.device_put(params, shardings(mesh))
        gradients = jax.device_put(gradients, shardings(mesh, None))
    state = params, optimizer.init(params)
    (params, _), _ = jax.jit(lambda s, g: jax.lax.scan(update, s, g))(state, gradients)
    return params


def run_unstacked(params: Any, gradients: Any) -> Any:
    """Return the parameters after LAMB on separate layers, stacked at the end."""
    separate = _repeat(DECAYED)
    optimizer = build(
        LAMB, stacked=jax.tree.map(lambda _: False, separate), decayed=separate
    )
    after = run(optimizer, _split_layers(params), _split_layers(gradients, axis=1))
    return join_layers(after)


def run_sharded(config: OptimConfig, params: Any, gradients: Any) -> tuple[Any, Mesh]:
    """Return the parameters after a run on 8 devices, dp_shard 4 x tp 2, and the mesh.

    Gradients are clipped at `CLIP_NORM`.
    """
    mesh = jax.make_mesh((4, 2), ("dp_shard", "tp"), axis_types=(AxisType.Auto,) * 2)
    return run(build(clipped(config)), params, gradients, mesh), mesh


def clipped(config: OptimConfig) -> OptimConfig:
    """Return the config of `run_sharded`."""
    return dataclasses.replace(config, clip_norm=CLIP_NORM)


def shardings(mesh: Mesh, *leading: None) -> Any:
    """Return a sharding for each parameter.

    Args:
      mesh: has the axes of `SPECS`.
      leading: one None for each dim in front of those of the parameters.
    """
    return jax.tree.map(lambda spec: NamedSharding(mesh, P(*leading, *spec)), SPECS)


def relative_errors(actual: Any, expected: Any) -> dict[str, float]:
    """Return the relative L2 error of each tensor, by its path."""

    def error(a: Any, e: Any) -> float:
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        return float(np.linalg.norm(a - e) / np.linalg.norm(e))

    flat, _ = jax.tree.flatten_with_path(jax.tree.map(error, actual, expected))
    return {jax.tree_util.keystr(path): value for path, value in flat}


def float64_runs() -> tuple[Any, Any]:
    """Return the parameters after LAMB in float64: ours, and the paper's.

    There is no warm-up, because Optax computes linear_schedule in float32 also here.
    """
    config = dataclasses.replace(LAMB, warmup_steps=0)
    with jax.enable_x64(True):
        params = make_params(np.float64)
        gradients = make_gradients(params)
        ours = jax.device_get(run(build(config), params, gradients))
    return ours, paper_lamb(config, params, gradients)


def paper_lamb(config: OptimConfig, params: Any, gradients: Any) -> Any:
    """Return the same run in float64 by a LambLayer for each layer of each tensor."""
    layers = jax.tree.map(
        lambda x, is_decayed: LambLayer(
            x,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay if is_decayed else 0.0,
        ),
        _split_layers(params),
        _repeat(DECAYED),
    )
    separate = _split_layers(gradients, axis=1)
    for step in range(1, NUM_STEPS + 1):
        lr = _cosine_rate(config, step)
        jax.tree.map(lambda x, g, lr=lr: x.step(g, lr), layers, at(separate, step - 1))
    return join_layers(jax.tree.map(lambda layer: layer.x, layers))


def join_layers(tree: Any) -> Any:
    """Stack the layers of each tensor that `STACKED` names."""
    return jax.tree.map(lambda s, x: np.stack(x) if s else x, STACKED, tree)


def _split_layers(tree: Any, axis: int = 0) -> Any:
    """Return each stacked leaf as a list of layers, which gradients have on axis 1."""

    def split(is_stacked: bool, x: Any) -> Any:
        return list(np.moveaxis(x, axis, 0)) if is_stacked else x

    return jax.tree.map(split, STACKED, tree)


def _repeat(tree: Any) -> Any:
    """Return the value of each stacked leaf once for each layer."""
    return jax.tree.map(lambda s, d: [d] * NUM_LAYERS if s else d, STACKED, tree)


def _cosine_rate(config: OptimConfig, step: int) -> float:
    """Return the rate of a step counted from 1, in closed form."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / (NUM_STEPS - config.warmup_steps)
    final = config.final_lr_fraction
    return config.lr * (final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2)
