"""Measure the cost of a checkpoint: pause, checksums, and slower steps during it.

    python -m scripts.faults.checkpoint_cost [--mib 512] [--saves 12]

Writes docs/benchmarks/checkpoint_cost.md. Three measurements, each in one process on 8
simulated devices:

- stage 1, the copy to host memory, for which training waits. It alternates with a plain
  memcpy (np.copyto) of the same pieces into existing buffers;
- stage 2, writing in the background, and how much of it is spent on checksums of the
  host copy and on reading the pieces back;
- steps of a small model while a save is being written, compared with the steps between
  the saves of the same run.
"""

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.ckpt.config import CkptConfig
from mjax.ckpt.host_copy import HostMemory
from mjax.ckpt.manager import Checkpoints
from mjax.ckpt.saving import Attempt
from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh
from mjax.mesh.devices import simulate_devices
from mjax.model.config import ModelConfig
from mjax.step.program import Program, build_program
from scripts.evidence import Table, write_page

NUM_LEAVES = 16
PAIRS = 12
STEPS_BETWEEN = 12
SEQ_LEN = 32
MODEL = ModelConfig(layers=4, d_model=256, heads=8, vocab_size=65536)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage1:
    """Seconds of alternating copies and memcpys of the same bytes."""

    num_bytes: int
    first_s: float
    """Seconds of the first copy, which allocates its buffers."""
    copies_s: list[float]
    memcpys_s: list[float]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--saves", type=int, default=12)
    args = parser.parse_args()
    simulate_devices(8)
    load = os.getloadavg()[0]
    mesh = jax.make_mesh((8,), ("x",))
    state = make_state(mesh, args.mib)
    stage1 = measure_stage1(state)
    attempts = measure_stage2(state, args.saves)
    del state
    steps = measure_steps(args.saves)
    path = write_page(
        "checkpoint_cost",
        "What a checkpoint costs",
        f"python -m scripts.faults.checkpoint_cost --mib {args.mib} "
        f"--saves {args.saves}",
        tables(stage1, attempts, steps, load),
    )
    print(path.read_text())


def make_state(mesh: Mesh, mib: int) -> dict[str, jax.Array]:
    """Make random float32 leaves, split over 8 devices."""
    rng = np.random.default_rng(0)
    columns = mib * 2**20 // 4 // NUM_LEAVES // 1024
    where = NamedSharding(mesh, PartitionSpec("x"))
    return {
        f"leaf_{i}": jax.device_put(
            rng.standard_normal((1024, columns), np.float32), where
        )
        for i in range(NUM_LEAVES)
    }


def measure_stage1(state: dict[str, jax.Array]) -> Stage1:
    """Time copies from the devices, alternating with memcpys of the same pieces."""
    memory = HostMemory()
    first = memory.copy(state, replicas=False)
    sources = [
        np.asarray(shard.data) for x in state.values() for shard in x.addressable_shards
    ]
    targets = [np.ones_like(source) for source in sources]
    copies, memcpys = [], []
    for _ in range(PAIRS):
        copies.append(memory.copy(state, replicas=False).copy_s)
        memcpys.append(seconds(lambda: copy_all(sources, targets)))
    return Stage1(
        num_bytes=first.num_bytes,
        first_s=first.copy_s,
        copies_s=copies,
        memcpys_s=memcpys,
    )


def copy_all(sources: list[np.ndarray], targets: list[np.ndarray]) -> None:
    """Copy arrays into arrays."""
    for source, target in zip(sources, targets, strict=True):
        np.copyto(target, source)


def seconds(action: Callable[[], None]) -> float:
    """Return how long an action takes."""
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


def measure_stage2(state: dict[str, jax.Array], num_saves: int) -> list[Attempt]:
    """Save repeatedly without other load; return the attempts."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), CkptConfig(keep=1))
        attempts = []
        for step in range(1, num_saves + 1):
            checkpoints.save(step, lambda: state, {})
            assert checkpoints.wait()
            attempts += checkpoints.attempts()
        checkpoints.close()
    return attempts


def measure_steps(num_saves: int) -> tuple[list[float], list[float]]:
    """Run steps and saves; return the seconds of steps during a save, and of others.

    A step counts as during a save if the save was being written both when the step
    began and when it ended.
    """
    program = make_program()
    state = program.init()
    batch = make_batch(program)
    beside: list[float] = []
    alone: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), CkptConfig(keep=1))
        for step in range(1, num_saves * STEPS_BETWEEN + 1):
            if step > STEPS_BETWEEN and step % STEPS_BETWEEN == 0:
                saved = program.to_saved(state)
                checkpoints.save(step, lambda: saved, {})  # noqa: B023 -- called at once
                del saved
            before = checkpoints.is_writing
            started_s = time.perf_counter()
            state, metrics = program.train_step(state, batch)
            jax.block_until_ready(metrics)
            step_s = time.perf_counter() - started_s
            after = checkpoints.is_writing
            if before and after:
                beside.append(step_s)
            elif not before and not after and step > 2:
                alone.append(step_s)
        assert checkpoints.wait()
        checkpoints.close()
    return beside, alone


def make_program() -> Program:
    """Build a small model over dp 8."""
    sizes = AxisSizes(pp=1, dp_replicate=1, dp_shard=8, tp=1)
    return build_program(
        model=MODEL,
        optimizer=OptimConfig(),
        batch=BatchConfig(size=8),
        precision=PrecisionConfig(compute="float32"),
        seq_len=SEQ_LEN,
        num_steps=1000,
        seed=0,
        zero_level=2,
        isolate_documents=False,
        mesh=build_mesh(sizes, tp_across_hosts=False),
    )


def make_batch(program: Program) -> dict[str, jax.Array]:
    """Make a batch of random tokens."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, MODEL.vocab_size, (8, SEQ_LEN + 1)).astype(np.int32)
    positions = np.broadcast_to(np.arange(SEQ_LEN, dtype=np.int32), (8, SEQ_LEN))
    batch = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": np.zeros_like(positions),
        "positions": positions,
    }
    return jax.device_put(batch, program.batch_sharding)


def tables(
    stage1: Stage1,
    attempts: list[Attempt],
    steps: tuple[list[float], list[float]],
    load: float,
) -> list[Table]:
    """Return the measurements as tables."""
    ratios = [a / b for a, b in zip(stage1.copies_s, stage1.memcpys_s, strict=True)]
    gb = stage1.num_bytes / 1e9
    median = statistics.median
    write_s = median(a.write_s for a in attempts)
    beside, alone = steps
    return [
        Table(
            title="Stage 1: the copy to host memory, for which training waits",
            text=f"{gb:.2f} GB in {NUM_LEAVES} leaves on 8 simulated devices, in turns "
            f"with a memcpy of the same pieces into existing buffers, {PAIRS} pairs; "
            f"load average at the start {load:.1f}. The first copy allocates its "
            f"memory from the system, {stage1.first_s:.3f} s; later copies reuse the "
            "buffers. Not measured on a GPU.",
            header=("", "min", "median", "max"),
            rows=[
                ("copy, s", *spread(stage1.copies_s)),
                ("memcpy, s", *spread(stage1.memcpys_s)),
                ("copy / memcpy", *spread(ratios)),
                ("copy, GB/s", *spread([gb / s for s in stage1.copies_s])),
            ],
        ),
        Table(
            title="Stage 2: the writing in the background",
            text=f"{len(attempts)} saves of the same {gb:.2f} GB to a local disk, "
            "without other load: medians. The pieces are written, read back and "
            "compared, and only then committed.",
            header=("", "median"),
            rows=[
                ("whole, s", f"{write_s:.3f}"),
                ("GB/s", f"{gb / write_s:.2f}"),
                (
                    "share of the checksums of the host copy (CRC32C)",
                    f"{median(a.checksum_s / a.write_s for a in attempts):.1%}",
                ),
                (
                    "share of reading back and comparing",
                    f"{median(a.read_back_s / a.write_s for a in attempts):.1%}",
                ),
            ],
        ),
        Table(
            title="Steps beside a save",
            text=f"{MODEL.layers} layers of width {MODEL.d_model}, batch 8 x "
            f"{SEQ_LEN}, dp 8, ZeRO-2; a save every {STEPS_BETWEEN} steps of one run. "
            "The simulated devices and the writer share two cores; on a GPU host the "
            "writer has the CPU cores to itself.",
            header=("steps", "number", "median, s"),
            rows=[
                ("no save beside them", f"{len(alone)}", f"{median(alone):.3f}"),
                ("while a save is written", f"{len(beside)}", f"{median(beside):.3f}"),
                ("ratio", "", f"{median(beside) / median(alone):.3f}"),
            ],
        ),
    ]


def spread(values: list[float]) -> tuple[str, str, str]:
    """Show minimum, median and maximum."""
    median = statistics.median(values)
    return f"{min(values):.3f}", f"{median:.3f}", f"{max(values):.3f}"


if __name__ == "__main__":
    main()
