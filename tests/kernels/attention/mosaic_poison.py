"""Attention with NaN in hidden positions: the results must stay finite.

`run` is called in the worker of `tests.kernels.interpreter`. A kernel that visits
a hidden block is detected, because a hidden NaN times a probability of 0 is NaN.
"""

import jax
import jax.numpy as jnp

from mjax.kernels.attention.mosaic_gpu.op import attention
from mjax.kernels.attention.tuning import MOSAIC_H200
from tests.kernels.interpreter import completion

T, WINDOW, H = 320, 64, 64
FUNCTION = f"{__name__}:run"


def run(segments: bool) -> dict[str, bool]:
    """Return for each result whether it is finite at the positions that see no NaN.

    Args:
      segments: whether documents hide the NaN, instead of the window.
    """
    window = None if segments else WINDOW
    ids = jnp.asarray([[0] * 128 + [1] * 128 + [2] * 64], jnp.int32)

    def attend(q, k, v):
        return attention(
            *(q, k, v, ids if segments else None),
            window=window,
            scale=H**-0.5,
            soft_cap=None,
            tuning=MOSAIC_H200[H],
        )

    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, d_out = (jax.random.normal(x, (1, T, 1, H), jnp.bfloat16) for x in keys)
    early, late = slice(0, 128), slice(256, T)

    def poisoned(x, where):
        return x.at[:, where].set(jnp.nan)

    with completion.interpreter():
        # The last tile of queries is two blocks away from these keys, and three.
        out, pull = jax.vjp(attend, q, poisoned(k, early), poisoned(v, early))
        dq, _, _ = pull(d_out)
        _, pull = jax.vjp(attend, poisoned(q, late), k, v)
        _, dk, dv = pull(poisoned(d_out, late))
        jax.block_until_ready((out, dq, dk, dv))
    return {
        "out": bool(jnp.isfinite(out[:, late]).all()),
        "dq": bool(jnp.isfinite(dq[:, late]).all()),
        "dk": bool(jnp.isfinite(dk[:, early]).all()),
        "dv": bool(jnp.isfinite(dv[:, early]).all()),
        "the NaN is there": bool(jnp.isnan(out[:, early]).any()),
    }
