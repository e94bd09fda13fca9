"""Attainable rates of the machine: matmuls and copies."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from scripts.evidence import Table
from scripts.gpu.cells import outcome
from scripts.gpu.setting import Program, Row, Setting
from scripts.gpu.timing import INPUT_SETS, time_calls


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A GEMM with m = n = k = size, or a pass over `size` numbers of 4 bytes."""

    kind: str
    """gemm, copy or add."""
    size: int
    small_size: int
    """True to rehearse on a CPU with tiny sizes."""


GEMM = Case(kind="gemm", size=8192, small_size=64)
_LARGE_GEMM = Case(kind="gemm", size=16_384, small_size=96)
_COPY = Case(kind="copy", size=2**29, small_size=2**12)
_ADD = Case(kind="add", size=2**29, small_size=2**12)


def cases(small: bool) -> dict[str, Case]:
    """List the ceilings."""
    return {
        "bfloat16 GEMM, 8192 cubed": GEMM,
        "bfloat16 GEMM, 16384 cubed": _LARGE_GEMM,
        "copy of 2 GiB": _COPY,
        "2 GiB plus one": _ADD,
    }


def process_of(case: Case) -> str:
    """Run all cases in one process."""
    return "jax"


def kind_of(case: Case) -> str:
    """Return the kind of a ceiling."""
    return case.kind


def programs(case: Case, setting: Setting) -> dict[str, Program]:
    """Return the one program of a ceiling."""
    n = case.small_size if setting.small else case.size
    if case.kind == "gemm":
        x = jax.ShapeDtypeStruct((n, n), jnp.bfloat16)
        return {"": Program(function=jnp.matmul, args=(x, x))}
    x = jax.ShapeDtypeStruct((n,), jnp.float32)
    function = jnp.copy if case.kind == "copy" else (lambda x: x + 1.0)
    return {"": Program(function=function, args=(x,))}


def jax_calls(
    program: Program, function: Callable[..., Any] | None = None
) -> tuple[Callable[[int], Any], Callable[[Any], Any]]:
    """Draw inputs for a program; return the arguments of `time_calls`.

    Args:
      program: to be called.
      function: its function under jax.jit, if it exists already.
    """
    compiled = jax.jit(program.function) if function is None else function
    sets = [program.inputs(seed) for seed in range(INPUT_SETS)]
    jax.block_until_ready(sets)
    return lambda i: compiled(*sets[i]), jax.block_until_ready


def measure(case: Case, setting: Setting) -> Row:
    """Time one ceiling: TFLOP/s, or GB/s of bytes read and written."""
    call, wait = jax_calls(programs(case, setting)[""])
    timing = time_calls(call, wait)
    n = case.small_size if setting.small else case.size
    seconds = timing.median_ms / 1e3
    if case.kind == "gemm":
        rate = {"tflops": 2 * n**3 / seconds / 1e12}
    else:
        rate = {"gb_per_s": 2 * 4 * n / seconds / 1e9}
    return {**dataclasses.asdict(timing), **rate}


def tables(rows: Mapping[str, Row], small: bool) -> list[Table]:
    """Return one table."""

    def line(name: str, case: Case) -> list[str]:
        row = rows.get(name, {})
        rate = "tflops" if case.kind == "gemm" else "gb_per_s"
        unit = "TFLOP/s" if case.kind == "gemm" else "GB/s"
        return [name, outcome(row, "median_ms", 3), f"{outcome(row, rate, 0)} {unit}"]

    return [
        Table(
            title="Ceilings",
            text="Random inputs; GB/s count bytes read and bytes written.",
            header=("what", "ms", "rate"),
            rows=[line(name, case) for name, case in cases(small).items()],
        )
    ]
