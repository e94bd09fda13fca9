"""Where operations of a compiled step come from."""

from pathlib import Path

import jax
import jax.numpy as jnp

from mjax.plan.hlo.parse import short_name
from mjax.plan.operations import are_tracked, places_of


def attend(x):
    return jnp.tanh(x @ x).sum()


def test_operations_of_a_compiled_step_are_named_after_the_traced_one():
    step = jax.jit(jax.grad(attend)).lower(jnp.ones((8, 8), "float32")).compile()
    ((program, places),) = places_of(step.as_text() or "").items()
    assert program == "jit_attend"
    assert any("transpose(jvp" in place for place in places.values())
    assert not any("/body/" in place for place in places.values())


def test_of_nested_phases_the_innermost_is_shown_and_no_position():
    scopes = "phase.forward/shard_map/microbatch.0/phase.backward/layers.3.-1.4/while"
    name = f"jit(train_step)/{scopes}/body/place.0/transpose(jvp())/mul"
    assert short_name(name) == "phase.backward/transpose(jvp())/mul"


def test_xla_tracks_operations_where_it_is_asked_to():
    flag = "--xla_gpu_execution_progress_tracking=8"
    assert are_tracked({"XLA_FLAGS": f"--xla_gpu_autotune_level=0 {flag}"})
    assert not are_tracked({})


def test_collectives_of_a_program_for_gpus_have_a_place():
    # Compiled for H200s by jax 0.11.2.
    recorded = Path(__file__).parent / "recorded" / "layers.txt"
    ((_, places),) = places_of(recorded.read_text()).items()
    starts = [place for name, place in places.items() if "-start" in name]
    assert {"jit(step)/all_gather", "jit(step)/reduce_scatter"} <= {*starts}
