"""Compare the time of a training step with that of the bare loop.

`scripts.speed.overhead` writes the page.

Both programs run in one process, on the same 8 simulated devices, from the same
parameters and the same batch: `mjax.step.program.Program.train_step`, and the step of
`scripts/speed/bare_loop.py`, with the same maths, sharding and remat. They alternate,
and the order within a pair changes from pair to pair, so that other load on the machine
affects both alike. The overhead is the median over pairs of the ratio of the two times.
The time of a step is from its call until its outputs are ready, measured by the clock
and in CPU-seconds of this process, which other processes disturb less.
"""

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh
from mjax.model.config import ModelConfig
from mjax.plan.hlo.counts import count_dot_flops
from mjax.step.program import Program, build_program
from scripts.speed import bare_loop


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The workload of both loops; the defaults are those of the benchmark."""

    sizes: bare_loop.Sizes = dataclasses.field(default_factory=bare_loop.Sizes)
    seq_len: int = 256
    batch: int = 32
    dp: int = 4
    tp: int = 2
    lr: float = 1e-3
    steps: int = 100


def mjax_program(work: Workload, *, gather_first: bool = False) -> Program:
    """Build mjax's program of this workload."""
    sizes = work.sizes
    return build_program(
        model=ModelConfig(
            layers=sizes.layers,
            d_model=sizes.d_model,
            heads=sizes.heads,
            vocab_size=sizes.vocab_size,
            vocab_multiple=sizes.padded_vocab,
        ),
        optimizer=OptimConfig(name="adamw", lr=work.lr, schedule="constant"),
        batch=BatchConfig(size=work.batch),
        precision=PrecisionConfig(compute="float32"),
        seq_len=work.seq_len,
        num_steps=work.steps,
        seed=0,
        zero_level=2,
        isolate_documents=True,
        mesh=build_mesh(AxisSizes(pp=1, dp_replicate=1, dp_shard=work.dp, tp=work.tp)),
        gather_first=gather_first,
    )


def bare_params(params: Any, tp: int) -> dict[str, Any]:
    """Rearrange mjax's parameters for the bare loop, on the host.

    Its w_in is [q | k | v | ffn-in] and its w_out [attn-out | ffn-out] of the first tp
    device, then of the second, and so on.
    """
    params = jax.device_get(params)
    blocks = params["blocks"]
    attention, mlp = blocks["attention"], blocks["mlp"]

    def fuse(weights: list[np.ndarray], dim: int) -> np.ndarray:
        split = [np.split(w, tp, axis=dim) for w in weights]
        return np.concatenate([w[i] for i in range(tp) for w in split], axis=dim)

    L, D = blocks["norm"]["scale"].shape
    projections = [attention[name].reshape(L, D, -1) for name in ("wq", "wk", "wv")]
    return {
        "embed": params["embed"]["table"],
        "blocks": {
            "norm": blocks["norm"]["scale"],
            "w_in": fuse([*projections, mlp["w_in"]], 2),
            "w_out": fuse([attention["wo"].reshape(L, -1, D), mlp["w_out"]], 1),
        },
        "final_norm": params["final_norm"]["scale"],
        "head": params["head"]["table"],
    }


def make_batch(work: Workload) -> dict[str, np.ndarray]:
    """Draw random tokens; the second half of each row is a separate document."""
    shape = (work.batch, work.seq_len)
    rng = np.random.default_rng(0)
    stream = rng.integers(0, work.sizes.vocab_size, (shape[0], shape[1] + 1), np.int32)
    half = shape[1] // 2
    column = np.arange(shape[1], dtype=np.int32)
    targets = stream[:, 1:].copy()
    targets[:, half - 1] = -1
    return {
        "tokens": stream[:, :-1],
        "targets": targets,
        "segments": np.broadcast_to(column // half, shape).astype(np.int32),
        "positions": np.broadcast_to(column % half, shape).astype(np.int32),
    }


class MjaxStep:
    """Runs steps with mjax and holds the state."""

    name = "mjax"

    def __init__(self, work: Workload):
        self.program = mjax_program(work)
        self.state = self.program.init()
        self.batch = jax.device_put(make_batch(work), self.program.batch_sharding)

    def compiled(self) -> Any:
        """Return the executable, to be read."""
        return self.program.trace().lower().compile()

    def __call__(self) -> jax.Array:
        """Take one step and return its loss; nothing has to be ready yet."""
        self.state, metrics = self.program.train_step(self.state, self.batch)
        return metrics["loss"]


class BareStep:
    """Runs steps with the bare loop, from given parameters."""

    name = "bare"

    def __init__(self, work: Workload, params: Any):
        devices = np.array(jax.devices()).reshape(work.dp, work.tp)
        self.work, self.tx = work, bare_loop.adamw(work.lr)
        self.mesh = Mesh(devices, ("dp", "tp"))
        self.state = bare_loop.place(self.mesh, self.tx, bare_params(params, work.tp))
        self.step = bare_loop.make_step(work.sizes, self.mesh, self.tx)
        rows = NamedSharding(self.mesh, PartitionSpec("dp"))
        self.batch = jax.device_put(make_batch(work), rows)

    def trace(self) -> jax.stages.Traced:
        """Rebuild the step and trace it."""
        step = bare_loop.make_step(self.work.sizes, self.mesh, self.tx)
        return step.trace(*self.state, self.batch)

    def compiled(self) -> Any:
        """Return the executable, to be read."""
        return self.trace().lower().compile()

    def __call__(self) -> jax.Array:
        """Take one step and return its loss; nothing has to be ready yet."""
        *self.state, loss = self.step(*self.state, self.batch)
        return loss


def time_step(step: MjaxStep | BareStep) -> tuple[float, float]:
    """Run one step; return the seconds until its outputs are ready, by both clocks."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    jax.block_until_ready((step(), step.state))
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """Both programs, and the times of their steps."""

    gflops: Mapping[str, float]
    """Of the matmuls of a device, by the name of the program."""
    temp_mib: Mapping[str, float]
    """Temporary memory of a device, by the name of the program."""
    times: Mapping[str, Sequence[tuple[float, float]]]
    """Seconds and CPU-seconds of each step, by the name of the program."""


def compare(work: Workload, num_pairs: int) -> Compared:
    """Run pairs of steps; print each time as it is measured."""
    simulate_devices(work)
    ours = MjaxStep(work)
    bare = BareStep(work, ours.state.params)
    steps = (ours, bare)
    gflops, temp_mib = dict[str, float](), dict[str, float]()
    for step in steps:
        program = step.compiled()
        gflops[step.name] = count_dot_flops(program.as_text()) / 1e9
        temp_bytes = program.memory_analysis().temp_size_in_bytes
        temp_mib[step.name] = temp_bytes / 2**20
        time_step(step)  # warm-up
    times: dict[str, list[tuple[float, float]]] = {step.name: [] for step in steps}
    for pair in range(num_pairs):
        for step in steps if pair % 2 == 0 else reversed(steps):
            times[step.name].append(time_step(step))
            wall_s, cpu_s = times[step.name][-1]
            print(f"{pair} {step.name} {wall_s:.3f} s, {cpu_s:.3f} CPU-s", flush=True)
    return Compared(gflops=gflops, temp_mib=temp_mib, times=times)


def rows(compared: Compared) -> list[list[str]]:
    """Return the rows of the table: each program and the ratio, by both clocks."""
    found = []
    for clock, unit in enumerate(("s", "CPU-s")):
        seconds = {name: [t[clock] for t in of] for name, of in compared.times.items()}
        for name, values in seconds.items():
            found.append([f"{name} step, {unit}", *spread(values)])
        pairs = zip(seconds[MjaxStep.name], seconds[BareStep.name], strict=True)
        found.append([f"mjax / bare, {unit}", *spread([a / b for a, b in pairs])])
    return found


def spread(values: Sequence[float]) -> list[str]:
    """Return the smallest, the middle and the largest value as cells of a table."""
    shown = min(values), statistics.median(values), max(values)
    return [f"{value:.3f}" for value in shown]


def simulate_devices(work: Workload) -> None:
    """Make the devices of this workload."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", work.dp * work.tp)


def describe(work: Workload) -> str:
    """Describe the workload."""
    return (
        f"dp {work.dp} x tp {work.tp}, {work.sizes.layers} layers, d "
        f"{work.sizes.d_model}, sequence {work.seq_len}, batch {work.batch}, float32, "
        "ZeRO-2, full remat, AdamW"
    )
