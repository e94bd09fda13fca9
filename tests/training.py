"""Small runs for the parity tests: one batch stream, any mesh, any ZeRO level."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.layers.config import AdapterConfig
from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig
from mjax.pipeline.make import check_pipeline
from mjax.pipeline.partition import EMPTY, Partition
from mjax.step.program import Program, build_program
from tests.layer_slots import in_order

ROWS, LENGTH, VOCAB = 8, 16, 97

TINY = ModelConfig(
    layers=2,
    d_model=32,
    heads=8,
    d_ff=64,
    vocab_size=VOCAB,
    vocab_multiple=8,
    window=(6,),
)

EVERY_OPTION = dataclasses.replace(
    TINY,
    layers=3,
    block="serial",
    activation="swiglu",
    kv_heads=2,
    window=(6, None),
    rope=(True, False),
    tie_embeddings=True,
    attn_bias=True,
    mlp_bias=True,
    norm_bias=True,
    head_bias=True,
    dropout=0.1,
    logit_scale=0.5,
    rope_fraction=0.5,
    rope_interleaved=True,
    remat="dots",
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh shape (pp, dp_replicate, shards, tp), and how it is used."""

    mesh: tuple[int, int, int, int]
    zero: int
    microbatches: int = 1
    pipeline: PipelineConfig | None = None
    tp_chunks: int = 1
    nodes: int = 1
    """Nodes over which the shards are spread; above 1 they communicate in two steps."""

    @property
    def sizes(self) -> AxisSizes:
        pp, dp_replicate, shards, tp = self.mesh
        return AxisSizes(
            pp=pp,
            dp_replicate=dp_replicate,
            dp_node=self.nodes,
            dp_shard=shards // self.nodes,
            tp=tp,
        )


ONE_DEVICE = Layout((1, 1, 1, 1), 0)


def make_mesh(shape: tuple[int, int, int, int], nodes: int = 1) -> Mesh:
    """Make a mesh of a shape (pp, dp_replicate, shards, tp)."""
    sizes = Layout(shape, 0, nodes=nodes).sizes
    return build_mesh(sizes, jax.devices()[: sizes.num_devices])


def make_program(
    layout: Layout,
    model: ModelConfig = TINY,
    optimizer: OptimConfig | None = None,
    compute: str = "float32",
    rows: int = ROWS,
    *,
    stamps: bool = False,
    adapters: AdapterConfig | None = None,
    matmul: Literal["compute", "fp8"] = "compute",
    gather_first: bool = False,
) -> Program:
    return build_program(
        model=model,
        optimizer=optimizer or OptimConfig(lr=1e-2, warmup_steps=1),
        batch=BatchConfig(size=rows, microbatches=layout.microbatches),
        precision=PrecisionConfig(compute=compute, matmul=matmul),  # pyright: ignore[reportArgumentType]
        seq_len=LENGTH,
        num_steps=20,
        seed=1,
        zero_level=layout.zero,
        isolate_documents=True,
        mesh=make_mesh(layout.mesh, layout.nodes),
        pipeline=layout.pipeline,
        tp_chunks=layout.tp_chunks,
        stamps=stamps,
        adapters=adapters,
        gather_first=gather_first,
    )


def make_batch(program: Program, step: int) -> dict[str, jax.Array]:
    """Two documents per sequence; the last token of the first document has no
    target."""
    rng = np.random.default_rng(step)
    num_rows = program.abstract_batch["tokens"].shape[0]
    stream = rng.integers(0, VOCAB, (num_rows, LENGTH + 1), dtype=np.int32)
    cut = LENGTH // 2 - 1
    column = np.arange(LENGTH, dtype=np.int32)
    targets = stream[:, 1:].copy()
    targets[:, cut - 1] = -1
    rows = {
        "tokens": stream[:, :-1],
        "targets": targets,
        "segments": np.tile((column >= cut).astype(np.int32), (num_rows, 1)),
        "positions": np.tile(
            np.where(column >= cut, column - cut, column), (num_rows, 1)
        ),
    }
    return {k: jax.device_put(v, program.batch_sharding) for k, v in rows.items()}


def losses(program: Program, steps: int = 4) -> np.ndarray:
    """Train some steps; return losses, gradient norms and visible pairs, then one
    held-out loss."""
    state, seen = program.init(), []
    for step in range(steps):
        state, metrics = program.train_step(state, make_batch(program, step))
        seen += [metrics["loss"], metrics["grad_norm"], metrics["visible_pairs"]]
    held_out = program.eval_step(state.params, make_batch(program, 99))
    seen.append(held_out["nll"] / held_out["tokens"])
    return np.asarray(jax.device_get(jnp.stack(seen)))


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Gradients of one batch as NumPy arrays, with layers in the order of the model."""

    loss: float
    leaves: dict[str, np.ndarray]
    empty: float
    """Largest magnitude in a slot that holds no layer."""


def partition_of(layout: Layout, model: ModelConfig) -> Partition:
    return check_pipeline(
        layout.pipeline or PipelineConfig(),
        num_layers=model.layers,
        period=model.pattern_length,
        num_stages=layout.mesh[0],
        num_microbatches=layout.microbatches,
        permutes=layout.tp_chunks > 1,
    )


def compile_gradients(program: Program) -> Any:
    state = program.abstract_state
    return program.gradients.lower(
        state.params, state.rng, state.step, program.abstract_batch
    ).compile()


def gradients(program: Program, compiled: Any, partition: Partition) -> Gradients:
    """Return loss and gradients of the first batch at the first step."""
    state = program.init()
    loss, _, grads = compiled(
        state.params, state.rng, state.step, make_batch(program, 0)
    )
    is_empty = partition.layer_of_slot == EMPTY
    blocks = [np.asarray(x)[is_empty] for x in jax.tree.leaves(grads["blocks"])]
    empty = max(float(np.abs(x).max(initial=0)) for x in blocks)
    leaves = jax.tree_util.tree_leaves_with_path(in_order(grads, partition))
    return Gradients(
        loss=float(loss),
        leaves={
            jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
            for path, leaf in leaves
        },
        empty=empty,
    )


def largest_error(got: Gradients, want: Gradients) -> tuple[float, str]:
    """Return max |a - b| / max |b| of the worst leaf, and the leaf's name."""
    assert got.leaves.keys() == want.leaves.keys()
    errors = {
        name: float(np.abs(got.leaves[name] - leaf).max() / np.abs(leaf).max())
        for name, leaf in want.leaves.items()
    }
    # A NaN is the worst.
    worst = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    return errors[worst], worst
