"""Transfers between stages hide behind both slots; compiles for H200s without one."""

import jax
import pytest

from scripts.hlo_schedule import read_bodies
from scripts.pipeline_overlap import CASES, compile_gradients, find_faults


@pytest.fixture(scope="module")
def program():
    return CASES[0].build()


@pytest.mark.plan
def test_transfers_stand_beside_every_product_of_the_steady_loop(program):
    bodies = read_bodies(compile_gradients(program))
    assert find_faults(bodies, program, CASES[0].sizes) == []


@pytest.mark.plan
def test_without_the_options_a_transfer_is_found_exposed(program):
    state = program.abstract_state
    default = jax.jit(program.gradients.__wrapped__).lower(
        state.params, state.rng, state.step, program.abstract_batch
    )
    text = default.compile().as_text()
    assert text is not None
    bodies = read_bodies(text)
    faults = find_faults(bodies, program, CASES[0].sizes)
    assert any("transfer" in fault for fault in faults)
