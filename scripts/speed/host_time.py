"""Time what the host does in a training step, outside the compiled function.

`scripts.speed.overhead` writes the page.

Simulated devices compute on the cores that the host needs, so the host's time cannot be
separated from a real step. Here `mjax.run.loop.Loop` runs with a compiled step of the
same arguments, shardings and donation that computes nothing. The rest of an iteration
is host time: the dispatch to the devices of the process (8; 1 if each GPU has a
process), reading the metrics, the row in metrics.jsonl, the progress line (every step
here, every tenth in a run). The first row has one batch for all steps; the next two
split it into the call of the compiled function, which is the dispatch of jax and XLA,
and the work of mjax around it. The next row adds the data loader, whose thread overlaps
a real step but nothing here: a longer step does not contain its time. The last has one
batch again, and a second call for the weights that the step uses first
(--mesh.gather-first), which computes nothing either.
"""

import contextlib
import dataclasses
import functools
import io
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mjax.ckpt.config import CkptConfig
from mjax.ckpt.manager import Checkpoints
from mjax.config.run import LogConfig
from mjax.data.config import DataConfig
from mjax.data.dataset import open_dataset
from mjax.data.loader import Loader
from mjax.hardware.utilization import Utilization
from mjax.run import ending, loop, metrics
from mjax.run.watch import Watch
from mjax.step.program import METRICS, Program
from scripts.speed.bench_overhead import (
    Workload,
    make_batch,
    mjax_program,
    simulate_devices,
)

NUM_STEPS, NUM_WARMUP_STEPS = 300, 50
_SCALARS = {name: 0.0 if name == "skipped" else 1.0 for name in METRICS}
"""Metrics that the empty step returns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTimes:
    """Host time of an iteration, measured in several ways."""

    times_ms: Mapping[str, Sequence[float]]
    """Of each iteration, by the name of the row."""
    num_inputs: int
    """Arrays of each device that the call of the compiled step gets."""
    num_outputs: int
    """Arrays of each device that it returns."""


class SameBatch:
    """One batch for all steps."""

    data_wait_s = 0.0

    def __init__(self, batch: Any):
        self.batch = batch

    def __next__(self) -> Any:
        """Return the batch."""
        return self.batch


def host_times_ms(
    program: Program, batches: loop.Batches
) -> tuple[list[float], list[float]]:
    """Run the loop with a step that computes nothing.

    Returns:
      ms of each iteration, and of the call of the compiled function in it.
    """
    calls_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run_empty(program, batches, Path(folder), calls_s=calls_s)
        rows = metrics.read_rows(Path(folder) / "metrics.jsonl")
    # An iteration ends when its metrics are read, after the call of the next step.
    whole = [row["step_s"] * 1e3 for row in rows[NUM_WARMUP_STEPS:-1]]
    return whole, [call_s * 1e3 for call_s in calls_s[NUM_WARMUP_STEPS + 1 :]]


def timed(call: Callable[..., Any], calls_s: list[float]) -> Callable[..., Any]:
    """Return the function with a record of the seconds of each call."""

    def timed_call(*args: Any) -> Any:
        begun_s = time.perf_counter()
        result = call(*args)
        calls_s.append(time.perf_counter() - begun_s)
        return result

    return timed_call


def run_empty(
    program: Program,
    batches: loop.Batches,
    folder: Path,
    *,
    num_steps: int = NUM_STEPS,
    watch: Watch | None = None,
    calls_s: list[float] | None = None,
) -> None:
    """Run the loop with a step that computes nothing; `calls_s` gets its calls."""

    def empty_step(
        state: Any, batch: Any, *first: Any
    ) -> tuple[Any, dict[str, jax.Array]]:
        del batch, first
        state = dataclasses.replace(state, step=state.step + 1)
        return state, {name: jnp.asarray(value) for name, value in _SCALARS.items()}

    everywhere = program.abstract_state.step.sharding
    placed = jax.tree.map(lambda s: s.sharding, program.abstract_state)
    step = jax.jit(empty_step, donate_argnums=0, out_shardings=(placed, everywhere))
    program = _with_empty_gather(program)
    # Compiled ahead of time and kept with its batch, as in mjax.train.
    compiled: Callable[..., Any] = step.lower(*program.abstract_args).compile()
    if calls_s is not None:
        compiled = timed(compiled, calls_s)
    program = dataclasses.replace(program, train_step=compiled)
    _run_loop(program, batches, folder, num_steps, watch or Watch())


def _with_empty_gather(program: Program) -> Program:
    """Gather one number in place of each weight, if the program gathers first."""
    if program.gather_first is None:
        return program
    types = jax.tree.map(lambda x: x.update(shape=x.shape[:1]), program.abstract_first)

    def empty_gather(params: Any) -> Any:
        del params
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types)

    placed = jax.tree.map(lambda x: x.sharding, types)
    gather = jax.jit(empty_gather, out_shardings=placed, keep_unused=True)
    compiled = gather.lower(program.abstract_state.params).compile()
    return dataclasses.replace(program, gather_first=compiled, abstract_first=types)


def _run_loop(
    program: Program,
    batches: loop.Batches,
    folder: Path,
    num_steps: int,
    watch: Watch,
) -> None:
    """Run steps as mjax.train does; their output is discarded."""
    checkpoints = Checkpoints(folder, CkptConfig(keep=1))
    with contextlib.redirect_stdout(io.StringIO()), ending.StopRequest() as stop:
        recorder = metrics.Recorder(
            folder,
            LogConfig(every=1),
            start_step=0,
            num_steps=num_steps,
            active=True,
        )
        utilization = Utilization(
            flops_per_token=1.0,
            peak_flops_per_s=None,
            num_devices=jax.device_count(),
        )
        loop.Loop(
            program=program,
            state=program.init(),
            batches=batches,
            cadence=loop.Cadence(
                num_steps=num_steps,
                eval_every=num_steps,
                ckpt_every=num_steps,
                max_consecutive_skips=num_steps,
                gc_every=num_steps,
            ),
            recorder=recorder,
            checkpoints=checkpoints,
            make_row=functools.partial(
                metrics.make_row, bytes_per_token=1.0, utilization=utilization
            ),
            evaluate=lambda *_: {"eval_loss": 1.0, "eval_bits_per_byte": 1.0},
            facts={},
            watch=watch,
        ).run(0, stop)
        recorder.close()
    checkpoints.close()


def time_host(work: Workload) -> HostTimes:
    """Measure the host's time per step."""
    simulate_devices(work)
    program = mjax_program(work)
    batch = jax.device_put(make_batch(work), program.batch_sharding)
    dataset = open_dataset(
        DataConfig(path=("synthetic",), seq_len=work.seq_len), seed=0
    )
    loader = Loader(dataset.train, program.batch_sharding, batch_size=work.batch)
    whole, calls = host_times_ms(program, SameBatch(batch))
    times_ms = {
        "host per step": whole,
        "of it the call of the compiled step": calls,
        "of it around the call": [a - b for a, b in zip(whole, calls, strict=True)],
    }
    with loader:
        times_ms["with the loader, not overlapped"], _ = host_times_ms(program, loader)
    if work.dp > 1:
        gathering = mjax_program(work, gather_first=True)
        times_ms["with a call that gathers first"], _ = host_times_ms(
            gathering, SameBatch(batch)
        )
    return HostTimes(
        times_ms=times_ms,
        num_inputs=len(jax.tree.leaves(program.abstract_args)),
        num_outputs=len(jax.tree.leaves(program.abstract_state)) + len(_SCALARS),
    )
