"""Collectives of simulated devices meet their partners, call after call."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mjax.config.command_line import parse
from mjax.mesh.axes import resolve
from mjax.mesh.build import build_mesh
from mjax.recipes import RECIPES
from mjax.step.traced import program_of
from tests.mesh.unordered import unordered

ROOT = Path(__file__).parents[2]


def test_the_collectives_of_gradients_have_one_order():
    flags = "--recipe debug --batch.microbatches 2 --mesh.tp 2 --model.layers 4"
    flags += " --precision.compute float32 --model.remat none"
    config, _ = parse(flags.split(), RECIPES, "test")
    program = program_of(config, build_mesh(resolve(config.mesh, 8)))
    state = program.abstract_state
    lowered = program.gradients.lower(
        state.params, state.rng, state.step, program.abstract_batch
    )
    assert unordered(str(lowered.compile().as_text())) == []


@pytest.mark.slow
def test_gradients_can_be_called_again_and_again_on_a_part_of_the_devices():
    flags = os.environ["XLA_FLAGS"]
    limit = "--xla_cpu_collective_call_terminate_timeout_seconds=60"
    run = subprocess.run(
        [sys.executable, "-m", "tests.mesh.repeat_gradients", "8", "4", "20"],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": f"{flags} {limit}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.strip() == "20 calls, 1 results, 0 pairs without an order", (
        run.stderr[-2000:]
    )
