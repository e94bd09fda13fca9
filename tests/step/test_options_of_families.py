"""What models of other frameworks bring is the same on one device and on a mesh."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from mjax.config.train import TrainConfig
from mjax.data.config import DataConfig
from mjax.model.config import ModelConfig
from mjax.model.counts import flops_per_token, num_params, visible_pairs
from mjax.model.transformer import abstract_params
from mjax.pipeline.config import PipelineConfig
from mjax.plan.hlo.counts import count_dot_flops
from tests.training import (
    LENGTH,
    ONE_DEVICE,
    ROWS,
    TINY,
    Gradients,
    Layout,
    compile_gradients,
    gradients,
    largest_error,
    make_mesh,
    make_program,
    partition_of,
)

# Float32 sums over 8 rows of 16 positions in another order, of the largest entry of a
# leaf; a gradient that one device of tp keeps to itself is off by more than 1e-2.
TOLERANCE = 2e-5

GEMMA = dataclasses.replace(
    TINY,
    layers=4,
    block="serial",
    norm="rmsnorm",
    norm_zero_centred=True,
    post_norms=True,
    qk_norm=True,
    activation="geglu_tanh",
    kv_heads=2,
    window=(6, None),
    rope_windowed_base=100.0,
    rope_type="yarn",
    rope_scaling=4.0,
    rope_original_len=8,
    embed_scale=5.0,
    attn_scale_width=9.0,
    attn_soft_cap=2.0,
    logit_soft_cap=1.5,
    qkv_bias=True,
    tie_embeddings=True,
    remat="dots",
)
GPT2 = dataclasses.replace(
    TINY,
    layers=4,
    block="serial",
    activation="gelu_tanh",
    window=(None,),
    rope=(False,),
    learned_positions=LENGTH + 3,
    tie_embeddings=True,
    attn_bias=True,
    mlp_bias=True,
    norm_bias=True,
)
LLAMA = dataclasses.replace(
    TINY, layers=4, rope_type="llama3", rope_scaling=8.0, rope_original_len=8
)
MODELS = {"gemma": GEMMA, "gpt2": GPT2, "llama": LLAMA}

TP = Layout((1, 1, 1, 2), 1)
# Two devices share one of the two key/value heads.
TP_ABOVE_KV = Layout((1, 1, 2, 4), 2)
CHUNKED_TP = Layout((1, 1, 2, 4), 3, tp_chunks=4)
STAGES = Layout((2, 1, 2, 2), 2, 2, PipelineConfig(idle="compute"))


def gradients_on(layout: Layout, model: ModelConfig) -> Gradients:
    program = make_program(layout, model)
    found = gradients(program, compile_gradients(program), partition_of(layout, model))
    if not any(model.rope) and model.attn_bias:
        # Without rotation a bias of keys adds the same to all scores of a query: its
        # gradient is 0, and what is computed of it is rounding.
        noise = found.leaves.pop("blocks.attention.bk")
        assert np.abs(noise).max() < 1e-6
    # Zeros would agree with anything.
    assert all(np.abs(leaf).max() > 0 for leaf in found.leaves.values())
    return found


@functools.cache
def one_device(name: str) -> Gradients:
    return gradients_on(ONE_DEVICE, MODELS[name])


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gemma", TP_ABOVE_KV),
        pytest.param("gemma", STAGES, marks=pytest.mark.slow),
        ("gpt2", STAGES),
        pytest.param("gpt2", TP, marks=pytest.mark.slow),
        pytest.param("gemma", TP, marks=pytest.mark.slow),
        pytest.param("gemma", CHUNKED_TP, marks=pytest.mark.slow),
        pytest.param("llama", TP, marks=pytest.mark.slow),
        pytest.param("llama", STAGES, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_on_a_mesh_are_those_of_one_device(name: str, layout: Layout) -> None:
    got, want = gradients_on(layout, MODELS[name]), one_device(name)
    np.testing.assert_allclose(got.loss, want.loss, rtol=TOLERANCE)
    error, leaf = largest_error(got, want)
    assert error < TOLERANCE, leaf


def test_learned_positions_are_counted_once_and_cost_no_flops() -> None:
    without = dataclasses.replace(GPT2, learned_positions=None)
    assert num_params(GPT2) - num_params(without) == (LENGTH + 3) * GPT2.d_model
    assert flops_per_token(GPT2, LENGTH) == flops_per_token(without, LENGTH)


def test_norms_of_queries_keys_and_branches_are_counted() -> None:
    without = dataclasses.replace(GEMMA, qk_norm=False, post_norms=False)
    norms = GEMMA.layers * (2 * GEMMA.head_width + 2 * GEMMA.d_model)
    assert num_params(GEMMA) - num_params(without) == norms


@pytest.mark.promotion(dtype="standard", rank="allow")
def test_the_flop_formula_agrees_with_the_dots_of_a_gated_gelu() -> None:
    """Within 2%: the reference attention computes the full square, so it is counted."""
    model = dataclasses.replace(
        GEMMA, window=(None,), attention="reference", remat="none", vocab_size=104
    )
    program = make_program(ONE_DEVICE, model)
    hlo = str(program.trace().lower().compile().as_text())
    masked = LENGTH * LENGTH - visible_pairs(LENGTH, None)
    width = model.heads * model.head_width
    square = 3 * 4 * width * model.layers * masked / LENGTH
    expected = (flops_per_token(model, LENGTH) + square) * ROWS * LENGTH
    assert count_dot_flops(hlo) == pytest.approx(expected, rel=0.02)


def test_a_sequence_longer_than_the_learned_positions_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"at most --model.learned-positions 64, got 128; use --data"
    ):
        TrainConfig(
            model=dataclasses.replace(GPT2, learned_positions=64),
            data=DataConfig(seq_len=128),
        )


def test_learned_positions_are_asked_for() -> None:
    graph, params = abstract_params(GPT2)

    def start(params: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graph, params).start(tokens)

    everywhere = PartitionSpec()
    mapped = jax.shard_map(
        start,
        mesh=make_mesh((1, 1, 1, 1)),
        in_specs=everywhere,
        out_specs=everywhere,
        check_vma=False,
    )
    tokens = jax.ShapeDtypeStruct((1, 4), np.int32)
    with pytest.raises(ValueError, match="need the position of each token"):
        jax.eval_shape(mapped, params, tokens)
