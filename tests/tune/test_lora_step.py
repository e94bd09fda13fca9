"""A step that trains adapters alone: on any mesh, without work for the frozen base."""

import dataclasses

import jax
import numpy as np
import pytest

from mjax.config.optim import OptimConfig
from mjax.layers.adapters import ADAPTERS
from mjax.layers.config import AdapterConfig
from mjax.model.counts import flops_per_token, num_adapter_params, visible_pairs
from mjax.plan.hlo.counts import count_dot_flops
from tests.training import (
    EVERY_OPTION,
    LENGTH,
    ONE_DEVICE,
    ROWS,
    TINY,
    Layout,
    losses,
    make_batch,
    make_program,
)

ALL = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
ALL += ("mlp.w_in", "mlp.w_out")
LORA = AdapterConfig(rank=4, scale=2.0, targets=ALL)
GATED = dataclasses.replace(LORA, targets=(*ALL[:5], "mlp.w_gate", "mlp.w_out"))


def paths(tree) -> dict[str, jax.Array]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.fixture(scope="module")
def one_device() -> np.ndarray:
    return losses(make_program(ONE_DEVICE, EVERY_OPTION, adapters=GATED))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            Layout((1, 1, 2, 4), zero=2, microbatches=2), marks=pytest.mark.slow
        ),
        pytest.param(Layout((1, 1, 1, 8), zero=0), marks=pytest.mark.slow),
        Layout((1, 2, 2, 2), zero=3, microbatches=2),
        pytest.param(Layout((1, 1, 4, 1), zero=1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_adapters_on_a_mesh_have_the_losses_of_one_device(layout, one_device):
    """Also two key/value heads on four and eight tensor-parallel devices."""
    got = losses(make_program(layout, EVERY_OPTION, adapters=GATED))
    # float32 sums in another order over four steps
    np.testing.assert_allclose(got, one_device, rtol=1e-5)


def test_remat_does_not_change_adapters():
    want = losses(make_program(ONE_DEVICE, adapters=LORA))
    for remat in ("none", "dots"):
        model = dataclasses.replace(TINY, remat=remat)
        got = losses(make_program(ONE_DEVICE, model, adapters=LORA))
        np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=remat)


def test_new_adapters_change_nothing_and_the_base_is_drawn_as_without_them():
    plain, tuned = make_program(ONE_DEVICE), make_program(ONE_DEVICE, adapters=LORA)
    base, state = plain.init(), tuned.init()
    frozen = {p: x for p, x in paths(state.params).items() if ADAPTERS not in p}
    for path, leaf in paths(base.params).items():
        np.testing.assert_array_equal(frozen[path], leaf, err_msg=path)
    batch = make_batch(plain, 0)
    before = plain.eval_step(base.params, batch)["nll"]
    np.testing.assert_allclose(
        tuned.eval_step(state.params, batch)["nll"], before, rtol=1e-6
    )


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_only_adapters_move_and_only_they_have_moments(name):
    optimizer = OptimConfig(name=name, lr=1e-2, warmup_steps=1)
    program = make_program(ONE_DEVICE, optimizer=optimizer, adapters=LORA)
    before = paths(jax.device_get(program.init().params))
    state = program.init()
    for step in range(3):
        state, metrics = program.train_step(state, make_batch(program, step))
        assert int(metrics["skipped"]) == 0
    after = paths(jax.device_get(state.params))
    for path, leaf in after.items():
        assert np.isfinite(leaf).all()
        assert (leaf == before[path]).all() != (ADAPTERS in path), path
    num_trained = sum(x.size for p, x in after.items() if ADAPTERS in p)
    moments = jax.tree.leaves((state.opt_state["adam"].mu, state.opt_state["adam"].nu))
    assert sum(m.size for m in moments) == 2 * num_trained


@pytest.mark.parametrize("targets", [GATED.targets, ("attention.wk",)])
def test_the_flop_formula_agrees_with_the_dots_of_the_compiled_step(targets):
    """No gradient of a frozen weight is computed, and none is counted."""
    model = dataclasses.replace(
        TINY,
        window=(None,),
        kv_heads=4,
        activation="swiglu",
        attention="reference",
        remat="none",
        vocab_size=96,
    )
    lora = AdapterConfig(rank=4, scale=2.0, targets=targets)
    program = make_program(ONE_DEVICE, model, adapters=lora)
    hlo = str(program.trace().lower().compile().as_text())
    # The reference attention computes the full square, so it is counted.
    masked = LENGTH * LENGTH - visible_pairs(LENGTH, None)
    square = 3 * 4 * model.d_model * model.layers * masked / LENGTH
    expected = (flops_per_token(model, LENGTH, lora) + square) * ROWS * LENGTH
    # A gradient of the first layer's inputs is in the loop, as in the formula.
    assert count_dot_flops(hlo) == pytest.approx(expected, rel=0.02)
    full = (flops_per_token(model, LENGTH) + square) * ROWS * LENGTH
    assert count_dot_flops(hlo) < 0.9 * full


def test_parameters_of_adapters_are_counted():
    trained = make_program(ONE_DEVICE, adapters=LORA)
    leaves = jax.tree.leaves(trained.trained.of(trained.abstract_state.params))
    # Two layers; q, k, v, o of 32 x 32, and 32 x 64 and 64 x 32, with rank 4.
    assert num_adapter_params(TINY, LORA) == 2 * 4 * (4 * 64 + 2 * 96)
    assert num_adapter_params(TINY, LORA) == sum(leaf.size for leaf in leaves)
