"""What a layer keeps for its backward pass, and what it computes again."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as cudnn_in_jax
from jax.sharding import PartitionSpec as P

from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.config.train import TrainConfig
from mjax.data.config import DataConfig
from mjax.estimate.formulas.memory import layer_bytes
from mjax.kernels.attention import api
from mjax.layers.config import Remat
from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.model.transformer import Transformer
from mjax.pipeline.config import PipelineConfig
from mjax.plan.closed_form import case_of
from mjax.trace.vjp import SplitVJP
from tests.layers.test_block import equations
from tests.training import (
    LENGTH,
    ONE_DEVICE,
    ROWS,
    TINY,
    Layout,
    compile_gradients,
    gradients,
    largest_error,
    make_mesh,
    make_program,
    partition_of,
)

SERIAL = dataclasses.replace(TINY, block="serial", kv_heads=2)
POST_NORMS = dataclasses.replace(SERIAL, post_norms=True, activation="swiglu")
PLAIN = Layout((1, 1, 1, 2), 0)
KEEP_INPUT = Layout((2, 1, 1, 1), 0, 2, PipelineConfig(stash="input"))
KEEP_RESIDUALS = Layout((2, 1, 1, 2), 0, 2, PipelineConfig(), tp_chunks=2)
BLOCKS = {"parallel": TINY, "serial": SERIAL, "post norms": POST_NORMS}


def layer_of(model: ModelConfig) -> tuple[Callable[..., jax.Array], jax.Array, Any]:
    """Return one layer, and its input and parameters."""
    whole = Transformer(model, rngs=nnx.Rngs(0))
    params = jax.tree.map(lambda p: p[0], nnx.to_pure_dict(nnx.state(whole.blocks)))
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))

    def layer(x: jax.Array, params: Any) -> jax.Array:
        pattern = whole.pattern(whole.context(positions, None))
        return pattern.one(0, in_loop=True)(x, params, jnp.int32(0), pattern.context)

    return layer, jnp.ones((ROWS, LENGTH, model.d_model)), params


def on_one_device(function: Callable[..., Any]) -> Callable[..., Any]:
    mesh = make_mesh(ONE_DEVICE.mesh)
    return jax.shard_map(
        function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )


def kept_of_a_layer(model: ModelConfig) -> list[Any]:
    layer, *args = layer_of(model)
    keep = on_one_device(lambda *args: SplitVJP(layer, *args).forward(*args)[1])
    return jax.eval_shape(keep, *args)


def products_of_a_layer(model: ModelConfig) -> Counter[str]:
    """Count the matmuls of a layer, forward and backward, by their results."""
    layer, *args = layer_of(model)

    def both(*args: Any) -> Any:
        y, pullback = jax.vjp(layer, *args)
        return y, pullback(y)

    trace = jax.make_jaxpr(on_one_device(both))(*args)
    found = (e for e in equations(trace.jaxpr) if e.primitive.name == "dot_general")
    return Counter(e.outvars[0].aval.str_short() for e in found)


@functools.cache
def gradients_of(block: str, remat: Remat, layout: Layout) -> Any:
    model = dataclasses.replace(BLOCKS[block], remat=remat)
    program = make_program(layout, model)
    partition = partition_of(layout, model)
    return gradients(program, compile_gradients(program), partition)


@pytest.mark.promotion(rank="allow")
@pytest.mark.parametrize("remat", ["none", "attention", "core", "dots", "full"])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_layer_keeps_what_the_closed_form_says(block: str, remat: Remat) -> None:
    model = dataclasses.replace(BLOCKS[block], remat=remat)
    config = TrainConfig(
        model=model,
        batch=BatchConfig(size=ROWS),
        data=DataConfig(seq_len=LENGTH),
        precision=PrecisionConfig(compute="float32"),
    )
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in kept_of_a_layer(model))
    assert kept == layer_bytes(case_of(config, sizes))


@pytest.mark.promotion(rank="allow")
@pytest.mark.parametrize("block", BLOCKS)
def test_remat_core_computes_no_product_again(block: str) -> None:
    """Neither a matmul with a weight nor one of attention."""
    none, core, dots = (
        products_of_a_layer(dataclasses.replace(BLOCKS[block], remat=remat))
        for remat in ("none", "core", "dots")
    )
    assert core == none
    assert dots - none  # the two of attention: the test would see them


@pytest.mark.promotion(rank="allow")
def test_the_forward_kernel_of_cudnn_does_not_run_again(monkeypatch) -> None:
    """Traced: jax asks for the version of a library that needs a GPU."""
    monkeypatch.setattr(cudnn_in_jax, "check_cudnn_version", lambda: 91800)
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)

    def calls(policy: Any) -> int:
        def attend(x: jax.Array) -> jax.Array:
            y = jnp.sin(x)
            return jax.nn.dot_product_attention(
                y, y, y, is_causal=True, implementation="cudnn"
            )

        layer = jax.checkpoint(attend, policy=policy)
        trace = jax.make_jaxpr(jax.grad(lambda x: layer(x).sum()))(x)
        names = [e.primitive.name for e in equations(trace.jaxpr)]
        return sum("attention_fwd" in name for name in names)

    assert calls(jax.checkpoint_policies.nothing_saveable) == 2
    assert calls(api.keep_core) == 1


@pytest.mark.promotion(rank="allow")
def test_the_core_of_the_reference_is_computed_again() -> None:
    """It keeps nothing by name: what remat core keeps is what remat dots keeps."""
    core, dots = (
        kept_of_a_layer(dataclasses.replace(TINY, attention="reference", remat=remat))
        for remat in ("core", "dots")
    )
    assert [leaf.shape for leaf in core] == [leaf.shape for leaf in dots]


@pytest.mark.promotion(rank="allow")
@pytest.mark.parametrize(
    ("block", "layout"),
    [
        ("serial", PLAIN),
        ("parallel", KEEP_INPUT),
        ("serial", KEEP_RESIDUALS),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("parallel", PLAIN),
                ("serial", KEEP_INPUT),
                ("parallel", KEEP_RESIDUALS),
                ("post norms", KEEP_RESIDUALS),
            )
        ),
    ],
)
def test_remat_core_has_the_gradients_of_none(block: str, layout: Layout) -> None:
    """The same sums in float32, some of them in another order over the mesh."""

    want, got = (
        gradients_of(block, "none", ONE_DEVICE),
        gradients_of(block, "core", layout),
    )
    assert got.loss == pytest.approx(want.loss, rel=1e-6)
    error, leaf = largest_error(got, want)
    assert error <= 2e-5, leaf
