"""Time of each attention kernel, as CUPTI reports it.

The part `attention` times whole calls; this one lists their kernels. Memory fills are
not kernels and not in these times.
"""

import statistics
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental.mosaic.gpu import profiler

from scripts.evidence import Table
from scripts.gpu import attention
from scripts.gpu.attention import Case
from scripts.gpu.cells import fixed, outcome
from scripts.gpu.setting import Program, Row, Setting, SkippedError

ITERATIONS = 10
_PICKED = (
    "T=8192 W=1024 D=128 GQA=1",
    "T=8192 W=full D=128 GQA=1",
    "T=8192 W=1024 D=64 GQA=1",
    "T=8192 W=1024 D=128 GQA=8",
)


def cases(small: bool) -> dict[str, Case]:
    """List forward with backward, ours and cuDNN, at some shapes."""
    every = attention.cases(small)
    shapes = [attention.shapes(True)[0].name] if small else _PICKED
    names = [f"{s} | {c} | both" for s in shapes for c in ("ours", "cudnn")]
    return {name: every[name] for name in names}


process_of = attention.process_of
kind_of = attention.kind_of


def programs(case: Case, setting: Setting) -> dict[str, Program]:
    """Return the program that `attention` times."""
    return attention.programs(case, setting)


def measure(case: Case, setting: Setting) -> Row:
    """Run the program several times under CUPTI; return the median of each kernel."""
    if setting.small:
        raise SkippedError("CUPTI sees GPUs only")
    program = programs(case, setting)[""]
    timed = profiler.measure(
        jax.jit(program.function), aggregate=False, iterations=ITERATIONS
    )
    _, runs = timed(*program.inputs(0))
    if not runs:
        raise RuntimeError("CUPTI saw no kernel")
    return {"kernels": medians(runs)}


def medians(runs: list[list[tuple[str, float]]]) -> list[tuple[str, float]]:
    """Return the kernels of a run, in order, each with its median milliseconds."""
    return [
        (kernels[0][0], statistics.median(ms for _, ms in kernels))
        for kernels in zip(*runs, strict=True)
    ]


def tables(rows: Mapping[str, Row], small: bool) -> list[Table]:
    """Return one table, a line for each kernel."""
    lines = []
    for name in cases(small):
        row: Mapping[str, Any] = rows.get(name, {})
        kernels = row.get("kernels", [])
        if not kernels:
            lines.append([name, outcome(row, "kernels", 0), "-"])
        lines += [[name, kernel[:60], fixed(ms, 3)] for kernel, ms in kernels]
        if kernels:
            lines.append([name, "all", fixed(sum(ms for _, ms in kernels), 3)])
    return [
        Table(
            title="Kernels of forward and backward",
            text=f"Milliseconds, medians of {ITERATIONS} runs, from CUPTI.",
            header=("call", "kernel", "ms"),
            rows=lines,
        )
    ]
