"""Sums over tokens, rows and microbatches are float32 in a bfloat16 step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.hardware.described import described_mesh
from mjax.layers.config import AdapterConfig
from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig
from mjax.plan.compile import OPTIONS
from mjax.plan.hlo.parse import arrays, parse
from mjax.step.program import build_program
from tests.layer_slots import in_order
from tests.training import (
    EVERY_OPTION,
    LENGTH,
    ONE_DEVICE,
    TINY,
    Layout,
    compile_gradients,
    make_batch,
    make_program,
    partition_of,
)

# ----------------------------------------------------------------- values of gradients

ROWS = 512
FREQUENT = 3
"""A token that is half of the batch: 4,096 occurrences."""

MODELS = {
    "tied": dataclasses.replace(
        EVERY_OPTION,
        layers=2,
        kv_heads=None,
        window=(None,),
        rope=(True,),
        learned_positions=LENGTH,
        dropout=0.0,
        remat="full",
    ),
    "untied": dataclasses.replace(TINY, qk_norm=True, norm="rmsnorm", remat="none"),
}

LAYOUTS = {
    "1 microbatch": ONE_DEVICE,
    "16 microbatches": Layout((1, 1, 1, 1), 0, 16),
    "tp, ZeRO-1": Layout((1, 1, 2, 2), 1),
    "tp, ZeRO-3": Layout((1, 1, 2, 2), 3, 2),
    "pipeline, ZeRO-2": Layout((2, 1, 2, 2), 2, 4, PipelineConfig(idle="compute")),
}

# Bounds of a leaf's relative error as a vector, by its place. One rounding to bfloat16
# changes a value by at most 2^-9, and by 2^-9 / sqrt(3) = 0.11% in the mean. Between a
# leaf of the head and the loss there are some ten roundings, which makes 0.3 to 0.6%;
# each layer adds some twenty, which makes 0.6 to 1.5%. Most of the gradient of a tied
# table is that of the head. The bounds are 1.3 to 1.5 times these errors.
BOUNDS = {
    "final_norm": 0.007,
    "head": 0.009,
    "embed.table": 0.012,
    "embed.positions": 0.014,
    "blocks": 0.02,
}


def gradients(name: str, layout: Layout, compute: str) -> dict[str, np.ndarray]:
    model = MODELS[name]
    program = make_program(layout, model, compute=compute, rows=ROWS)
    batch = make_batch(program, 0)
    is_frequent = jnp.arange(LENGTH) % 2 == 0
    batch["tokens"] = jax.device_put(
        jnp.where(is_frequent[None], FREQUENT, batch["tokens"]), program.batch_sharding
    )
    state = program.init()
    _, _, grads = compile_gradients(program)(state.params, state.rng, state.step, batch)
    leaves = jax.tree_util.tree_leaves_with_path(
        in_order(grads, partition_of(layout, model))
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in leaves
    }


@functools.cache
def in_float32(name: str) -> dict[str, np.ndarray]:
    return gradients(name, ONE_DEVICE, "float32")


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("tied", "1 microbatch"),
        ("tied", "16 microbatches"),
        pytest.param("tied", "tp, ZeRO-1", marks=pytest.mark.slow),
        ("tied", "tp, ZeRO-3"),
        ("tied", "pipeline, ZeRO-2"),
        ("untied", "16 microbatches"),
    ],
)
def test_gradients_in_bfloat16_are_those_in_float32(name: str, layout: str) -> None:
    got, want = gradients(name, LAYOUTS[layout], "bfloat16"), in_float32(name)
    assert got.keys() == want.keys()
    assert ("head.table" in got) == (name == "untied")
    errors = {leaf: error(got[leaf], want[leaf]) for leaf in want}
    bounds = {
        leaf: next(b for start, b in BOUNDS.items() if leaf.startswith(start))
        for leaf in want
    }
    assert {leaf: e for leaf, e in errors.items() if e > bounds[leaf]} == {}
    row = error(got["embed.table"][FREQUENT], want["embed.table"][FREQUENT])
    assert row <= BOUNDS["embed.table"]


# ------------------------------------------------------------------ text of programs

NARROW = ("bf16", "f16", "f8e4m3fn", "f8e5m2")
SUMS = ("reduce", "reduce-window", "scatter", "select-and-scatter")

BIASES: dict[str, Any] = {
    **{"attn_bias": True, "mlp_bias": True, "norm_bias": True, "head_bias": True},
    **{"layers": 2, "d_model": 128, "heads": 2, "vocab_size": 300},
}
SERIAL = ModelConfig(
    **BIASES,
    block="serial",
    kv_heads=1,
    learned_positions=128,
    qk_norm=True,
    post_norms=True,
    attn_soft_cap=50.0,
    logit_soft_cap=30.0,
    embed_scale=11.0,
    tie_embeddings=True,
    dropout=0.1,
)
PARALLEL = ModelConfig(**BIASES, activation="swiglu", remat="none")
ADAPTERS = AdapterConfig(
    rank=8, scale=2.0, targets=("attention.wq", "attention.wo", "mlp.w_gate")
)
ONE = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1)
STAGES = AxisSizes(pp=2, dp_replicate=1, dp_shard=1, tp=2)

STEPS: dict[str, tuple[ModelConfig, AxisSizes, dict[str, Any]]] = {
    "serial, fp8": (SERIAL, ONE, {"precision": PrecisionConfig(matmul="fp8")}),
    "pipeline": (PARALLEL, STAGES, {"batch": BatchConfig(size=4, microbatches=4)}),
    "adapters": (PARALLEL, ONE, {"adapters": ADAPTERS}),
}


def narrow_sums(text: str) -> set[str]:
    """Return the sums of a program that are rounded to 16 bits after each addition.

    XLA for GPUs adds in bfloat16; XLA for CPUs adds in float32, but rounds each sum.
    """
    module = parse(text)

    def is_narrow(name: str) -> bool:
        inside = module.computations[name].instructions
        dtypes = {a.dtype for x in inside for a in arrays(x.shape)}
        return any(x.opcode == "add" for x in inside) and not dtypes.isdisjoint(NARROW)

    return {
        f"{x.opcode} {x.op_name}"
        for computation in module.computations.values()
        for x in computation.instructions
        if x.opcode in SUMS and any(map(is_narrow, x.called))
    }


def cpu_mesh(sizes: AxisSizes) -> Mesh:
    return build_mesh(sizes, jax.devices()[: sizes.num_devices])


PLACES = [
    pytest.param(cpu_mesh, {}, id="cpu"),
    pytest.param(described_mesh, OPTIONS, id="h200", marks=pytest.mark.plan),
]


def compiled_text(lowered: Any, options: dict[str, Any]) -> str:
    return lowered.compile(compiler_options=options).as_text()


@pytest.mark.parametrize(("mesh", "options"), PLACES)
@pytest.mark.parametrize("step", STEPS)
def test_no_sum_of_a_step_is_narrower_than_float32(
    step: str, mesh: Callable[[AxisSizes], Mesh], options: dict[str, Any]
) -> None:
    model, sizes, changes = STEPS[step]
    defaults: dict[str, Any] = {
        "batch": BatchConfig(size=2),
        "precision": PrecisionConfig(),
    }
    program = build_program(
        model=model,
        optimizer=OptimConfig(),
        seq_len=128,
        num_steps=10,
        seed=0,
        zero_level=2,
        isolate_documents=True,
        mesh=mesh(sizes),
        **defaults | changes,
    )
    assert narrow_sums(compiled_text(program.trace().lower(), options)) == set()


@pytest.mark.parametrize(("mesh", "options"), PLACES)
def test_sums_in_bfloat16_are_found(
    mesh: Callable[[AxisSizes], Mesh], options: dict[str, Any]
) -> None:
    device = NamedSharding(mesh(ONE), PartitionSpec())

    def indexed_with_bias(table: jax.Array, bias: jax.Array, ids: jax.Array) -> Any:
        return jnp.sin(table[ids] + bias).astype(jnp.float32).sum()

    types = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=device)
        for shape, dtype in (((64, 128), "bfloat16"), ((128,), "bfloat16"))
    ]
    ids = jax.ShapeDtypeStruct((4096,), "int32", sharding=device)
    lowered = jax.jit(jax.grad(indexed_with_bias, (0, 1))).lower(*types, ids)
    kinds = {x.split()[0] for x in narrow_sums(compiled_text(lowered, options))}
    assert {"scatter", "reduce"} <= kinds
