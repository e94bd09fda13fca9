"""Time the candidates that passed the compile gate, each kernel by itself.

A part like those of the report, for `scripts.kernels.tune_attention`.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mjax.kernels.attention.mosaic_gpu.forward import forward
from mjax.kernels.attention.tuning import MOSAIC_H200
from scripts.evidence import BENCHMARKS_DIR, Table
from scripts.gpu.candidates import (
    Candidate,
    abstract_arguments,
    make_problem,
    parse,
    program,
)
from scripts.gpu.cells import fixed, geometric_mean, outcome
from scripts.gpu.setting import Part, Program, Row, Setting, SkippedError
from scripts.gpu.timing import INPUT_SETS, Timing, time_calls

CANDIDATES_PATH = BENCHMARKS_DIR / "attention_candidates.json"
"""File with the verdicts of the compile gate."""

PART = Part(
    name="tuning",
    title="Sizes of the attention kernels",
    path="scripts.gpu.tuning_times",
    timeout_s=150,
    processes=6,
)

SEQ_LEN, BATCH, WIDTH = 8192, 4, 2048
WINDOWS = (1024, None)
"""Windows that are timed: the most common one of training, and the one with the most
work."""


def read_candidates(path: Path = CANDIDATES_PATH) -> list[Candidate]:
    """Return the candidates that may be timed.

    Raises:
      ValueError: there is no such list.
    """
    if not path.exists():
        raise ValueError(
            f"there is no {path}: make it with "
            "python -m scripts.kernels.tune_attention --prune-only, which needs no GPU"
        )
    verdicts = json.loads(path.read_text())["verdicts"]
    return [parse(v["name"]) for v in verdicts if v["fault"] is None]


def cases(small: bool) -> dict[str, Candidate]:
    """List the candidates by name: width 128 first, and shipped sizes before others.

    No candidate is chosen without the time of the shipped sizes.
    """

    def order(candidate: Candidate) -> tuple[bool, int]:
        shipped = getattr(MOSAIC_H200[candidate.head_dim], candidate.kernel)
        return candidate.config != shipped, -candidate.head_dim

    listed = sorted(read_candidates(), key=order)
    return {candidate.name: candidate for candidate in listed}


def process_of(case: Candidate) -> str:
    """Let all share a process."""
    return "jax"


def kind_of(case: Candidate) -> str:
    """Return the kernel and head width as one key."""
    return f"{case.kernel} D={case.head_dim}"


def programs(case: Candidate, setting: Setting) -> dict[str, Program]:
    """Return the kernel with each window, as it is timed."""
    if setting.small:
        raise SkippedError("a kernel for Hopper runs on no CPU")
    found = {}
    for window in WINDOWS:
        problem = _problem(case, window)
        args = abstract_arguments(case, problem, batch=BATCH)
        label = str(window or "full")
        found[label] = Program(function=program(case, problem), args=args)
    return found


@functools.cache
def _forward_pass(head_dim: int, window: int | None) -> Callable[..., Any]:
    """Compile q, k, v, d_out -> log-sum-exp and delta of the true positions."""
    shipped = Candidate(
        kernel="forward", head_dim=head_dim, config=MOSAIC_H200[head_dim].forward
    )
    problem = _problem(shipped, window)
    shape = (BATCH, SEQ_LEN, problem.heads, head_dim)

    def run(q: Any, k: Any, v: Any, d_out: Any) -> tuple[jax.Array, jax.Array]:
        out, lse = forward(q, k, v, None, problem=problem, tuning=shipped.config)
        product = out.astype(jnp.float32) * d_out.astype(jnp.float32)
        return lse[:, :, :SEQ_LEN], product.sum(-1).transpose(0, 2, 1)

    array = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return jax.jit(run).lower(array, array, array, array).compile()


@functools.cache
def _shared(head_dim: int, window: int | None, seed: int) -> tuple[jax.Array, ...]:
    """Return q, k, v, d_out, and the log-sum-exp and delta of the true positions."""
    shape = (BATCH, SEQ_LEN, WIDTH // head_dim, head_dim)
    keys = jax.random.split(jax.random.key(seed), 4)
    drawn = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    return (*drawn, *_forward_pass(head_dim, window)(*drawn))


def _problem(candidate: Candidate, window: int | None) -> Any:
    heads = WIDTH // candidate.head_dim
    return make_problem(
        candidate, seq_len=SEQ_LEN, window=window, heads=heads, kv_heads=heads
    )


def measure(case: Candidate, setting: Setting) -> Row:
    """Time a candidate with each window."""
    found = programs(case, setting)
    compiled = {
        label: jax.jit(p.function).lower(*p.args).compile()
        for label, p in found.items()
    }
    for window in WINDOWS:
        _forward_pass(case.head_dim, window)
    with setting.exclusive():
        timings = {
            str(window or "full"): _time(case, window, compiled[str(window or "full")])
            for window in WINDOWS
        }
    times = {label: timing.median_ms for label, timing in timings.items()}
    return {
        "ms": times,
        "median_ms": geometric_mean(list(times.values())),
        "spread": max(timing.spread for timing in timings.values()),
    }


def _time(case: Candidate, window: int | None, function: Callable[..., Any]) -> Timing:
    rest = _problem(case, window).padded_len - SEQ_LEN
    sets = []
    for seed in range(INPUT_SETS):
        q, k, v, d_out, lse, delta = _shared(case.head_dim, window, seed)
        # Values past the end as the kernels need them: a query there sees no key.
        lse = jnp.pad(lse, ((0, 0), (0, 0), (0, rest)), constant_values=math.inf)
        delta = jnp.pad(delta, ((0, 0), (0, 0), (0, rest)))
        backward = (q, k, v, d_out, lse, delta)
        sets.append((q, k, v) if case.kernel == "forward" else backward)
    jax.block_until_ready(sets)
    return time_calls(lambda i: function(*sets[i]), jax.block_until_ready)


def tables(rows: Mapping[str, Row], small: bool) -> list[Table]:
    """Return a table for each kernel and head width, the fastest first."""
    by_kernel: dict[tuple[str, int], list[str]] = {}
    for name, case in cases(small).items():
        by_kernel.setdefault((case.kernel, case.head_dim), []).append(name)

    def line(name: str) -> list[str]:
        row = rows.get(name, {})
        times = row.get("ms", {})
        spread = row.get("spread")
        return [
            name,
            outcome(row, "median_ms", 4),
            *(fixed(times.get(str(window or "full")), 4) for window in WINDOWS),
            "-" if spread is None else f"{100 * spread:.1f}",
        ]

    def order(name: str) -> float:
        return rows.get(name, {}).get("median_ms", math.inf)

    return [
        Table(
            title=f"{kernel}, D = {head_dim}",
            text=(
                f"Milliseconds; {BATCH} x {SEQ_LEN} tokens, {WIDTH // head_dim} heads."
            ),
            header=("candidate", "geometric mean", "W=1024", "full", "spread %"),
            rows=[line(name) for name in sorted(names, key=order)],
        )
        for (kernel, head_dim), names in by_kernel.items()
    ]
