"""Show the compiled code of every shipped kernel, on a machine without a GPU.

    python -m scripts.kernels.kernel_table
    python -m scripts.kernels.kernel_table --json
    python -m scripts.kernels.kernel_table --write

Needs the environment of `make env-plan`. Prints one Markdown table, or JSON, or writes
docs/benchmarks/kernel_table.md. Exits with 1 if a kernel does not compile, spills
registers, has matmuls that ptxas serialised, lacks the instructions it exists for,
takes more shared memory than a block has, or has a loop that is too long or in which
exponentials wait for matmuls.
"""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mjax.hardware.gpus import GPUS
from mjax.kernels.attention.mosaic_gpu.fused import gradients
from mjax.kernels.attention.mosaic_gpu.op import attention
from mjax.kernels.attention.mosaic_gpu.tiles import Problem
from mjax.kernels.attention.tuning import FUSED_H200, MOSAIC_H200
from mjax.kernels.layer_norm import mosaic_gpu, tuning
from scripts.evidence import Table, write_page
from scripts.kernels.compiled_kernels import (
    WATCHED,
    CaseReport,
    CompiledKernel,
    KernelCase,
    compile_cases,
)
from scripts.kernels.kernel_summary import of_kernels
from scripts.kernels.sass import LOOP_WATCHED, Loop

SHIPPED = "scripts.kernels.kernel_table:shipped_cases"
"""The cases of the table, for the process that compiles them."""

MOST_INSTRUCTIONS = 620
"""Maximum instructions of a loop without a soft cap."""
MOST_FUSED = 660
"""Maximum instructions of a loop of the fused backward kernel, which also computes a
fifth matmul and adds its result to the sums.
"""
FUSED_BARRIERS = 3
"""Maximum barriers of a loop of the fused kernel: after gradients of scores are stored,
and before and after the buffer of a dq block is rewritten.
"""
MOST_INSTRUCTIONS_OF = {192: 680}
"""Maximum instructions of a loop without a soft cap at other widths: at 192 the scores
of a block of 128 keys take four more matmuls than at 128, with the addresses of their
operands.
"""
MOST_INSTRUCTIONS_BOTH_SIDES = 640
"""Maximum instructions of a loop if documents or a prefix cut a row on both sides of
the diagonal: each block then makes the bits of a second edge.
"""
_PARTS = "8 heads a key, in parts"
"""Except the fused backward kernel, which never divides a group."""
HIDDEN_UNDER_CAP = 0.5
"""Least share of exponentials that overlap a matmul with a soft cap: it doubles them,
and in dkv up to half come before the matmul begins.
"""
_IN_PARTS = ("4 heads a key", _PARTS)
_LOOP_HEADER = (
    *("case", "kernel", "loop", "instructions", "exponentials under a product"),
    *(name for name in LOOP_WATCHED if name != "MUFU.EX2"),
)
_HEADER = (
    "case",
    "kernel",
    "registers",
    "spilled",
    "reloaded",
    "stack",
    "shared memory",
    *WATCHED,
    "compiled in",
)


def shipped_cases() -> dict[str, KernelCase]:
    """List every kernel configuration that a run can choose, by name."""
    return _attention_cases() | _norm_cases()


def _attention_cases() -> dict[str, KernelCase]:
    """List attention with its gradients: each tuning and each branch of the code.

    The number of positions is a constant of the kernels and adds no branch.
    """
    options: dict[str, dict[str, Any]] = {
        "window": {},
        "full": {"window": None},
        "segments": {"segments": True},
        "soft cap": {"soft_cap": 30.0},
        # Here dkv walks all query heads of a group; in the next case, half of them.
        "4 heads a key": {"heads": 32, "group": 4},
        _PARTS: {"heads": 16, "group": 8, "window": None},
        "all, 8 heads a key": {"segments": True, "soft_cap": 30.0, "group": 8},
        "not causal": {"causal": False, "window": None},
        "not causal, segments": {"causal": False, "segments": True},
        "prefix": {"prefix": True},
    }
    # Registers are scarcest at 128 and 256, so every combination is compiled there.
    # Register use does not depend on which of the two dtypes is used.
    everything = "all, 8 heads a key"
    some = {64: ("window", everything), 192: ("window", "full", everything)}
    # dkv of wide heads is not split into parts.
    wide = tuple(name for name in options if name not in _IN_PARTS)
    chosen = {128: tuple(options), 256: wide, **some}
    cases = {
        f"attention {H}, bfloat16, {name}": _attention_case(
            H, "bfloat16", **options[name]
        )
        for H in MOSAIC_H200
        for name in chosen.get(H, (everything,))
    }
    for H in MOSAIC_H200:
        cases[f"attention {H}, float16, window"] = _attention_case(H, "float16")
    # Causal only.
    not_fused = ("not causal", "not causal, segments", "prefix", _PARTS)
    for H in FUSED_H200:
        for name in (n for n in options if n not in not_fused):
            asked = options[name]
            cases[f"attention {H}, bfloat16, fused, {name}"] = _fused_case(H, **asked)
    return cases


def _attention_case(
    H: int,
    dtype: str,
    *,
    causal: bool = True,
    prefix: bool = False,
    window: int | None = 1024,
    segments: bool = False,
    soft_cap: float | None = None,
    heads: int = 8,
    group: int = 1,
) -> KernelCase:
    """Return attention and its gradients, for query heads of width H."""
    tuning = MOSAIC_H200[H]
    call = functools.partial(
        attention,
        causal=causal,
        window=window,
        scale=H**-0.5,
        soft_cap=soft_cap,
        tuning=tuning,
    )

    def with_gradients(q, k, v, segment_ids, prefix_len, d_out):
        def attend(q, k, v):
            return call(q, k, v, segment_ids, prefix_len=prefix_len)

        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(d_out)

    B, T, N, Hv = 1, 8192, heads, tuning.value_dim or H
    q, d_out = (
        jax.ShapeDtypeStruct((B, T, N, width), jnp.dtype(dtype)) for width in (H, Hv)
    )
    k, v = (
        jax.ShapeDtypeStruct((B, T, N // group, width), jnp.dtype(dtype))
        for width in (H, Hv)
    )
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32) if segments else None
    prefix_len = jax.ShapeDtypeStruct((B,), jnp.int32) if prefix else None
    most = MOST_INSTRUCTIONS_OF.get(H, MOST_INSTRUCTIONS)
    if prefix or (segments and not causal):
        most = max(most, MOST_INSTRUCTIONS_BOTH_SIDES)
    return KernelCase(
        function=with_gradients,
        args=(q, k, v, ids, prefix_len, d_out),
        hidden=1.0 if soft_cap is None else HIDDEN_UNDER_CAP,
        most_instructions=most if soft_cap is None else None,
        # Warpgroups that split the width synchronise once per block.
        most_barriers=int(tuning.dkv.splits_width),
    )


def _fused_case(
    H: int,
    *,
    window: int | None = 1024,
    segments: bool = False,
    soft_cap: float | None = None,
    group: int = 1,
    heads: int = 8,
) -> KernelCase:
    """Return the fused backward pass of attention, for query heads of width H."""
    B, T, N = 1, 8192, heads
    q = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((B, T, N // group, H), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    last = jax.ShapeDtypeStruct((B, T), jnp.int32) if segments else None
    problem = Problem(
        seq_len=T,
        padded_len=T,
        heads=N,
        kv_heads=N // group,
        head_dim=H,
        window=window,
        scale=H**-0.5,
        soft_cap=soft_cap,
    )
    return KernelCase(
        function=functools.partial(gradients, problem=problem, tuning=FUSED_H200[H]),
        args=(q, k, k, q, rows, rows, last),
        required=("HGMMA", "UTMALDG", "UTMAREDG"),
        hidden=1.0 if soft_cap is None else HIDDEN_UNDER_CAP,
        most_instructions=MOST_FUSED if soft_cap is None else None,
        most_barriers=FUSED_BARRIERS,
    )


def _norm_cases() -> dict[str, KernelCase]:
    """Norms with their gradients: narrow, usual, and as wide as they can be."""
    cases = {}
    for D, kinds in (
        (768, ("LayerNorm",)),
        (2048, ("LayerNorm", "RMSNorm")),
        (5120, ("LayerNorm",)),
        (8192, ("LayerNorm", "RMSNorm")),
    ):
        for kind in kinds:

            def gradients(x, scale, g, g_x, centred=kind == "LayerNorm", D=D):
                sizes = {"eps": 1e-5, "tuning": tuning.mosaic(D)}
                return mosaic_gpu.backward(x, scale, g, g_x, centred=centred, **sizes)

            x = jax.ShapeDtypeStruct((8192, D), jnp.bfloat16)
            scale = jax.ShapeDtypeStruct((D,), jnp.bfloat16)
            cases[f"{kind} {D}, backward"] = KernelCase(
                function=gradients,
                args=(x, scale, x, x),
                required=("UTMALDG",),
            )
    return cases


def markdown(reports: Sequence[CaseReport]) -> str:
    """Write the reports as a table, and the faults below it."""
    lines = [_row(_HEADER), _row(["---"] * len(_HEADER))]
    for report in reports:
        lines += [_row(_cells(report, kernel)) for kernel in report.kernels]
    lines += [
        f"\n{report.case}: {fault}" for report in reports for fault in report.faults
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cases",
        default=SHIPPED,
        help="MODULE:FUNCTION that returns the cases",
    )
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", action="store_true", help="write the page")
    args = parser.parse_args(argv)
    try:
        reports = compile_cases(args.cases, gpu=args.gpu)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps([dataclasses.asdict(report) for report in reports], indent=2))
    elif args.write:
        print(_write_page(reports, args.gpu))
    else:
        print(markdown(reports))
    if not reports:
        print(f"error: {args.cases} has no cases", file=sys.stderr)
        return 1
    return int(any(report.faults for report in reports))


def _write_page(reports: Sequence[CaseReport], gpu: str) -> Path:
    faults = [
        f"{report.case}: {fault}" for report in reports for fault in report.faults
    ]
    text = (
        f"Compiled for {GPUS[gpu].device_kind}, on a machine without one. "
        "*registers*: of a thread at the start, then of those that compute and those "
        "that load; the counts are of instructions in the machine code. "
        f"Faults: {'; '.join(faults) or 'none'}."
    )
    table = Table(
        title="Registers, shared memory, instructions",
        text=text,
        header=_HEADER,
        rows=[_cells(r, kernel) for r in reports for kernel in r.kernels],
        file="kernel_table",
    )
    loops = Table(
        title="Loops that multiply matrices",
        text="In the order of the code. *Exponentials under a product*: those after "
        "the first matmul that no wait has finished yet, of all in the loop. The "
        "other counts are of instructions; LD is a load that does not name its "
        "memory, SHFL an exchange inside a warp, BAR and MEMBAR barriers.",
        header=_LOOP_HEADER,
        rows=[
            _loop_cells(report, kernel, number, loop)
            for report in reports
            for kernel in report.kernels
            for number, loop in enumerate(kernel.loops)
        ],
        file="kernel_table_loops",
    )
    short = of_kernels(table.header, table.rows, loops.header, loops.rows)
    title = "What the GPU kernels compile to"
    command = "python -m scripts.kernels.kernel_table --write"
    return write_page("kernel_table", title, command, [short, table, loops])


def _loop_cells(
    report: CaseReport, kernel: CompiledKernel, number: int, loop: Loop
) -> list[str]:
    counts = (loop.counts[n] for n in LOOP_WATCHED if n != "MUFU.EX2")
    return [
        *(report.case, kernel.name, str(number), str(loop.instructions)),
        f"{loop.hidden_exponentials} of {loop.exponentials}",
        *map(str, counts),
    ]


def _cells(report: CaseReport, kernel: CompiledKernel) -> list[str]:
    changes = "/".join(map(str, kernel.set_registers))
    return [
        report.case,
        kernel.name,
        f"{kernel.registers} ({changes})" if changes else str(kernel.registers),
        f"{kernel.spill_store_bytes} B",
        f"{kernel.spill_load_bytes} B",
        f"{kernel.stack_bytes} B",
        f"{kernel.shared_memory_bytes / 1024:.1f} KiB",
        *(str(kernel.instructions[name]) for name in WATCHED),
        f"{report.compile_s:.1f} s",
    ]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
