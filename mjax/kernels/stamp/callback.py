"""Append a row by a callback to the host, on CPU."""

import time

import jax
import numpy as np
from jaxtyping import Array, Int32, PyTree

UNIT_NS = 2**8


def append(
    log: Int32[Array, "rows 2"], tag: Int32[Array, "1"], values: PyTree
) -> Int32[Array, "rows 2"]:
    """Return the log with one more row, written after each value's first element."""
    first = [leaf[(0,) * leaf.ndim] for leaf in jax.tree.leaves(values)]
    return jax.pure_callback(_append, jax.typeof(log), log, tag, *first)


def _append(log: Array, tag: Array, *first: Array) -> np.ndarray:
    del first
    rows = np.array(log)
    rows[0, 0] += 1
    now = np.uint32(time.monotonic_ns() // UNIT_NS % 2**32).astype(np.int32)
    rows[min(rows[0, 0], len(rows) - 1)] = np.asarray(tag)[0], now
    return rows
