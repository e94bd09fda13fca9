"""Norms, non-linearities and cross-entropy: time against the bytes they must move.

The formulas as they read, compiled by XLA, and what `mjax` has in their place. The
floor is the time of the bytes alone: every argument read once, every result written
once, at the rate at which this device copies.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mjax.layers.loss import cross_entropy
from mjax.layers.mlp import gelu
from scripts.evidence import Table
from scripts.gpu import ceilings
from scripts.gpu.cells import fixed, outcome
from scripts.gpu.setting import Program, Row, Setting
from scripts.gpu.timing import time_calls

TOKENS = 131_072
"""Half a gigabyte an array of width 2048: ten times the cache."""
LOSS_TOKENS = 32_768
WIDTH, HIDDEN, VOCAB = 2048, 8192, 32_768
DIRECTIONS = ("forward", "both")
COPY = "copy"


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


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]


def _our_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return cross_entropy(logits, targets, logits.shape[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator and who computes it."""

    contenders: Mapping[str, Callable[..., jax.Array]]
    """By name; the same arguments, the same result. A kernel of ours is added here."""
    args: tuple[jax.ShapeDtypeStruct, ...]
    inside_mesh: bool = False
    """It speaks to other devices, and so runs inside shard_map."""


def operators(small: bool) -> dict[str, Operator]:
    """List the operators with the shapes of a step of gpt-1b3."""
    part = 64 if small else 1
    tokens, loss_tokens = TOKENS // part**2, LOSS_TOKENS // part**2
    width, hidden, vocab = (n // part for n in (WIDTH, HIDDEN, VOCAB))

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    x, scale = array(1, tokens, width), array(width, dtype=jnp.float32)
    up = array(1, tokens // 4, hidden)
    logits = array(1, loss_tokens, vocab)
    targets = array(1, loss_tokens, dtype=jnp.int32)
    return {
        "LayerNorm": Operator(contenders={"formula": _layer_norm}, args=(x, scale)),
        "RMSNorm": Operator(contenders={"formula": _rms_norm}, args=(x, scale)),
        "GELU": Operator(contenders={"formula": _gelu, "mjax": gelu}, args=(up,)),
        "SwiGLU": Operator(contenders={"formula": _swiglu}, args=(up, up)),
        "cross-entropy": Operator(
            contenders={"formula": _cross_entropy, "mjax": _our_cross_entropy},
            args=(logits, targets),
            inside_mesh=True,
        ),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One contender in one direction; no operator: the rate of a copy."""

    operator: str
    contender: str
    direction: str


def cases(small: bool) -> dict[str, Case]:
    """List the copy, then the contenders of an operator side by side."""
    found = {COPY: Case(operator=COPY, contender="", direction="")}
    every = operators(small)
    # A rehearsal is to be short.
    picked = ("LayerNorm", "cross-entropy") if small else tuple(every)
    for operator in picked:
        described = every[operator]
        for direction in DIRECTIONS[small:]:
            for contender in described.contenders:
                name = f"{operator} | {contender} | {direction}"
                found[name] = Case(
                    operator=operator, contender=contender, direction=direction
                )
    return found


def process_of(case: Case) -> str:
    """Let all share a process."""
    return "jax"


def _copy_case() -> ceilings.Case:
    return ceilings.cases(False)["copy of 2 GiB"]


def programs(case: Case, setting: Setting) -> dict[str, Program]:
    """Return the program of a contender."""
    if case.operator == COPY:
        return ceilings.programs(_copy_case(), setting)
    operator = operators(setting.small)[case.operator]
    function = operator.contenders[case.contender]
    if operator.inside_mesh:
        function = _on_mesh(function, setting)
    if case.direction == "forward":
        return {"": Program(function=function, args=operator.args)}
    floats = [
        i for i, x in enumerate(operator.args) if jnp.issubdtype(x.dtype, jnp.floating)
    ]

    def both(d_out: jax.Array, *args: jax.Array) -> Any:
        def of_floats(*some: jax.Array) -> jax.Array:
            whole = list(args)
            for i, x in zip(floats, some, strict=True):
                whole[i] = x
            return function(*whole)

        return jax.vjp(of_floats, *(args[i] for i in floats))[1](d_out)

    out = jax.eval_shape(operator.contenders["formula"], *operator.args)
    return {"": Program(function=both, args=(out, *operator.args))}


def _on_mesh(function: Callable[..., Any], setting: Setting) -> Callable[..., Any]:
    """Run a function inside shard_map over one device."""
    spec = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        function, mesh=setting.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return mapped


def least_bytes(case: Case, small: bool) -> int:
    """Count arguments and results; backward, of d_out and the gradients as well."""
    operator = operators(small)[case.operator]
    sizes = [x.size * x.dtype.itemsize for x in operator.args]
    out = jax.eval_shape(operator.contenders["formula"], *operator.args)
    result = math.prod(out.shape) * out.dtype.itemsize
    if case.direction == "forward":
        return sum(sizes) + result
    gradients = [
        size
        for size, x in zip(sizes, operator.args, strict=True)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return sum(sizes) + result + sum(gradients)


def measure(case: Case, setting: Setting) -> Row:
    """Time the case; the result of the forward pass is not among its outputs."""
    if case.operator == COPY:
        return ceilings.measure(_copy_case(), setting)
    call, wait = ceilings.jax_calls(programs(case, setting)[""])
    timing = time_calls(call, wait)
    num_bytes = least_bytes(case, setting.small)
    rate = num_bytes / (timing.median_ms / 1e3) / 1e9
    return {**dataclasses.asdict(timing), "least_bytes": num_bytes, "gb_per_s": rate}


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
            ]
        )
    return [
        Table(
            title="Bytes that must be moved, and time",
            text=(
                f"{TOKENS} tokens of width {WIDTH} (norms), {TOKENS // 4} of width "
                f"{HIDDEN}, {LOSS_TOKENS} of {VOCAB} logits, bfloat16. A copy moves "
                f"{fixed(copy, 0)} GB/s on this device. both: the gradients from the "
                "arguments and d_out, nothing kept from a forward pass; where the "
                "formula must read an argument twice, 100% cannot be had."
            ),
            header=(
                *("operator", "direction", "contender", "ms", "least GB"),
                *("GB/s", "% of copy"),
            ),
            rows=lines,
        )
    ]
