"""Cases of the Mosaic GPU backward pass of norms, and bugs planted in it.

A case is interpreted in a worker of `tests.kernels.interpreter`, which looks for races
and fills memory that has not been written with NaN.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mjax.kernels.layer_norm import reference
from tests.kernels.interpreter import completion
from tests.kernels.interpreter.source_change import changed

MODULE = "mjax.kernels.layer_norm.mosaic_gpu"
EPS = 1e-3

CASES: dict[str, dict[str, Any]] = {
    "LayerNorm": {"n": 7, "D": 1536, "blocks": 3, "stages": 2},
    "RMSNorm": {"n": 7, "D": 512, "blocks": 3, "stages": 2, "centred": False},
    "float16": {"n": 4, "D": 256, "blocks": 2, "stages": 2, "dtype": "float16"},
    "pieces of four rows": {"n": 5, "D": 2048, "blocks": 2, "stages": 2},
    "one position": {"n": 1, "D": 256, "blocks": 4, "stages": 2},
    "more stages than positions": {"n": 2, "D": 256, "blocks": 1, "stages": 4},
    "one stage": {"n": 4, "D": 256, "blocks": 1, "stages": 1},
    "a large mean": {"n": 3, "D": 512, "blocks": 1, "stages": 2, "mean": 100.0},
}

BUGS: dict[str, tuple[str, str]] = {
    "does not wait for the copy in": (
        "            plgpu.barrier_wait(full.at[slot])\n",
        "",
    ),
    "does not wait for the scale": ("        plgpu.barrier_wait(scale_full)\n", ""),
    "waits for two copies of three": ("num_arrivals=3", "num_arrivals=2"),
    "no fence before the copies": ("            plgpu.commit_smem()\n", ""),
    "overwrites a tile that is copied out": (
        "            plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n",
        "",
    ),
    "ends before the copy out": ("        plgpu.wait_smem_to_gmem(0)\n", ""),
    "a copy out in no group": (
        "dx_gmem.at[block + i * blocks])",
        "dx_gmem.at[block + i * blocks], commit_group=False)",
    ),
    "loads into the slot in use": (
        "load(i + (stages - 1), freed)",
        "load(i + (stages - 1), slot)",
    ),
    "loads a position twice": ("(i > 0) & (i +", "(i >= 0) & (i +"),
    "loads the position before": (
        "block + i * blocks\n            for",
        "i\n            for",
    ),
    "skips the last position": ("n - block + (blocks - 1)", "n - block - 1"),
    "leaves the residual stream out": (" + wide(g_x, piece)", ""),
    "does not centre the gradient": ("(scaled(piece) - mean_g", "(scaled(piece)"),
    "sums the scale's gradient unnormalised": ("(y * rstd)", "y"),
    "mean over a piece": ("(1 / width)", "(1 / (step * LANE))"),
    "epsilon outside the root": ("lax.rsqrt(square + eps)", "lax.rsqrt(square) + eps"),
    "adds the sums of the first block only": (".sum(0)", "[0]"),
}


def errors(name: str, bug: str | None = None) -> list[float]:
    """Return the errors of dx and d_scale, each over its largest entry.

    Args:
      name: name in `CASES`.
      bug: name in `BUGS`; None runs the unchanged kernel.
    """
    with changed(MODULE, [] if bug is None else [BUGS[bug]]):
        kernel = importlib.import_module(MODULE)
        return _errors(kernel, **CASES[name])


def _errors(
    kernel: Any,
    *,
    n: int,
    D: int,
    blocks: int,
    stages: int,
    centred: bool = True,
    dtype: str = "bfloat16",
    mean: float = 0.5,
) -> list[float]:
    keys = jax.random.split(jax.random.key(n + D), 4)
    x, g, g_x = (jax.random.normal(k, (n, D)).astype(dtype) for k in keys[:3])
    x = (x + jnp.asarray(mean, dtype)).astype(dtype)
    scale = jax.random.normal(keys[3], (D,)).astype(dtype)
    tuning = kernel.MosaicTuning(blocks=blocks, stages=stages)
    statics = {"centred": centred, "eps": EPS}
    with completion.interpreter():
        got = kernel.backward(x, scale, g, g_x, tuning=tuning, **statics)
        got = jax.block_until_ready(got)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return reference.norm(x, scale, None, **statics)

    wide = [a.astype(jnp.float32) for a in (x, scale, g, g_x)]
    dx, d_scale = jax.vjp(norm, *wide[:2])[1](wide[2])
    pairs = zip(got, (dx + wide[3], d_scale), strict=True)
    return [
        float(np.abs(np.asarray(a, np.float32) - b).max() / np.abs(b).max())
        for a, b in pairs
    ]
