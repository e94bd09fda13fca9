"""Check the clock of stamps on the device, and measure what stamps cost.

The clock: a chain of GEMMs between two stamps, against the same call timed by the host,
for two lengths of the chain. The step: gpt-1b3 with and without stamps, alternating,
from the same state; the losses must be the same bits.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mjax.kernels.stamp import api as stamp
from scripts.evidence import Table
from scripts.gpu import training
from scripts.gpu.cells import fixed, outcome
from scripts.gpu.setting import Program, Row, Setting

WARM_UP_CALLS = 2
TIMED_CALLS = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A chain of GEMMs, or a training step."""

    num_gemms: int | None
    """Number of GEMMs in the chain; None for the step."""
    size: int = 0
    """m = n = k of the GEMMs."""
    step: training.Case | None = None


def cases(small: bool) -> dict[str, Case]:
    """List the clock and the step."""
    size = 64 if small else 4096
    return {
        "clock, 50 GEMMs": Case(num_gemms=50, size=size),
        "clock, 100 GEMMs": Case(num_gemms=100, size=size),
        "step": Case(num_gemms=None, step=training.cases(small)["base"]),
    }


def process_of(case: Case) -> str:
    """Run the step in its own process, which then has all of the memory."""
    return "clock" if case.step is None else "step"


kind_of = process_of


def programs(case: Case, setting: Setting) -> dict[str, Any]:
    """Return the programs of a case."""
    if case.step is not None:
        return {
            name: training.Step(
                program=training.step_program(case.step, setting, stamps=stamps)
            )
            for name, stamps in (("stamps", True), ("none", False))
        }
    assert case.num_gemms is not None
    x = jax.ShapeDtypeStruct((case.size, case.size), jnp.bfloat16)
    return {"": Program(function=_chain(case.num_gemms), args=(x,))}


def _chain(num_gemms: int) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    def chain(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        log, x = stamp.begin(2, x, 0)
        scale = jnp.asarray(x.shape[0] ** -0.5, x.dtype)
        y = lax.fori_loop(0, num_gemms, lambda _, y: (y @ x) * scale, x)
        log, y = stamp.append(log, y, 1)
        return log, y[0, 0]

    return chain


def measure(case: Case, setting: Setting) -> Row:
    """Run the case."""
    if case.step is not None:
        return _measure_step(case.step, programs(case, setting))
    program = programs(case, setting)[""]
    compiled = program.lower(setting).compile()
    args = program.inputs(0)
    stamped_ms, host_ms = [], []
    for _ in range(WARM_UP_CALLS + TIMED_CALLS):
        start = time.perf_counter()
        log, _ = jax.block_until_ready(compiled(*args))
        host_ms.append((time.perf_counter() - start) * 1e3)
        rows = np.asarray(log)
        if rows[0, 0] != 2:
            raise RuntimeError(f"2 rows were appended, the log has {rows[0, 0]}")
        passed = int(np.diff(rows[1:, 1].view(np.uint32))[0]) * stamp.UNIT_NS
        stamped_ms.append(passed / 1e6)
    ours = statistics.median(stamped_ms[WARM_UP_CALLS:])
    theirs = statistics.median(host_ms[WARM_UP_CALLS:])
    return {"stamps_ms": ours, "host_ms": theirs, "ratio": ours / theirs}


def _measure_step(case: training.Case, found: Mapping[str, training.Step]) -> Row:
    """Time steps with and without stamps, alternating, from one state."""
    # Needs msgspec, which not all machines have; the clock does not need it.
    from mjax.observe.stamps import DeviceClock

    steps = {name: step.lower().compile() for name, step in found.items()}
    program = found["none"].program
    batch = training.random_batch(program, case.model.vocab_size, 0)
    state = program.init()
    clock = DeviceClock(is_host_clock=jax.devices()[0].platform == "cpu")
    times: dict[str, list[float]] = {name: [] for name in steps}
    parts: list[dict[str, float]] = []
    for turn in range(WARM_UP_CALLS + TIMED_CALLS):
        names = sorted(steps, reverse=bool(turn % 2))
        for name in names:
            dispatched_ns, start = time.monotonic_ns(), time.perf_counter()
            state, metrics = jax.block_until_ready(steps[name](state, batch))
            times[name].append((time.perf_counter() - start) * 1e3)
            if name == "stamps":
                log, ready_ns = np.asarray(metrics["stamps"]), time.monotonic_ns()
                spans = clock.spans(
                    log, 0, dispatched_ns=dispatched_ns, ready_ns=ready_ns
                )
                parts.append({s.name: (s.end_ns - s.start_ns) / 1e6 for s in spans})
    del state  # the memory of a GPU holds only one state
    with_ms, without_ms = (times[name][WARM_UP_CALLS:] for name in ("stamps", "none"))
    if _losses(case, found, steps, "stamps") != _losses(case, found, steps, "none"):
        raise RuntimeError("stamps have changed the loss")
    ratios = [a / b for a, b in zip(with_ms, without_ms, strict=True)]
    return {
        "stamps_ms": statistics.median(with_ms),
        "host_ms": statistics.median(without_ms),
        "ratio": statistics.median(ratios),
        "parts": {
            name: statistics.median(part[name] for part in parts[WARM_UP_CALLS:])
            for name in parts[-1]
        },
    }


def _losses(
    case: training.Case,
    found: Mapping[str, training.Step],
    steps: Mapping[str, Any],
    name: str,
) -> list[float]:
    """Take three steps from the initial state and return the losses."""
    program = found["none"].program
    batch = training.random_batch(program, case.model.vocab_size, 0)
    state, losses = program.init(), []
    for _ in range(3):
        state, metrics = steps[name](state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def tables(rows: Mapping[str, Row], small: bool) -> list[Table]:
    """Return the clock, and the step."""
    clock = [name for name in cases(small) if name != "step"]
    step = rows.get("step", {})
    parts = step.get("parts", {})
    return [
        Table(
            title="The clock of stamps",
            text=(
                "A chain of bfloat16 GEMMs, 4096 cubed, between two stamps, against "
                "the host's time of the whole call, which has the dispatch in it too. "
                "The ratio must be just below 1 for both lengths."
            ),
            header=("chain", "stamps, ms", "host, ms", "ratio"),
            rows=[
                [
                    name,
                    outcome(rows.get(name, {}), "stamps_ms", 3),
                    fixed(rows.get(name, {}).get("host_ms"), 3),
                    fixed(rows.get(name, {}).get("ratio"), 4),
                ]
                for name in clock
            ],
        ),
        Table(
            title="A step with stamps",
            text=(
                "gpt-1b3, the base of gpu_training.md, with stamps and without in "
                "turns, from one state. The losses of three steps from the initial "
                "state are the same bits. The bound of the ratio is 1.01."
            ),
            header=("with, ms", "without, ms", "ratio", "parts by stamps, ms"),
            rows=[
                [
                    outcome(step, "stamps_ms", 2),
                    fixed(step.get("host_ms"), 2),
                    fixed(step.get("ratio"), 4),
                    ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items()) or "-",
                ]
            ],
        ),
    ]
