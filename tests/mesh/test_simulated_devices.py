"""Collectives of simulated devices meet their partners, call after call."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
    assert run.stdout.strip() == "20 calls, 1 results", run.stderr[-2000:]
