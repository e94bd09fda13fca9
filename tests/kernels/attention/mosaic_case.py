"""One case of the Mosaic GPU attention kernels: inputs, kernels, errors.

`run` is called in the worker of `tests.kernels.interpreter`, with the fields of `Case`.
"""

import contextlib
import dataclasses
import functools
import importlib
import math
import time
from collections.abc import Callable
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from mjax.kernels.attention.tuning import (
    FUSED_H200,
    MOSAIC_H200,
    MosaicTuning,
)
from tests.kernels.attention.mosaic_truth import Truth, truth
from tests.kernels.interpreter import completion
from tests.kernels.interpreter.source_change import changed

FUNCTION = f"{__name__}:run"
PACKAGE = "mjax.kernels.attention.mosaic_gpu"
Segments = Literal["sorted", "edge", "tokens", "last"]
Logits = Literal["drift", "saturated"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes, options and inputs of one call, forward and backward."""

    T: int
    B: int = 1
    N: int = 1
    K: int = 1
    H: int = 64
    """Width of queries and keys; the width of values is that of the tuning."""
    causal: bool = True
    prefixes: tuple[int, ...] | None = None
    """Length of the prefix of each sequence of the batch."""
    window: int | None = None
    segments: Segments | None = None
    soft_cap: float | None = None
    dtype: str = "bfloat16"
    scale: float | None = None
    logits: Logits | None = None
    """Name of the logits that `make_logits` adds to the random ones; None adds
    nothing."""
    kernel: Literal["forward", "dq", "dkv", "fused"] | None = None
    """The only kernel that runs; it gets exact results of the others. None runs
    forward, dq and dkv."""
    cached_bytes: int | None = None
    """Bytes that a section of heads may walk; None uses the shipped limit, which puts
    all heads in one section."""
    parts: int | None = None
    """Parts of a group of query heads, for dkv; None uses the shipped number."""
    tuning: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    """Kernel -> fields of `MosaicKernel` that differ from the shipped ones."""


def make_segments(kind: Segments, B: int, T: int) -> jax.Array:
    """Return segment ids [B, T].

    sorted: documents of random lengths. edge: documents that end at multiples of 64.
    tokens: each its own document. last: the last 64 positions are one, so that the
    warpgroups of a tile see many blocks or one.
    """
    random = np.random.default_rng(T)
    ids = {
        "sorted": np.sort(random.integers(0, 4, (B, T)), axis=1),
        "edge": np.broadcast_to(np.arange(T) // 64, (B, T)),
        "tokens": np.broadcast_to(np.arange(T), (B, T)),
        "last": np.broadcast_to(np.arange(T) >= T - 64, (B, T)),
    }[kind]
    return jnp.asarray(ids, jnp.int32)


def make_logits(case: Case, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the first two columns of q [T, 2] and of k [T, 2].

    They add to the logits, natural ones before the soft cap:

    drift: by the query, modulo 4: nothing; up to 300 towards the first key of the
    window, so that every block exceeds the ones nearer to the diagonal; -400, the same
    for all keys; up to 300 towards the diagonal.

    saturated: 8 to 12 soft caps, by the key; for each eighth query, below zero.
    """
    i, size = np.arange(case.T), 50.0
    q, k = np.zeros((2, case.T, 2))
    if case.logits == "drift":
        span = case.T if case.window is None else min(case.window, case.T)
        k[:, 0] = size * (1 - i / span)  # falls along T
        k[:, 1] = size
        q[i % 4 == 1, 0] = 300 / (size * scale)
        q[i % 4 == 2, 1] = -400 / (size * scale)
        q[i % 4 == 3, 0] = -300 / (size * scale)
    if case.logits == "saturated":
        assert case.soft_cap is not None, "only a soft cap saturates"
        k[:, 0] = 8 + i % 5
        q[:, 0] = np.where(i % 8 == 0, -1, 1) * case.soft_cap / scale
    return q, k


def make_inputs(case: Case) -> tuple[Any, ...]:
    """Return q, k, v, d_out, segment ids or None, and the other options."""
    B, T, N, K, H = case.B, case.T, case.N, case.K, case.H
    rng = np.random.default_rng(T)
    # The truth alone also takes widths that no kernel has.
    Hv = H if H not in MOSAIC_H200 else MOSAIC_H200[H].value_dim or H
    q, k, v, d_out = (
        rng.standard_normal((B, T, heads, width))
        for heads, width in ((N, H), (K, H), (K, Hv), (N, Hv))
    )
    scale = case.scale or 1 / math.sqrt(H)
    if case.logits is not None:
        for x, columns in zip((q, k), make_logits(case, scale), strict=True):
            x[..., :2] = columns[:, None]
    arrays = (jnp.asarray(x, case.dtype) for x in (q, k, v, d_out))
    segment_ids = case.segments and make_segments(case.segments, B, T)
    prefix_len = case.prefixes and jnp.asarray(case.prefixes, jnp.int32)
    options = {
        **{"causal": case.causal, "prefix_len": prefix_len, "window": case.window},
        **{"scale": scale, "soft_cap": case.soft_cap},
    }
    return *arrays, segment_ids, options


def run(
    change: tuple[str, list[tuple[str, str]]] | None = None, **fields: Any
) -> dict[str, Any]:
    """Compute one case.

    Args:
      change: of the kernels' source: a module of the package, and edits.
      fields: of `Case`.

    Returns:
      errors: of each result in units of what rounding explains.
      seconds: of the kernels, with tracing and compilation.
    """
    if change is None:
        return _run(Case(**fields))
    module, edits = change
    with changed(f"{PACKAGE}.{module}", edits):
        return _run(Case(**fields))


def _run(case: Case) -> dict[str, Any]:
    # Imported here, so that it is the changed source if there is a change.
    op = importlib.import_module(f"{PACKAGE}.op")
    q, k, v, d_out, segment_ids, options = make_inputs(case)

    def attend(q, k, v):
        return op.attention(q, k, v, segment_ids, tuning=_tuning(case), **options)

    want = truth(q, k, v, d_out, segment_ids, **options)
    start = time.perf_counter()
    got = {}
    with completion.interpreter(), contextlib.ExitStack() as patches:
        if case.cached_bytes is not None:
            tiles = importlib.import_module(f"{PACKAGE}.tiles")
            small = {"_CACHED_BYTES": case.cached_bytes, "_LEAST_SECTION": 1}
            patches.enter_context(mock.patch.dict(vars(tiles), small))
        if case.parts is not None:
            split = functools.partial(op.key_value_gradients, parts=case.parts)
            patches.enter_context(mock.patch.object(op, "key_value_gradients", split))
        for name, function in _stand_ins(case, want).items():
            patches.enter_context(mock.patch.object(op, name, function))
        forward = _Record(op.forward)
        patches.enter_context(mock.patch.object(op, "forward", forward))
        got["out"], pull = jax.vjp(attend, q, k, v)
        got["lse"] = forward.result[1][..., : case.T]
        if case.kernel != "forward":
            got["dq"], got["dk"], got["dv"] = pull(d_out)
        jax.block_until_ready(got)
    seconds = time.perf_counter() - start
    for name, like in (("out", q), ("dq", q), ("dk", k), ("dv", v)):
        if name in got:
            assert got[name].dtype == like.dtype, name
    if case.kernel:
        got = {name: got[name] for name in _RESULTS[case.kernel]}
    return {"errors": want.errors(got), "seconds": seconds}


_RESULTS = {
    "forward": ("out", "lse"),
    "dq": ("dq",),
    "dkv": ("dk", "dv"),
    "fused": ("dq", "dk", "dv"),
}


def _stand_ins(case: Case, want: Truth) -> dict[str, Callable]:
    """Return replacements for the functions of `op` whose kernels must not run."""

    def forward(q, k, v, *edges, problem, tuning):
        rest = problem.padded_len - case.T
        lse = np.pad(
            want.values["lse"], ((0, 0), (0, 0), (0, rest)), constant_values=np.inf
        )
        # What was added for whole tiles of 8 rows.
        rows = (0, problem.seq_len - case.T)
        out = np.pad(want.values["out"], ((0, 0), rows, (0, 0), (0, 0)))
        return jnp.asarray(out, q.dtype), jnp.asarray(lse, jnp.float32)

    replaced = {}
    if case.kernel in ("dq", "dkv", "fused"):
        replaced["forward"] = forward
    if case.kernel == "dq":
        replaced["key_value_gradients"] = lambda q, k, v, *_, **__: (0 * k, 0 * v)
    if case.kernel == "dkv":
        replaced["query_gradient"] = lambda q, *_, **__: 0 * q
    return replaced


def _tuning(case: Case) -> MosaicTuning:
    shipped = MOSAIC_H200[case.H]
    if case.kernel == "fused":
        shipped = dataclasses.replace(shipped, fused=FUSED_H200[case.H])
    kernels = {
        name: dataclasses.replace(getattr(shipped, name), **fields)
        for name, fields in case.tuning.items()
    }
    return dataclasses.replace(shipped, **kernels)


class _Record:
    """Keeps the last result of a function: the operator does not return lse."""

    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, *args, **kwargs):
        self.result = self.function(*args, **kwargs)
        return self.result
