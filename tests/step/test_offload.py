"""Inputs of layers in host memory: the gradients have the bits of remat full."""

import dataclasses
import types
from typing import Any

import jax
import numpy as np
import pytest

from mjax.model.config import ModelConfig
from tests.training import (
    ONE_DEVICE,
    TINY,
    Layout,
    compile_gradients,
    make_batch,
    make_program,
)


def loss_and_gradients(layout: Layout, model: ModelConfig) -> Any:
    program = make_program(layout, model)
    state, batch = program.init(), make_batch(program, 0)
    return compile_gradients(program)(state.params, state.rng, state.step, batch)


@pytest.mark.parametrize(
    ("layout", "layers", "window", "horizon"),
    [
        # Two kinds of layer, all in the loop.
        (ONE_DEVICE, 4, (6, None), 3),
        # The layer after the loop keeps its input on the device.
        (Layout((1, 1, 2, 1), zero=2), 4, (6,), 2),
        # Two layers after the loop: one keeps its input, one loads it again.
        pytest.param(
            *(Layout((1, 2, 2, 1), zero=2, microbatches=2), 6, (6, None), 1),
            marks=pytest.mark.slow,
        ),
        # No loop: every layer has its own kind.
        pytest.param(
            *(Layout((1, 1, 2, 2), zero=3), 3, (6, None, 9), 1), marks=pytest.mark.slow
        ),
    ],
    ids=["one device", "sharded", "microbatches", "no loop"],
)
def test_gradients_have_the_bits_of_remat_full(layout, layers, window, horizon):
    model = dataclasses.replace(TINY, layers=layers, window=window)
    offload = dataclasses.replace(model, remat="offload", offload_horizon=horizon)
    got, want = (loss_and_gradients(layout, m) for m in (offload, model))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_step_with_stamps_is_traced_where_nothing_is_kept_on_the_device():
    """A stamp waits for an array on the device."""
    model = dataclasses.replace(TINY, remat="offload")
    assert make_program(ONE_DEVICE, model, stamps=True).trace() is not None


def test_devices_without_host_memory_are_refused_before_tracing(monkeypatch):
    device = type(jax.devices()[0])
    only = [types.SimpleNamespace(kind="device")]
    monkeypatch.setattr(device, "addressable_memories", lambda _: only)
    model = dataclasses.replace(TINY, remat="offload")
    with pytest.raises(
        ValueError, match=r"--model.remat offload needs .* has only device; use --model"
    ):
        make_program(ONE_DEVICE, model)
    assert make_program(ONE_DEVICE) is not None
