"""A small model as functions, and its pipeline on simulated devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from mjax.mesh import collectives
from mjax.mesh.rules import BATCH_SPEC
from mjax.pipeline import run
from mjax.pipeline.pieces import Pieces
from mjax.pipeline.schedule import Schedule
from tests.training import make_mesh

WIDTH, VOCAB, ROWS, LENGTH, LAYERS_PER_CHUNK = 8, 11, 2, 4, 2


def embed(embedding: Any, micro: Any) -> jax.Array:
    return embedding["table"][micro["tokens"]]


def context(micro: Any) -> jax.Array:
    return micro["tokens"].astype(jnp.float32)[..., None] / VOCAB


def chunk(x: jax.Array, weights: Any, context: jax.Array, number: jax.Array) -> Any:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        y = jnp.tanh(x @ w["w"] + w["b"] + context)
        return x + y * (1 + number), None

    return jax.lax.scan(layer, x, weights)[0]


def head(embedding: Any, head: Any, x: jax.Array, micro: Any) -> jax.Array:
    """Tied, except for a bias."""
    logits = x @ embedding["table"].T + head["b"]
    logp = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(logp, micro["targets"][..., None], -1)
    return -picked.sum()


MODEL = run.Model(embed=embed, context=context, chunk=chunk, head=head)


@jax.custom_vjp
def summed(w: jax.Array, total: jax.Array) -> jax.Array:
    """Return w; its gradient is added to the total."""
    del total
    return w


summed.defvjp(
    lambda w, total: (w, total), lambda total, dw: (jnp.zeros_like(dw), total + dw)
)


def with_held(model: run.Model) -> run.Model:
    """Give a virtual stage its weights as the executor holds them."""

    def chunk(x: jax.Array, held: run.Held, context: Any, number: Any) -> Any:
        layers = zip(held.joined, held.totals, strict=True)
        w = jnp.stack([summed(one["w"], total["w"]) for one, total in layers])
        return model.chunk(x, held.others | {"w": w}, context, number)

    return dataclasses.replace(model, chunk=chunk)


def chunk_of_distance(x: jax.Array, weights: Any, context: Any, number: Any) -> Any:
    """Divide by the distance of x from zero first: huge where x is zero."""
    distance = jnp.abs(x).sum(-1, keepdims=True) + 1e-12
    return chunk((x + 1e-6) / distance, weights, context, number)


FRAGILE = dataclasses.replace(MODEL, chunk=chunk_of_distance)


def specs(level: int) -> run.Weights:
    """Place what is stored, chunks [slots, ...]: over dp_shard too from ZeRO 1 on."""
    shard = "dp_shard" if level else None
    chunks = run.Chunks(
        joined={"w": PartitionSpec("pp", None, shard)},
        others={"b": PartitionSpec("pp", shard)},
    )
    return run.Weights(
        chunks=chunks,
        embedding={"table": PartitionSpec(None, shard)},
        head={"b": PartitionSpec()},
    )


def make_weights(num_chunks: int) -> run.Weights:
    """Draw all chunks [K, n, ...] in the order of the model, embedding and head."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)

    n = LAYERS_PER_CHUNK
    chunks = {"w": draw(num_chunks, n, WIDTH, WIDTH), "b": draw(num_chunks, n, WIDTH)}
    embedding, bias = {"table": draw(VOCAB, WIDTH)}, {"b": draw(VOCAB)}
    return run.Weights(chunks=chunks, embedding=embedding, head=bias)


def make_microbatches(num_microbatches: int, rows: int = ROWS) -> run.Microbatches:
    rng = np.random.default_rng(1)
    shape = (num_microbatches, rows, LENGTH)
    return {
        name: jnp.asarray(rng.integers(0, VOCAB, shape), jnp.int32)
        for name in ("tokens", "targets")
    }


def pipelined(
    schedule: Schedule,
    weights: run.Weights,
    microbatches: run.Microbatches,
    *,
    options: run.Options | None = None,
    dp: int = 1,
    level: int = 2,
    model: run.Model = MODEL,
    gathers_first: bool = False,
) -> tuple[jax.Array, run.Weights]:
    """Run the executor on a mesh of P x dp devices; gradients in the model's order."""
    num_stages, num_chunks = schedule.num_stages, schedule.num_chunks
    pieces = Pieces(
        num_stages=num_stages,
        num_chunks=num_chunks,
        split=dp > 1,
        specs=specs(level),
        level=level,
        compute_dtype="float32",
        reduce_dtype="float32",
    )

    def per_device(stored: Any, micro: Any) -> Any:
        stored, micro = jax.tree.map(collectives.vary, (stored, micro))
        by_chunk = jax.tree.map(
            lambda x: x.reshape(num_chunks, -1, *x.shape[1:]), stored.chunks
        )
        stored = stored._replace(chunks=by_chunk)
        micro = {
            name: x.reshape(schedule.num_microbatches, -1, LENGTH)
            for name, x in micro.items()
        }
        total, grads, _ = run.gradients(
            schedule,
            with_held(model),
            stored,
            micro,
            options=options or run.Options(),
            dtype=jnp.float32,
            pieces=pieces,
            first=pieces.gather_first(stored) if gathers_first else None,
        )
        d_chunks = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), grads.chunks)
        return collectives.sum_over_mesh(total), grads._replace(chunks=d_chunks)

    mesh = make_mesh((num_stages, 1, dp, 1))
    stored = jax.tree.map(lambda x: _stage_major(x, num_stages), weights.chunks)
    chunks = run.Chunks(joined={"w": stored["w"]}, others={"b": stored["b"]})
    # Sequences of a device's microbatches are neighbours in its part of the batch.
    flat = {
        name: x.reshape(x.shape[0], dp, -1, LENGTH).swapaxes(0, 1).reshape(-1, LENGTH)
        for name, x in microbatches.items()
    }
    total, grads = jax.jit(
        jax.shard_map(
            per_device,
            mesh=mesh,
            in_specs=(specs(level), BATCH_SPEC),
            out_specs=(PartitionSpec(), specs(level)),
        )
    )(weights._replace(chunks=chunks), flat)
    d_chunks = jax.tree.map(
        lambda x: _model_order(x, num_stages, num_chunks),
        grads.chunks.joined | grads.chunks.others,
    )
    return total, grads._replace(chunks=d_chunks)


def _stage_major(x: jax.Array, num_stages: int) -> jax.Array:
    """[K, n, ...] in the model's order to [P v n, ...], a stage's chunks together."""
    x = x.reshape(-1, num_stages, *x.shape[1:]).swapaxes(0, 1)
    return x.reshape(-1, *x.shape[3:])


def _model_order(x: jax.Array, num_stages: int, num_chunks: int) -> jax.Array:
    x = x.reshape(num_stages, num_chunks, LAYERS_PER_CHUNK, *x.shape[1:]).swapaxes(0, 1)
    return x.reshape(-1, *x.shape[2:])
