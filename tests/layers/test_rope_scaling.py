"""Which frequencies llama3 and yarn scale, and by how much."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from mjax.layers.config import RopeConfig
from mjax.layers.rope import angles, frequencies
from mjax.model.config import ModelConfig

# float32, and powers of a base of 10^5: a few units of 6e-8.
TOLERANCE = 1e-6

LLAMA3 = RopeConfig(
    head_width=64,
    base=500_000.0,
    scaling=8.0,
    fraction=1.0,
    interleaved=False,
    type="llama3",
    original_len=8192,
    slow_turns=1.0,
    fast_turns=4.0,
)
YARN = dataclasses.replace(
    LLAMA3, type="yarn", scaling=4.0, original_len=4096, fast_turns=32.0, magnitude=1.1
)
WIDTHS = np.arange(0, 64, 2) / 64


@pytest.mark.parametrize("config", [LLAMA3, YARN], ids=lambda c: c.type)
def test_slow_pairs_are_divided_and_fast_ones_left(config: RopeConfig) -> None:
    plain = config.base**-WIDTHS
    turns = config.original_len * plain / (2 * math.pi)
    got = np.asarray(frequencies(config), np.float64)
    # Yarn rounds its limits outward, to whole pairs.
    rounded = 2.0 if config.type == "yarn" else 1.0
    slow = turns < config.slow_turns / rounded
    fast = turns > config.fast_turns * rounded
    between = (turns > config.slow_turns) & (turns < config.fast_turns)
    assert all(part.any() for part in (slow, fast, between))
    np.testing.assert_allclose(got[slow], plain[slow] / config.scaling, rtol=TOLERANCE)
    np.testing.assert_allclose(got[fast], plain[fast], rtol=TOLERANCE)
    assert (got[between] < plain[between]).all()
    assert (got[between] > plain[between] / config.scaling).all()


def test_llama3_blends_along_the_number_of_turns() -> None:
    plain = LLAMA3.base**-WIDTHS
    kept = (8192 * plain / (2 * math.pi) - 1) / 3
    inside = (kept > 0) & (kept < 1)
    assert inside.sum() >= 2
    expected = (1 - kept) * plain / 8 + kept * plain
    got = np.asarray(frequencies(LLAMA3), np.float64)
    np.testing.assert_allclose(got[inside], expected[inside], rtol=TOLERANCE)


def test_yarn_blends_along_the_index_of_the_pair() -> None:
    """Peng et al. 2023, arXiv:2309.00071, eq. 23: equal steps between the limits."""
    plain = YARN.base**-WIDTHS
    kept = (np.asarray(frequencies(YARN), np.float64) / plain - 1 / 4) / (1 - 1 / 4)
    inside = (kept > 1e-4) & (kept < 1 - 1e-4)
    steps = np.diff(kept[inside])
    assert len(steps) >= 4
    np.testing.assert_allclose(steps, steps[0], rtol=1e-4)
    whole = np.asarray(frequencies(dataclasses.replace(YARN, truncate=False)))
    assert not np.allclose(whole, frequencies(YARN), rtol=1e-4)


@pytest.mark.promotion(rank="allow")
def test_the_magnitude_of_yarn_is_a_factor_on_cosine_and_sine() -> None:
    positions = jnp.arange(7, dtype=jnp.int32)[None]
    cos, sin = angles(positions, YARN)
    np.testing.assert_allclose(cos**2 + sin**2, 1.1**2, rtol=TOLERANCE)


def test_yarn_without_a_magnitude_has_that_of_the_paper() -> None:
    model = ModelConfig(rope_type="yarn", rope_scaling=4.0, rope_original_len=32)
    assert model.rope_config.magnitude == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert model.rope_config.fast_turns == 32.0
    given = dataclasses.replace(model, rope_magnitude=1.0)
    assert given.rope_config.magnitude == 1.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_original_len": 64}, "rope-original-len needs .* llama3 or yarn, got"),
        ({"rope_type": "llama3"}, "--model.rope-type llama3 needs --model.rope-origi"),
        (
            {"rope_type": "llama3", "rope_original_len": 64, "rope_magnitude": 1.0},
            "--model.rope-magnitude needs --model.rope-type yarn, got .* llama3; leave",
        ),
        (
            {"rope_type": "llama3", "rope_original_len": 64, "rope_truncate": False},
            "--model.rope-truncate needs --model.rope-type yarn",
        ),
        (
            {"rope_type": "yarn", "rope_original_len": 64, "rope_fast_turns": 0.5},
            "rope-fast-turns must be above --model.rope-slow-turns 1.0, got 0.5",
        ),
        ({"rope_type": "yarn", "rope_original_len": 0}, "at least 1, got 0"),
        (
            {"rope_type": "yarn", "rope_original_len": 64, "rope_base": 1.0},
            "--model.rope-base must be above 1 with --model.rope-type yarn, got 1.0",
        ),
        ({"post_norms": True}, "needs --model.block serial, got --model.block par"),
        ({"qkv_bias": True, "attn_bias": True}, "exclude each other"),
        ({"attn_soft_cap": 0.0}, "--model.attn-soft-cap must be positive and finite"),
        ({"logit_soft_cap": -1.0}, "--model.logit-soft-cap must be positive"),
        ({"learned_positions": 0}, "--model.learned-positions must be at least 1"),
        ({"embed_scale": float("inf")}, "--model.embed-scale must be positive and fin"),
    ],
)
def test_impossible_options_of_families_are_refused(changes, says) -> None:
    with pytest.raises(ValueError, match=says):
        ModelConfig(**changes)
