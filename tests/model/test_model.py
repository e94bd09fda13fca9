"""Counts, initialisation and configuration of the model."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from mjax.model.config import ModelConfig
from mjax.model.counts import flops_per_token, num_params, visible_pairs
from mjax.model.transformer import Transformer
from mjax.plan.hlo.counts import count_dot_flops
from tests.training import LENGTH, ONE_DEVICE, ROWS, TINY, make_batch, make_program


@pytest.mark.parametrize("window", [1, 2, 5, 8, 9, None])
def test_visible_pairs_are_those_of_the_mask(window) -> None:
    i, j = np.indices((8, 8))
    mask = (j <= i) & (j > i - (window or 8))
    assert visible_pairs(8, window) == mask.sum()


@pytest.mark.promotion(dtype="standard", rank="allow")
def test_the_flop_formula_agrees_with_the_dots_of_the_compiled_step() -> None:
    """Within 2%: the reference attention computes the full square, so it is counted."""
    model = dataclasses.replace(
        TINY,
        layers=2,
        window=(None,),
        attention="reference",
        remat="none",
        vocab_size=96,
        kv_heads=4,
        activation="swiglu",
    )
    program = make_program(ONE_DEVICE, model)
    hlo = str(program.trace().lower().compile().as_text())
    masked = LENGTH * LENGTH - visible_pairs(LENGTH, None)
    square = 3 * 4 * model.d_model * model.layers * masked / LENGTH
    expected = (flops_per_token(model, LENGTH) + square) * ROWS * LENGTH
    # The gradient of the embedding adds up tokens in blocks of 64.
    expected += 2 * ROWS * LENGTH * 64 * model.d_model
    assert count_dot_flops(hlo) == pytest.approx(expected, rel=0.02)


def test_layers_are_drawn_apart_and_scaled_with_depth() -> None:
    model = dataclasses.replace(TINY, layers=8, d_model=64, d_ff=256)
    state = nnx.state(Transformer(model, rngs=nnx.Rngs(0)))
    blocks = nnx.to_pure_dict(state)["blocks"]
    w_in, w_out = blocks["mlp"]["w_in"], blocks["mlp"]["w_out"]
    assert not np.array_equal(w_in[0], w_in[1])
    std = (2 / (5 * 64)) ** 0.5
    # 8 x 64 x 256 draws: the sample deviation is within 1%.
    assert float(w_in.std()) == pytest.approx(std, rel=0.01)
    assert float(w_out.std()) == pytest.approx(std / 16**0.5, rel=0.01)


def test_with_the_root_of_the_width_as_scale_the_residual_stream_starts_large() -> None:
    """The second condition of arXiv:2312.16903; docs/notes.md has both."""
    model = dataclasses.replace(TINY, d_model=64, vocab_size=1024, embed_scale=8.0)
    transformer = Transformer(model, rngs=nnx.Rngs(0))
    weights = nnx.to_pure_dict(nnx.state(transformer))["embed"]["table"]
    # 1024 x 64 draws: the sample deviation is within 1%.
    started = transformer.embed.scale * float(weights.std())
    assert started == pytest.approx((2 / 5) ** 0.5, rel=0.01)


def test_the_parameters_of_layer_i_do_not_depend_on_the_mesh() -> None:
    one = make_program(ONE_DEVICE).init().params
    program = make_program(dataclasses.replace(ONE_DEVICE, mesh=(1, 2, 2, 2), zero=2))
    jax.tree.map(np.testing.assert_array_equal, one, program.init().params)


def test_the_smallest_pattern_of_kinds_is_found() -> None:
    def pattern(**changes):
        return dataclasses.replace(TINY, layers=6, **changes).pattern_length

    assert pattern(window=(8,)) == 1
    assert pattern(window=(8, 8, None)) == 3
    assert pattern(window=(8, None), rope=(True, False)) == 2
    assert pattern(window=(8, None), rope=(True, True, False)) == 6
    assert pattern(window=(4, 4), rope=(True,)) == 1


@pytest.mark.promotion(dtype="standard", rank="allow")
def test_a_pattern_that_does_not_divide_the_layers_runs() -> None:
    model = dataclasses.replace(TINY, layers=5, window=(3, None))
    program = make_program(ONE_DEVICE, model)
    _, metrics = program.train_step(program.init(), make_batch(program, 0))
    assert np.isfinite(float(metrics["loss"]))


def test_padding_of_the_vocabulary_is_counted_and_rounded_up() -> None:
    assert ModelConfig(vocab_size=257, vocab_multiple=128).padded_vocab == 384
    small = ModelConfig(vocab_size=257, vocab_multiple=1)
    padded = ModelConfig(vocab_size=257, vocab_multiple=128)
    assert num_params(padded) - num_params(small) == 2 * (384 - 257) * small.d_model


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"window": (0,)}, "--model.window must be at least 1"),
        ({"window": (-4, None)}, "got -4"),
        ({"heads": 5}, "multiple of --model.heads 5, got .*; use --model.d-model"),
        (
            {"heads": 8, "kv_heads": 3},
            "divide --model.heads 8, got 3; use --model.kv-heads 2$",
        ),
        ({"window": (1,) * 9}, r"from 1 to 2 values \(the layers\), got 9"),
        ({"dropout": 1.0}, "must be at least 0 and below 1, got 1.0"),
        ({"rope_fraction": 0.0}, "--model.rope-fraction must be above 0"),
        ({"rope_fraction": 0.3}, "must leave a pair to rotate in a head of"),
        ({"norm": "rmsnorm", "norm_bias": True}, "--model.norm layernorm"),
        ({"layers": 0}, "--model.layers must be at least 1"),
        ({"kv_heads": 0}, "--model.kv-heads must be at least 1, got 0"),
        ({"head_dim": -2}, "--model.head-dim must be at least 1, got -2"),
        ({"d_ff": 0}, "--model.d-ff must be at least 1, got 0"),
        ({"norm_eps": -1.0}, "--model.norm-eps must be positive and finite, got -1"),
        ({"rope_base": 0.0}, "--model.rope-base must be positive and finite, got 0"),
        ({"init_std": float("nan")}, "--model.init-std must be positive"),
        ({"logit_scale": float("inf")}, "--model.logit-scale must be finite, got inf"),
    ],
)
def test_impossible_models_are_refused_with_their_numbers(changes, says) -> None:
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(TINY, **changes)
