"""Restore a state from every mesh onto every mesh, and count the bytes read.

    python -m scripts.faults.restore_matrix

On 8 simulated devices, in one process: a state of random bits is saved under each of 8
layouts (pipeline, virtual stages, tensor and data parallelism, ZeRO level) and restored
under each layout, without training. Then four processes restore one state, intact and
damaged (`scripts.faults.restore_bytes`). Writes
docs/benchmarks/restore.md and ends with 1 if a bit differs.
"""

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mjax.ckpt.manager import Checkpoints, CkptConfig
from mjax.ckpt.recovery import by_path
from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.mesh.axes import AxisSizes
from mjax.mesh.build import build_mesh
from mjax.mesh.devices import simulate_devices
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig
from mjax.step.program import Program, build_program
from scripts.evidence import Table, commit, write_page
from scripts.faults import restore_bytes

MODEL = ModelConfig(
    layers=8, d_model=64, heads=8, vocab_size=256, window=(16,), norm_bias=True
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh and how it is used."""

    sizes: AxisSizes
    zero: int
    chunks: int = 1
    uneven: bool = False

    @property
    def pipeline(self) -> PipelineConfig | None:
        """Settings of the pipeline; None without one."""
        if self.sizes.pp == 1:
            return None
        return PipelineConfig(chunks=self.chunks, uneven_layers=self.uneven)


def _sizes(pp: int, dp_replicate: int, dp_shard: int, tp: int) -> AxisSizes:
    return AxisSizes(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)


LAYOUTS = {
    "one device": Layout(sizes=_sizes(1, 1, 1, 1), zero=0),
    "dp8, ZeRO 3": Layout(sizes=_sizes(1, 1, 8, 1), zero=3),
    "dp8 as 4 replicas, ZeRO 1": Layout(sizes=_sizes(1, 4, 2, 1), zero=1),
    "tp8": Layout(sizes=_sizes(1, 1, 1, 8), zero=0),
    "dp2 x 2 x tp2, ZeRO 2": Layout(sizes=_sizes(1, 2, 2, 2), zero=2),
    "pp2 x dp2 x tp2, 4 chunks, ZeRO 2": Layout(
        sizes=_sizes(2, 1, 2, 2), zero=2, chunks=4
    ),
    "pp2 x dp4, 3 uneven chunks, ZeRO 1": Layout(
        sizes=_sizes(2, 1, 4, 1), zero=1, chunks=3, uneven=True
    ),
    "pp4 x tp2, 2 chunks": Layout(sizes=_sizes(4, 1, 1, 2), zero=0, chunks=2),
}


def main() -> int:
    """Run everything, write the page, return 1 if a bit differs."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    read, is_read = restore_bytes.measure()
    damaged, is_noticed = restore_bytes.damage_one()
    simulate_devices(8)
    with tempfile.TemporaryDirectory() as folder:
        matrix, is_same = try_all(Path(folder))
    command = "python -m scripts.faults.restore_matrix"
    tables = [matrix, read, damaged]
    print(write_page("restore", "Restoring on another mesh", command, tables))
    return int(not (is_same and is_read and is_noticed))


def make_program(layout: Layout) -> Program:
    """Build the program of a layout; nothing is compiled."""
    return build_program(
        model=MODEL,
        optimizer=OptimConfig(),
        batch=BatchConfig(size=32, microbatches=4 if layout.pipeline else 1),
        precision=PrecisionConfig(),
        seq_len=32,
        num_steps=10,
        seed=0,
        zero_level=layout.zero,
        isolate_documents=True,
        mesh=build_mesh(layout.sizes, jax.devices()[: layout.sizes.num_devices]),
        pipeline=layout.pipeline,
    )


def try_all(folder: Path) -> tuple[Table, bool]:
    """Save under every layout and restore under every layout."""
    programs = {name: make_program(layout) for name, layout in LAYOUTS.items()}
    for index, program in enumerate(programs.values()):
        checkpoints = Checkpoints(folder / str(index), CkptConfig())
        # The state in the layout of a run: in the slots of its stages.
        state = program.from_saved(restore_bytes.drawn_state(program))
        checkpoints.save(1, lambda p=program, s=state: p.to_saved(s), {})
        if not checkpoints.wait():
            raise RuntimeError(f"not saved: {checkpoints.attempts()}")
        checkpoints.close()
    rows, is_same = [], True
    for index, saved_under in enumerate(programs):
        verdicts = []
        for program in programs.values():
            checkpoints = Checkpoints(folder / str(index), CkptConfig())
            restored = checkpoints.restore(program.abstract_saved)
            checkpoints.close()
            assert restored is not None
            in_run = program.from_saved(restored.state)
            verdicts.append(count_same(program.to_saved(in_run), program))
        is_same &= all(same == of for same, of in verdicts)
        rows.append([saved_under, *(f"{same} of {of}" for same, of in verdicts)])
        print(" | ".join(rows[-1]), flush=True)
    table = Table(
        title="8 meshes x 8 meshes",
        text=(
            f"On commit {commit()}: 8 simulated devices, one process; {MODEL.layers} "
            f"layers of width {MODEL.d_model} with the optimizer's moments, random "
            "bits (including negative zeros) in every leaf. The state is laid out for "
            "the mesh of the row (the slots of its stages), saved, restored for the "
            "mesh of the column, and taken out of its slots; then every leaf is "
            "compared bit for bit with the original. A cell counts the leaves that "
            "are equal."
        ),
        header=("saved under \\ restored under", *programs),
        rows=rows,
    )
    return table, is_same


def count_same(state: Any, program: Program) -> tuple[int, int]:
    """Count the leaves with the right bits and sharding, and all leaves."""
    wanted = by_path(program.abstract_saved)
    found = by_path(state)
    same = 0
    for name, leaf in wanted.items():
        got, values = found[name], restore_bytes.drawn_values(name, leaf)
        same += (
            got.dtype == leaf.dtype
            and got.sharding.is_equivalent_to(leaf.sharding, got.ndim)
            and np.asarray(got).tobytes() == values.tobytes()
        )
    return same, len(wanted)


if __name__ == "__main__":
    sys.exit(main())
