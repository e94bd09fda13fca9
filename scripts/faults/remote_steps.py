"""Time the steps of a process while it uploads checkpoints, and while it does not.

    AWS_ENDPOINT_URL=... .venv-stores/bin/python -m scripts.faults.remote_steps

Prints one JSON object per pair of measurements. For each pair a state is saved and
committed in the work dir. Steps are timed until the upload of the state has ended, and
as many steps after that. A step is a chain of matmuls on one CPU device.
"""

import json
import os
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mjax.ckpt.config import CkptConfig
from mjax.ckpt.manager import Checkpoints

PAIRS = 12
_LEAVES, _ROWS, _COLUMNS = 8, 2048, 1024
_STEP_ROWS, _CHAIN = 512, 6


@jax.jit
def _step(x: jax.Array, w: jax.Array) -> jax.Array:
    for _ in range(_CHAIN):
        x = jnp.tanh(x @ w)
    return x


def _timed(x: jax.Array, w: jax.Array) -> float:
    started_s = time.perf_counter()
    _step(x, w).block_until_ready()
    return time.perf_counter() - started_s


def main() -> None:
    rng = np.random.default_rng(0)
    state = {
        f"leaf{i}": jnp.asarray(rng.normal(size=(_ROWS, _COLUMNS)), jnp.float32)
        for i in range(_LEAVES)
    }
    x = jnp.asarray(rng.normal(size=(_STEP_ROWS, _STEP_ROWS)), jnp.float32)
    _timed(x, x)
    with tempfile.TemporaryDirectory() as folder:
        url = f"s3://bucket/steps-{os.getpid()}"
        manager = Checkpoints(Path(folder), CkptConfig(remote=url, keep=2))
        manager.newest()
        manager.claim("", 0)
        for pair in range(1, PAIRS + 1):
            manager.save(pair, lambda: state, {})
            assert manager.wait()
            before_s = time.process_time()
            called_s = time.perf_counter()
            manager.attempts()  # here the training thread wakes the uploader
            called_s = time.perf_counter() - called_s
            during: list[float] = []
            while not (uploads := manager.uploads()):
                during.append(_timed(x, x))
            during_cpu_s = time.process_time() - before_s
            before_s = time.process_time()
            after = [_timed(x, x) for _ in during]
            cpu_s = during_cpu_s - (time.process_time() - before_s)
            row = {
                "during_s": during,
                "after_s": after,
                "called_s": called_s,
                "upload_cpu_s": cpu_s,
                "num_bytes": uploads[0].num_bytes,
                "upload_s": uploads[0].upload_s,
            }
            assert uploads[0].error is None, uploads[0].describe()
            print(json.dumps(row), flush=True)
        manager.close()


if __name__ == "__main__":
    main()
