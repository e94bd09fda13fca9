"""Norms, non-linearities and cross-entropy: time against the bytes to be moved.

The plain formulas, compiled by XLA, and their implementations in `mjax`; the
cross-entropy includes the projection to logits. The floor is the time of the bytes
alone: every argument read once, every result written once, at this device's copy rate.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mjax.kernels.cross_entropy.api import Vocabulary, linear_cross_entropy
from mjax.kernels.gelu.api import gelu, swiglu
from mjax.kernels.layer_norm.api import norm, skip_and_norm
from scripts.evidence import Table
from scripts.gpu import ceilings
from scripts.gpu.cells import fixed, outcome
from scripts.gpu.setting import Program, Row, Setting
from scripts.gpu.timing import time_calls

TOKENS = 131_072
"""An array of width 2048 has half a gigabyte: ten times the cache."""
LOSS_TOKENS = 32_768
WIDTH, HIDDEN, VOCAB = 2048, 8192, 32_768
DIRECTIONS = ("forward", "both")
COPY = "copy"
# Relative error of a whole result. A bfloat16 rounds by 2^-9 at most; the formulas of
# GELU and SwiGLU round after every operation.
LIMIT = 2e-2


def _layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _head(x: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
    logits = jnp.einsum("btd,vd->btv", x, w, preferred_element_type=jnp.float32)
    logp = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logp, targets[..., None], -1).sum()


def _our_head(x: jax.Array, w: jax.Array, targets: jax.Array) -> jax.Array:
    vocabulary = Vocabulary(size=w.shape[0])
    return linear_cross_entropy(x, w, None, targets, scale=1.0, vocabulary=vocabulary)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator and its contenders."""

    contenders: Mapping[str, Callable[..., Any]]
    """Functions by name, with equal arguments and results; our kernels are added here.
    """
    args: tuple[jax.ShapeDtypeStruct, ...]
    directions: tuple[str, ...] = DIRECTIONS
    product_flops: int = 0
    """FLOPs of its matmul, forward; backward has two more."""


def operators(small: bool) -> dict[str, Operator]:
    """List the operators with the shapes of a step of gpt-1b3."""
    part = 64 if small else 1
    tokens, loss_tokens = TOKENS // part**2, LOSS_TOKENS // part**2
    width, hidden, vocab = (n // part for n in (WIDTH, HIDDEN, VOCAB))

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    x, scale = array(1, tokens, width), array(width, dtype=jnp.float32)
    up = array(1, tokens // 4, hidden)
    hidden_states, table = array(1, loss_tokens, width), array(vocab, width)
    targets = array(1, loss_tokens, dtype=jnp.int32)
    found = {}
    for name, formula, centred in (
        ("LayerNorm", _layer_norm, True),
        ("RMSNorm", _rms_norm, False),
    ):
        ours = functools.partial(norm, bias=None, centred=centred, eps=1e-5)
        skip = functools.partial(skip_and_norm, bias=None, centred=centred, eps=1e-5)
        found[name] = Operator(
            contenders={"formula": formula, "mjax": ours},
            args=(x, scale),
            directions=("forward",),
        )
        # The residual stream skips the norm: backward, its gradient is added.
        found[f"skip and {name}"] = Operator(
            contenders={
                "formula": lambda x, scale, f=formula: (x, f(x, scale)),
                "mjax in XLA": lambda x, scale, f=ours: (x, f(x, scale)),
                "mjax": skip,
            },
            args=(x, scale),
            directions=("both",),
        )
    found["GELU"] = Operator(
        contenders={"formula": _gelu, "mjax": lambda x: gelu(x, None, tanh=False)},
        args=(up,),
    )
    found["SwiGLU"] = Operator(
        contenders={
            "formula": _swiglu,
            "mjax": lambda gate, up: swiglu(up, gate, None, None),
        },
        args=(up, up),
    )
    found["head and cross-entropy"] = Operator(
        contenders={"formula": _head, "mjax": _our_head},
        args=(hidden_states, table, targets),
        product_flops=2 * loss_tokens * width * vocab,
    )
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One contender in one direction; without an operator, the rate of a copy."""

    operator: str
    contender: str
    direction: str


def cases(small: bool) -> dict[str, Case]:
    """List the copy, then the contenders of an operator side by side."""
    found = {COPY: Case(operator=COPY, contender="", direction="")}
    every = operators(small)
    # A rehearsal must be short.
    picked = ("skip and LayerNorm", "head and cross-entropy") if small else tuple(every)
    for operator in picked:
        described = every[operator]
        for direction in described.directions[-1:] if small else described.directions:
            for contender in described.contenders:
                name = f"{operator} | {contender} | {direction}"
                found[name] = Case(
                    operator=operator, contender=contender, direction=direction
                )
    return found


def process_of(case: Case) -> str:
    """Let all share a process."""
    return "jax"


def kind_of(case: Case) -> str:
    """Return the operator and contender as one key."""
    return f"{case.operator} {case.contender}"


def _copy_case() -> ceilings.Case:
    return ceilings.cases(False)["copy of 2 GiB"]


def programs(case: Case, setting: Setting) -> dict[str, Program]:
    """Return the program of a contender."""
    if case.operator == COPY:
        return ceilings.programs(_copy_case(), setting)
    operator = operators(setting.small)[case.operator]
    function = operator.contenders[case.contender]
    if case.direction == "forward":
        return {"": Program(function=function, args=operator.args)}
    floats = [
        i for i, x in enumerate(operator.args) if jnp.issubdtype(x.dtype, jnp.floating)
    ]

    out = jax.eval_shape(operator.contenders["formula"], *operator.args)
    leaves, tree = jax.tree.flatten(out)

    def both(*arrays: jax.Array) -> Any:
        d_out = jax.tree.unflatten(tree, arrays[: len(leaves)])
        args = arrays[len(leaves) :]

        def of_floats(*some: jax.Array) -> Any:
            whole = list(args)
            for i, x in zip(floats, some, strict=True):
                whole[i] = x
            return function(*whole)

        return jax.vjp(of_floats, *(args[i] for i in floats))[1](d_out)

    return {"": Program(function=both, args=(*leaves, *operator.args))}


def least_bytes(case: Case, small: bool) -> int:
    """Count bytes of arguments and results; backward, of d_out and gradients too."""
    operator = operators(small)[case.operator]
    sizes = [x.size * x.dtype.itemsize for x in operator.args]
    out = jax.eval_shape(operator.contenders["formula"], *operator.args)
    result = sum(y.size * y.dtype.itemsize for y in jax.tree.leaves(out))
    if case.direction == "forward":
        return sum(sizes) + result
    gradients = [
        size
        for size, x in zip(sizes, operator.args, strict=True)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return sum(sizes) + result + sum(gradients)


def difference(case: Case, setting: Setting) -> float:
    """Return the largest relative error of a result against the float32 formula."""
    program = programs(case, setting)[""]
    exact = programs(dataclasses.replace(case, contender="formula"), setting)[""]
    inputs = program.inputs(time.time_ns() % 2**31)
    wide = [
        x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for x in inputs
    ]

    @jax.jit
    def compare(got: Any, want: Any) -> jax.Array:
        def one(a: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)

        return jnp.stack(jax.tree.leaves(jax.tree.map(one, got, want))).max()

    got = jax.jit(program.function)(*inputs)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(exact.function)(*wide)
    return float(compare(got, want))


def measure(case: Case, setting: Setting) -> Row:
    """Time the case; its outputs do not include the result of the forward pass."""
    if case.operator == COPY:
        return ceilings.measure(_copy_case(), setting)
    wrong = difference(case, setting)
    if not wrong <= LIMIT:
        raise RuntimeError(f"it is wrong: off by {wrong:.2e} (limit {LIMIT})")
    call, wait = ceilings.jax_calls(programs(case, setting)[""])
    timing = time_calls(call, wait)
    num_bytes = least_bytes(case, setting.small)
    seconds = timing.median_ms / 1e3
    products = 3 if case.direction == "both" else 1
    flops = products * operators(setting.small)[case.operator].product_flops
    return {
        **dataclasses.asdict(timing),
        "difference": wrong,
        "least_bytes": num_bytes,
        "gb_per_s": num_bytes / seconds / 1e9,
        "tflops": flops / seconds / 1e12 if flops else None,
    }


def tables(rows: Mapping[str, Row], small: bool) -> list[Table]:
    """Return one table."""
    copy = rows.get(COPY, {}).get("gb_per_s")
    lines = []
    for name, case in cases(small).items():
        if case.operator == COPY:
            continue
        row = rows.get(name, {})
        rate = row.get("gb_per_s")
        share = None if rate is None or copy is None else 100 * rate / copy
        num_bytes = least_bytes(case, small)
        lines.append(
            [
                case.operator,
                case.direction,
                case.contender,
                outcome(row, "median_ms", 3),
                fixed(num_bytes / 1e9, 3),
                fixed(rate, 0),
                fixed(share, 1),
                fixed(row.get("tflops"), 0),
                fixed(row.get("difference"), 4),
            ]
        )
    return [
        Table(
            title="Bytes that must be moved, and time",
            text=(
                f"{TOKENS} tokens of width {WIDTH} (norms), {TOKENS // 4} of width "
                f"{HIDDEN}, {LOSS_TOKENS} of width {WIDTH} with {VOCAB} logits each, "
                f"bfloat16. A copy moves {fixed(copy, 0)} GB/s on this device; the "
                "head is bound by its matrix products instead. both: gradients from "
                "the arguments and d_out, nothing kept from a forward pass; where an "
                "argument must be read twice, 100% cannot be had. off by: largest "
                "relative error of a result against the formula in float32."
            ),
            header=(
                *("operator", "direction", "contender", "ms", "least GB"),
                *("GB/s", "% of copy", "TFLOP/s", "off by"),
            ),
            rows=lines,
        )
    ]
