"""Train a transformer in bare JAX, as the lower bound of mjax's step time.

    python -m scripts.speed.bare_loop

One fixed model in one file: parallel blocks, LayerNorm, GELU, rotary
positions, untied embedding, AdamW, float32. The mesh is (dp, tp): Megatron split with
sequence parallelism over tp, ZeRO-2 over dp, layers scanned with full remat. Only the
attention kernel is from mjax. The loss and its gradient run per device in one
shard_map; parameters are gathered there, so the transpose reduce-scatters their
gradients.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.kernels.attention.api import attention

L_D, L_D_F, L_F_D = P(None, "dp"), P(None, "dp", "tp"), P(None, "tp", "dp")
SPECS: dict[str, Any] = {
    "embed": P("tp", "dp"),
    "blocks": {"norm": L_D, "w_in": L_D_F, "w_out": L_F_D},
    "final_norm": P("dp"),
    "head": P("tp", "dp"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the model."""

    layers: int = 8
    d_model: int = 256
    heads: int = 8
    vocab_size: int = 257
    padded_vocab: int = 384


def init_params(sizes: Sizes, key: jax.Array) -> dict[str, Any]:
    """Draw the parameters; w_in holds q, k, v and ffn-in of each tp device in turn."""
    L, D = sizes.layers, sizes.d_model
    keys = jax.random.split(key, 4)
    draw = lambda k, *shape: (2 / (5 * D)) ** 0.5 * jax.random.normal(k, shape)  # noqa: E731
    return {
        "embed": draw(keys[0], sizes.padded_vocab, D),
        "blocks": {
            "norm": jnp.ones((L, D)),
            "w_in": draw(keys[1], L, D, 7 * D),
            "w_out": draw(keys[2], L, 5 * D, D) / (2 * L) ** 0.5,
        },
        "final_norm": jnp.ones(D),
        "head": draw(keys[3], sizes.padded_vocab, D),
    }


def whole(part: jax.Array, spec: P) -> jax.Array:
    """Gather a parameter over dp, and let it vary over tp where tp does not split it.

    Without the cast each layer's backward pass would sum the gradient over tp.
    """
    full = lax.all_gather(part, "dp", axis=tuple(spec).index("dp"), tiled=True)
    return full if "tp" in spec else lax.pcast(full, "tp", to="varying")


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def block(x, w, cos, sin, segments, head_width: int) -> jax.Array:
    """Apply one parallel block to this device's part of the sequence."""
    h = lax.all_gather(norm(x, w["norm"]), "tp", axis=1, tiled=True)
    width = h.shape[-1] // lax.axis_size("tp")
    q, k, v, up = jnp.split(h @ w["w_in"], [width, 2 * width, 3 * width], axis=-1)
    q, k, v = (a.reshape(*a.shape[:2], -1, head_width) for a in (q, k, v))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    mixed = attention(q, k, v, segment_ids=segments).reshape(*h.shape[:2], -1)
    up = jax.nn.gelu(up, approximate=False)
    y = jnp.concatenate([mixed, up], axis=-1) @ w["w_out"]
    return x + lax.psum_scatter(y, "tp", scatter_dimension=1, tiled=True)


def loss(sizes: Sizes, parts, batch) -> jax.Array:
    """Mean nats per target; per device, from this device's parts of the parameters."""
    params = jax.tree.map(whole, parts, SPECS)
    tokens, targets = batch["tokens"], batch["targets"]
    head_width = sizes.d_model // sizes.heads
    frequency = 10_000.0 ** -(jnp.arange(0, head_width, 2) / head_width)
    phase = (batch["positions"][..., None] * frequency)[:, :, None]
    cos, sin = jnp.cos(phase), jnp.sin(phase)

    local_vocab = params["embed"].shape[0]
    ids = lax.axis_index("tp") * local_vocab + jnp.arange(local_vocab)
    mine = (tokens >= ids[0]) & (tokens <= ids[-1])
    x = params["embed"][jnp.where(mine, tokens - ids[0], 0)]
    x = jnp.where(mine[..., None], x, 0.0)
    x = lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True)

    # A scan needs no barrier against CSE of recomputed values.
    @partial(jax.checkpoint, prevent_cse=False)
    def layer(x, w):
        return block(x, w, cos, sin, batch["segments"], head_width), None

    x, _ = lax.scan(layer, x, params["blocks"])
    h = lax.all_gather(norm(x, params["final_norm"]), "tp", axis=1, tiled=True)
    logits = jnp.einsum("btd,vd->btv", h, params["head"])
    logits = jnp.where(ids < sizes.vocab_size, logits, -jnp.inf)
    top = lax.pmax(lax.stop_gradient(logits.max(-1)), "tp")
    z = logits - top[..., None]
    total = lax.psum(jnp.exp(z).sum(-1), "tp")
    hit = lax.psum(jnp.where(ids == targets[..., None], z, 0.0).sum(-1), "tp")
    nll = jnp.where(targets >= 0, jnp.log(total) - hit, 0.0)
    num_targets = lax.psum((targets >= 0).sum(), "dp")
    return lax.psum(nll.sum(), "dp") / jnp.maximum(num_targets, 1)


def make_step(sizes: Sizes, mesh: Mesh, tx: optax.GradientTransformation):
    """Return the jitted (params, opt_state, batch) -> the same two, and the loss."""
    value_and_grad = jax.shard_map(
        jax.value_and_grad(partial(loss, sizes)),
        mesh=mesh,
        in_specs=(SPECS, P("dp")),
        out_specs=(P(), SPECS),
    )

    def step(params, opt_state, batch):
        value, grads = value_and_grad(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return jax.jit(step, donate_argnums=(0, 1))


def adamw(lr: float) -> optax.GradientTransformation:
    decayed = jax.tree.map(lambda spec: "tp" in spec, SPECS)  # all but the norms
    rule = optax.adamw(lr, b1=0.9, b2=0.95, eps=1e-6, weight_decay=0.1, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(1.0), rule)


def place(mesh: Mesh, tx: optax.GradientTransformation, params) -> tuple[Any, Any]:
    """Put parameters and their new optimizer state on the mesh."""
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    params = jax.tree.map(put, params, SPECS)
    # Moments are sharded like their parameters; counts are replicated.
    return params, jax.tree.map(lambda x: x if x.ndim else put(x, P()), tx.init(params))


def main(steps: int = 5) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh, sizes, tx = jax.make_mesh((4, 2), ("dp", "tp")), Sizes(), adamw(1e-3)
    params, opt_state = place(mesh, tx, init_params(sizes, jax.random.key(0)))
    step = make_step(sizes, mesh, tx)
    tokens = jax.random.randint(jax.random.key(1), (32, 257), 0, sizes.vocab_size)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    zeros = jnp.zeros_like(batch["tokens"])
    batch |= {"segments": zeros, "positions": zeros + jnp.arange(256)}
    batch = jax.device_put(batch, NamedSharding(mesh, P("dp")))
    for n in range(steps):
        params, opt_state, value = step(params, opt_state, batch)
        print(f"step {n + 1}  loss {value:.4f}", flush=True)


if __name__ == "__main__":
    main()
