"""Attention against cuDNN and others: forward, and forward with backward.

Tokens and heads x width are the same in all cases, so that times compare.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from scripts.evidence import Table
from scripts.gpu import attention_contenders as contenders
from scripts.gpu import ceilings
from scripts.gpu.attention_contenders import Shape
from scripts.gpu.cells import fixed, geometric_mean, outcome
from scripts.gpu.setting import Program, Row, Setting, SkippedError
from scripts.gpu.timing import INPUT_SETS, Timing, time_calls

DIRECTIONS = ("forward", "both")
TOKENS = 32_768
WIDTH = 2048
"""Query heads x head width."""
GEMM = "GEMM"
BLOCKED = "blocked"
"""Contender whose outputs are the reference."""
FUSED = contenders.FUSED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One contender, shape and direction; without a shape, the GEMM ceiling."""

    contender: str
    shape: Shape | None
    direction: str


def shapes(small: bool) -> list[Shape]:
    """List the shapes; those of a training run come first.

    A window as long as the sequence is omitted: it equals full attention.
    """
    if small:
        sizes = {"tokens": 192, "width": 16}
        return [_shape(96, 40, 8, 2, **sizes), _shape(96, None, 8, 1, **sizes)]
    return [
        _shape(T, W, D, group, tokens=TOKENS, width=WIDTH)
        for D, group, T, W in itertools.product(
            (128, 64), (1, 8), (8192, 32_768, 2048), (1024, None, 4096, 512)
        )
        if W is None or W < T
    ]


def _shape(T: int, W: int | None, D: int, group: int, *, tokens: int, width: int):
    heads = width // D
    return Shape(
        batch=tokens // T,
        seq_len=T,
        window=W,
        heads=heads,
        kv_heads=heads // group,
        head_dim=D,
    )


def cases(small: bool) -> dict[str, Case]:
    """List ours and cuDNN at all shapes, then the others at selected shapes."""
    found = {GEMM: Case(contender=GEMM, shape=None, direction="forward")}

    def add(
        contender: str, shape: Shape, directions: Sequence[str] = DIRECTIONS
    ) -> None:
        for direction in directions:
            case = Case(contender=contender, shape=shape, direction=direction)
            found[f"{shape.name} | {contender} | {direction}"] = case

    every = shapes(small)
    # Side by side, so that both have the same clocks and temperature.
    for shape in every[:1] if small else every:
        for contender in ("ours", "cudnn"):
            add(contender, shape)
    for shape in every:
        if shape.heads == shape.kv_heads and (small or shape.head_dim == 128):
            add(FUSED, shape, directions=("both",))
    for shape in every:
        if shape.heads == shape.kv_heads and (small or shape.head_dim == 128):
            add("tokamax", shape)
    for shape in every:
        if shape.window is None:
            add("torch sdpa", shape)
    for shape in every:
        if small or (
            shape.head_dim == 128
            and shape.heads == shape.kv_heads
            and shape.seq_len > 2048
            and shape.window != 512
        ):
            add("torch flex", shape)
    return found


def process_of(case: Case) -> str:
    """Give each framework its own process: each reserves the device's memory."""
    return "torch" if case.contender in contenders.TORCH else "jax"


def kind_of(case: Case) -> str:
    """Return the contender, direction and head width as one key."""
    width = "" if case.shape is None else f" D={case.shape.head_dim}"
    return f"{case.contender} {case.direction}{width}"


def programs(case: Case, setting: Setting) -> dict[str, Program]:
    """Return the JAX programs of a contender; forward includes the reference."""
    if case.shape is None:
        return ceilings.programs(ceilings.GEMM, setting)
    if setting.mode != "gpu" and case.contender == "cudnn":
        raise SkippedError("cuDNN plans its kernels with its library, on the device")
    if setting.mode == "rehearse" and case.contender == FUSED:
        raise SkippedError("the fused backward pass is one of the kernels for Hopper")
    if setting.mode == "compile" and case.contender not in ("ours", FUSED, BLOCKED):
        raise SkippedError("not a program of ours")
    shape = case.shape
    attend = contenders.jax_attention(case.contender, shape, setting.ours)
    q, k = (
        jax.ShapeDtypeStruct(
            (shape.batch, shape.seq_len, heads, shape.head_dim), jnp.bfloat16
        )
        for heads in (shape.heads, shape.kv_heads)
    )

    def both(q: Any, k: Any, v: Any, d_out: Any) -> Any:
        return jax.vjp(attend, q, k, v)[1](d_out)

    if case.direction == "both":
        return {"": Program(function=both, args=(q, k, k, q))}
    found = {"": Program(function=attend, args=(q, k, k))}
    if case.contender != BLOCKED:
        found[BLOCKED] = programs(_peer(case), setting)[""]
    return found


def measure(case: Case, setting: Setting) -> Row:
    """Time the case."""
    if case.shape is None:
        with setting.exclusive():
            return ceilings.measure(ceilings.GEMM, setting)
    if case.contender in contenders.TORCH:
        # Hold it throughout: PyTorch compiles and builds masks on the device.
        with setting.exclusive():
            return _row(case, case.shape, _time_torch(case, case.shape, setting))
    program, compiled = programs(case, setting)[""], _compiled(case, setting)
    compared = case.direction == "forward"
    if compared:
        _compiled(_peer(case), setting)
    with setting.exclusive():
        timing = time_calls(*ceilings.jax_calls(program, compiled))
        row = _row(case, case.shape, timing)
        return row | ({"difference": difference(case, setting)} if compared else {})


def _row(case: Case, shape: Shape, timing: Timing) -> Row:
    per_s = shape.flops(case.direction) / (timing.median_ms / 1e3)
    return {**dataclasses.asdict(timing), "tflops": per_s / 1e12}


def difference(case: Case, setting: Setting) -> float | str:
    """Return the error of an output against blocked attention.

    A text if the error cannot be computed; the time is still reported.
    """
    inputs = programs(case, setting)[""].inputs(0)
    found = _compiled(case, setting)(*inputs).astype(jnp.float32)
    try:
        blocked = _compiled(_peer(case), setting)(*inputs).astype(jnp.float32)
        return float(jnp.linalg.norm(found - blocked) / jnp.linalg.norm(blocked))
    except jax.errors.JaxRuntimeError as error:  # of memory, most likely
        return f"blocked failed: {error}".splitlines()[0][:80]


def _peer(case: Case) -> Case:
    """Return the reference case, which XLA compiles from plain JAX."""
    return dataclasses.replace(case, contender=BLOCKED)


def _time_torch(case: Case, shape: Shape, setting: Setting) -> Timing:
    device = "cpu" if setting.small else "cuda"
    calls, wait = contenders.torch_calls(case.contender, shape, INPUT_SETS, device)
    return time_calls(calls[case.direction], wait)


@functools.lru_cache(maxsize=4)
def _compiled(case: Case, setting: Setting) -> Callable[..., Any]:
    """Compile the program of a case once per shape."""
    program = programs(case, setting)[""]
    return jax.jit(program.function).lower(*program.args).compile()


def tables(rows: Mapping[str, Row], small: bool) -> list[Table]:
    """Compare ours with cuDNN at every shape, then with the others."""
    every = shapes(small)
    gemm = rows.get(GEMM, {}).get("tflops")
    return [
        *(_against_cudnn(rows, every, direction, gemm) for direction in DIRECTIONS),
        _others(rows, every),
    ]


def _against_cudnn(
    rows: Mapping[str, Row], every: Sequence[Shape], direction: str, gemm: float | None
) -> Table:
    lines, ratios = [], []
    for shape in every:
        ours, cudnn = (
            rows.get(f"{shape.name} | {name} | {direction}", {})
            for name in ("ours", "cudnn")
        )
        ratio = None
        if ours.get("status") == cudnn.get("status") == "ok":
            ratio = ours["median_ms"] / cudnn["median_ms"]
            ratios.append(ratio)
        tflops = ours.get("tflops")
        share = None if tflops is None or gemm is None else 100 * tflops / gemm
        lines.append(
            [
                shape.name,
                outcome(ours, "median_ms", 3),
                outcome(cudnn, "median_ms", 3),
                fixed(ratio, 3),
                fixed(tflops, 0),
                fixed(share, 1),
                fixed(_percent(ours.get("spread")), 1),
                fixed(_percent(cudnn.get("spread")), 1),
                _as_text(ours.get("difference")),
                _as_text(cudnn.get("difference")),
            ]
        )
    mean = fixed(geometric_mean(ratios), 3)
    title = "Forward" if direction == "forward" else "Forward and backward"
    return Table(
        title=f"{title}: ours and cuDNN",
        text=(
            f"Geometric mean of our time over cuDNN's: {mean}, over {len(ratios)} of "
            f"{len(every)} shapes (target: at most 1). TFLOP/s count visible pairs "
            f"only; the GEMM ceiling measured beside them is {fixed(gemm, 0)}. "
            "difference: relative difference of the output from blocked attention in "
            "plain JAX, compiled by XLA; forward only."
        ),
        header=(
            *("shape", "ours ms", "cuDNN ms", "ours / cuDNN", "ours TFLOP/s"),
            *("% of GEMM", "spread %", "cuDNN spread %"),
            *("difference", "cuDNN difference"),
        ),
        rows=lines,
    )


def _as_text(difference: float | str | None) -> str:
    return difference if isinstance(difference, str) else fixed(difference, 4)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _others(rows: Mapping[str, Row], every: Sequence[Shape]) -> Table:
    names = ("ours", "cudnn", FUSED, "tokamax", "torch sdpa", "torch flex")
    lines = []
    for shape, direction in itertools.product(every, DIRECTIONS):
        found = [rows.get(f"{shape.name} | {n} | {direction}", {}) for n in names]
        if any(found[2:]):
            cells = [outcome(row, "median_ms", 3) for row in found]
            lines.append([shape.name, direction, *cells])
    # A separate target exists for tokamax's backward pass.
    slow = rows.get("T=32768 W=1024 D=128 GQA=1 | tokamax | both", {}).get("median_ms")
    ours = rows.get("T=32768 W=1024 D=128 GQA=1 | ours | both", {}).get("median_ms")
    factor = math.nan if not slow or not ours else slow / ours
    text = "Milliseconds; both: forward and backward. "
    if not math.isnan(factor):
        text += f"tokamax / ours at T=32768 W=1024 D=128, both: {factor:.1f}. "
    return Table(
        title="The others",
        text=text + "A dash: this contender is not measured at this shape.",
        header=("shape", "direction", *names),
        rows=lines,
    )
