"""Build the optimizer: LAMB or AdamW, schedule, clipping, and skipping of bad steps.

Input: `OptimConfig`, the number of steps, and two trees of booleans: whether each
parameter is a stack of layers, and whether it is decayed. Output: an Optax
transformation, and pure functions that decide whether a step is accepted.

Everything runs under jit, outside shard_map, on global arrays. So every norm is the
norm of the whole tensor, however it is sharded.

Source: You et al. 2020, arXiv:1904.00962, Algorithm 2 (LAMB); Loshchilov and Hutter
2019, arXiv:1711.05101 (AdamW). The LAMB paper leaves two choices open. As in Optax, phi
is the identity, and a zero norm gives a trust ratio of 1.
"""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree

from mjax.config.optim import OptimConfig, check_schedule


def learning_rate(config: OptimConfig, num_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the number of accepted steps so far.

    Let t = count + 1 be the number of the next step, counted from 1. The rate is linear
    from 0 at t = 0 to the peak at t = warmup_steps, then follows `config.schedule`: a
    constant schedule stays at the peak, the others reach final_lr_fraction of the peak
    at t = num_steps and are constant afterwards. No step has a rate of 0 unless
    final_lr_fraction is 0.

    Args:
      config: peak, shape, warm-up and decay.
      num_steps: optimizer steps of the whole run.

    Returns:
      A function from count (integer scalar) to the rate (float scalar).

    Raises:
      ValueError: the schedule does not fit into num_steps.
    """
    check_schedule(config, num_steps)
    warmup_steps = config.warmup_steps
    pieces: list[optax.Schedule] = []
    boundaries: list[int] = []
    if warmup_steps:
        pieces.append(optax.linear_schedule(0.0, config.lr, warmup_steps))
        boundaries.append(warmup_steps)
    rest = num_steps - warmup_steps
    if config.schedule == "constant" or rest == 0:
        pieces.append(optax.constant_schedule(config.lr))
    elif config.schedule == "cosine":
        alpha = config.final_lr_fraction
        pieces.append(optax.cosine_decay_schedule(config.lr, rest, alpha))
    else:
        decay_steps = config.decay_steps(num_steps)
        final = config.lr * config.final_lr_fraction
        pieces.append(optax.constant_schedule(config.lr))
        pieces.append(optax.linear_schedule(config.lr, final, decay_steps))
        boundaries.append(num_steps - decay_steps)
    joined = optax.join_schedules(pieces, boundaries)

    def schedule(count: ArrayLike) -> Float[Array, ""]:
        return jnp.asarray(joined(jnp.asarray(count) + 1))

    return schedule


def current_learning_rate(
    opt_state: PyTree, config: OptimConfig, num_steps: int
) -> Float[Array, ""]:
    """Return the learning rate that the next update of this state will use.

    Args:
      opt_state: state of the transformation of `build_optimizer`, before the update.
      config: the config from which the optimizer was built.
      num_steps: the number of steps for which it was built.
    """
    return jnp.asarray(learning_rate(config, num_steps)(opt_state["schedule"].count))


def build_optimizer(
    config: OptimConfig,
    *,
    num_steps: int,
    stacked: PyTree[bool],
    decayed: PyTree[bool],
) -> optax.GradientTransformationExtraArgs:
    """Compose clipping, LAMB or AdamW, and the schedule from Optax's transformations.

    Gradients are clipped by value, then by global norm. Updates are float32 (or wider);
    moments have the dtype and the shape of their parameter. The state is a dict: its
    "adam" entry holds mu and nu, its "schedule" entry the count of updates. The update
    takes the global norm as `norm` (`norm_to_clip`); by default it is the norm of the
    given gradients.

    Args:
      config: optimizer, clipping and schedule.
      num_steps: optimizer steps of the whole run.
      stacked: booleans in the tree of the parameters; True for a leaf [L, ...] with one
        entry per layer, for which LAMB computes one trust ratio per layer instead of
        one for the leaf.
      decayed: booleans in the tree of the parameters; True for leaves with weight
        decay.

    Raises:
      ValueError: the schedule does not fit into num_steps.
    """
    schedule = learning_rate(config, num_steps)
    pieces: list[tuple[str, optax.GradientTransformation]] = []
    if config.clip_value is not None:
        pieces.append(("clip_value", optax.clip(config.clip_value)))
    if config.clip_norm is not None:
        pieces.append(("clip_norm", _clip_to_norm(config.clip_norm)))
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    pieces.append(("adam", adam))
    decay = optax.add_decayed_weights(config.weight_decay, mask=decayed)
    pieces.append(("decay", decay))
    if config.name == "lamb":
        pieces.append(("trust_ratio", _scale_by_trust_ratio(stacked)))
    pieces.append(("schedule", optax.scale_by_learning_rate(schedule)))
    return _compute_in_float32(optax.named_chain(*pieces))


def norm_to_clip(
    config: OptimConfig, grads: PyTree, norm: Float[Array, ""]
) -> Float[Array, ""]:
    """Return the global norm that decides how gradients are clipped.

    Args:
      config: the config from which the optimizer was built.
      grads: gradients of all parameters.
      norm: L2 norm of `grads`, in float32; the result, unless values are clipped first.
    """
    if config.clip_value is None:
        return norm
    clipped, _ = optax.clip(config.clip_value).update(
        jax.tree.map(_widen, grads), optax.EmptyState()
    )
    return jnp.asarray(optax.tree.norm(clipped))


def _clip_to_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Return Optax's clip_by_global_norm, but by a norm that the caller passes.

    A piecewise update sees only a part of the gradients at a time.
    """

    def update(updates, state, params=None, *, norm=None, **extra):
        del params, extra
        norm = optax.tree.norm(updates) if norm is None else norm
        is_below = jnp.squeeze(norm < max_norm)

        def clip(x: Array) -> Array:
            scaled = (x / norm.astype(x.dtype)) * max_norm
            return jax.lax.select(is_below, x, scaled)

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )


def _widen(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _compute_in_float32(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Return `inner` computed in float32, with its state cast back to its dtypes.

    Float32 needs no change. With bfloat16 parameters Optax would round the norms and
    the decay, and the moments would change to the dtype of the gradients.
    """

    def update(updates, state, params=None, **extra):
        wide = jax.tree.map(_widen, (updates, params))
        updates, new_state = inner.update(wide[0], state, wide[1], **extra)
        return updates, optax.tree.cast_like(new_state, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _scale_by_trust_ratio(stacked: PyTree[bool]) -> optax.GradientTransformation:
    """Return Optax's scale_by_trust_ratio, mapped over layers of stacked leaves.

    The trust ratio depends only on the L2 norms of update and parameter, so this calls
    Optax on these norms, not on the tensors. Optax computes each norm twice: the second
    time from a masked tensor, to be differentiable. On sharded tensors that takes two
    dependent all-reduces per leaf. Here one combined all-reduce computes all norms.
    """
    trust_ratio = optax.scale_by_trust_ratio()

    def scale(update: Array, param: Array) -> Array:
        length, of_param = optax.tree.norm(update), optax.tree.norm(param)
        scaled, _ = trust_ratio.update(length, optax.EmptyState(), of_param)
        is_zero = length == 0
        ratio = cast(Array, scaled) / jnp.where(is_zero, 1, length)
        return update * jnp.where(is_zero, 1, ratio)

    def update(updates, params):
        return jax.tree.map(
            lambda is_stacked, u, p: (jax.vmap(scale) if is_stacked else scale)(u, p),
            stacked,
            updates,
            params,
        )

    return optax.stateless(update)


class GuardState(NamedTuple):
    """Statistics of the steps so far, which decide whether the next step is accepted.

    A named tuple like the states of Optax. Under jax.tree.map its fields may hold specs
    or abstract values, which the checked annotations of a dataclass would refuse.

    Attributes:
      mean_norm: [], float32, running mean of the gradient norms of accepted steps.
      num_accepted: [], int32, accepted steps.
      num_skipped: [], int32, skipped steps.
      num_consecutive_skips: [], int32, skipped steps since the last accepted one.
    """

    mean_norm: Float[Array, ""]
    num_accepted: Int[Array, ""]
    num_skipped: Int[Array, ""]
    num_consecutive_skips: Int[Array, ""]


def guard_init() -> GuardState:
    """Return the guard of a run before its first step."""
    return GuardState(
        mean_norm=jnp.zeros((), jnp.float32),
        num_accepted=jnp.zeros((), jnp.int32),
        num_skipped=jnp.zeros((), jnp.int32),
        num_consecutive_skips=jnp.zeros((), jnp.int32),
    )


def guard_check(
    config: OptimConfig,
    guard: GuardState,
    loss: Float[Array, ""],
    grad_norm: Float[Array, ""],
) -> tuple[Bool[Array, ""], GuardState]:
    """Decide whether a step is accepted, from scalars that are equal on all ranks.

    A step is skipped if its loss or its gradient norm is not finite, or if the norm
    exceeds skip_spike_factor times the mean norm of the accepted steps before it. The
    mean is arithmetic over the first 1 / (1 - spike_mean_decay) steps, and an
    exponential moving average after them.

    Args:
      config: the rule for a spike.
      guard: the guard before this step.
      loss: [], of this step.
      grad_norm: [], global L2 norm of this step's gradients, before any clipping.

    Returns:
      accept: [], whether to keep the update.
      guard: the guard after this step; a skipped step changes only the counters.
    """
    accept = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if config.skip_spike_factor is not None:
        is_known = guard.num_accepted >= config.spike_warmup_steps
        is_spike = grad_norm > config.skip_spike_factor * guard.mean_norm
        accept &= ~(is_known & is_spike)
    num_accepted = guard.num_accepted + accept.astype(jnp.int32)
    weight = jnp.maximum(1 - config.spike_mean_decay, 1 / (guard.num_accepted + 1))
    mean_norm = guard.mean_norm + weight * (grad_norm - guard.mean_norm)
    skipped = (~accept).astype(jnp.int32)
    return accept, GuardState(
        mean_norm=jnp.where(accept, mean_norm, guard.mean_norm).astype(jnp.float32),
        num_accepted=num_accepted,
        num_skipped=guard.num_skipped + skipped,
        num_consecutive_skips=(guard.num_consecutive_skips + 1) * skipped,
    )


def select(accept: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    """Return the new tree if the step is accepted, otherwise the old one, bit for bit.

    Args:
      accept: [], from `guard_check`.
      new: parameters, optimizer state, or a tuple of both, after the update.
      old: the same tree before the update, with the same shapes and dtypes.
    """
    return jax.tree.map(lambda n, o: jnp.where(accept, n, o), new, old)
