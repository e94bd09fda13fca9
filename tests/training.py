"""Small runs for the parity tests: one batch stream, any mesh, any ZeRO level."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from mjax.mesh.axes import AXES
from mjax.model import ModelConfig
from mjax.optim import OptimConfig
from mjax.pipeline.config import PipelineConfig
from mjax.step import BatchConfig, PrecisionConfig, Program, build_program

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


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh shape (pp, dp_replicate, dp_shard, tp), and how it is used."""

    mesh: tuple[int, int, int, int]
    zero: int
    microbatches: int = 1
    pipeline: PipelineConfig | None = None


ONE_DEVICE = Layout((1, 1, 1, 1), 0)


def make_mesh(shape: tuple[int, ...]) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def make_program(
    layout: Layout,
    model: ModelConfig = TINY,
    optimizer: OptimConfig | None = None,
    compute: str = "float32",
) -> Program:
    return build_program(
        model=model,
        optimizer=optimizer or OptimConfig(lr=1e-2, warmup_steps=1),
        batch=BatchConfig(size=ROWS, microbatches=layout.microbatches),
        precision=PrecisionConfig(compute=compute),  # pyright: ignore[reportArgumentType]
        seq_len=LENGTH,
        num_steps=20,
        seed=1,
        zero_level=layout.zero,
        isolate_documents=True,
        mesh=make_mesh(layout.mesh),
        pipeline=layout.pipeline,
    )


def make_batch(program: Program, step: int) -> dict[str, jax.Array]:
    """Two documents a row; the last token of the first has no target."""
    rng = np.random.default_rng(step)
    stream = rng.integers(0, VOCAB, (ROWS, LENGTH + 1), dtype=np.int32)
    cut = LENGTH // 2 - 1
    column = np.arange(LENGTH, dtype=np.int32)
    targets = stream[:, 1:].copy()
    targets[:, cut - 1] = -1
    rows = {
        "tokens": stream[:, :-1],
        "targets": targets,
        "segments": np.tile((column >= cut).astype(np.int32), (ROWS, 1)),
        "positions": np.tile(np.where(column >= cut, column - cut, column), (ROWS, 1)),
    }
    return {k: jax.device_put(v, program.batch_sharding) for k, v in rows.items()}


def losses(program: Program, steps: int = 4) -> np.ndarray:
    """Train some steps; losses and gradient norms, then one held-out loss."""
    state, seen = program.init(), []
    for step in range(steps):
        state, metrics = program.train_step(state, make_batch(program, step))
        seen += [metrics["loss"], metrics["grad_norm"]]
    held_out = program.eval_step(state.params, make_batch(program, 99))
    seen.append(held_out["nll"] / held_out["tokens"])
    return np.asarray(jax.device_get(jnp.stack(seen)))
