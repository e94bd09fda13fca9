"""Restore in four processes, and count the bytes that each reads.

A part of `scripts.faults.restore_matrix`.

`measure` starts this module four times, and so does `damage_one`. Each process makes
the same state, saves it together with the others, restores it with a new `Checkpoints`,
and compares every bit of its shards. It reports two numbers of bytes: those of pieces,
as `Restored.bytes_read` counts them, and all that it read from files during the restore
(rchar of /proc/self/io).
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mjax.ckpt.manager import Checkpoints, CkptConfig
from mjax.ckpt.recovery import by_path
from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.mesh.axes import MeshConfig, resolve
from mjax.mesh.build import build_mesh
from mjax.mesh.devices import simulate_devices
from mjax.model.config import ModelConfig
from mjax.processes.agreement import Agreement
from mjax.processes.config import DistributedConfig
from mjax.processes.distributed import start
from mjax.step.program import Program, build_program
from scripts.evidence import REPOSITORY, Table

NUM_PROCESSES = 4
CASES = {
    "DDP: `--mesh.dp 4 --mesh.dp-shard 1 --zero 0`": {"dp_shard": 1, "zero": 0},
    "two replicas: `--mesh.dp 4 --mesh.dp-shard 2 --zero 3`": {
        "dp_shard": 2,
        "zero": 3,
    },
    "one: `--mesh.dp 4 --zero 3`": {"dp_shard": 4, "zero": 3},
}
DAMAGE = {"dp_shard": 4, "zero": 3, "damage": 1}
"""Case in which every process reads its own quarter; one file of process 3 is
damaged."""
MODEL = ModelConfig(layers=4, d_model=256, heads=8, vocab_size=512)


def measure() -> tuple[Table, bool]:
    """Run all cases; return the table, and whether every process restored every bit."""
    rows, is_right = [], True
    for name, case in CASES.items():
        reports = _run_case(case)
        total = reports[0]["state_bytes"]
        is_same = all(report["is_same"] for report in reports)
        is_right &= is_same
        read = [report["bytes_read"] for report in reports]
        rows.append(
            [
                *(name, f"{total / 1e6:.1f}", *(f"{n / 1e6:.1f}" for n in read)),
                *(f"{sum(read) / total:.3f}", " ".join(_mb(reports, "rchar"))),
                *(" ".join(_mb(reports, "held")), "yes" if is_same else "NO"),
            ]
        )
        print(" | ".join(rows[-1]), flush=True)
    table = Table(
        title="Bytes that four processes read",
        text=(
            f"Four processes of one device; a model of {MODEL.layers} layers of width "
            f"{MODEL.d_model} with its optimizer state, random bits in every leaf. In "
            "MB: the state; the pieces that each process read and checked, and their "
            "sum divided by the state; all bytes that each process read from files "
            "during `restore` (rchar of /proc/self/io: index, manifests, and "
            "libraries loaded at first use too); and the bytes that its device holds "
            "afterwards. If devices of several processes hold the same values, one "
            "process reads them and the others receive them over the devices' "
            "network. Every process compares every bit that it holds."
        ),
        header=(
            *("layout", "state", *(f"process {r}" for r in range(NUM_PROCESSES))),
            *("sum / state", "rchar", "held", "same bits"),
        ),
        rows=rows,
    )
    return table, is_right


def damage_one() -> tuple[Table, bool]:
    """Damage a file that one process reads.

    Returns:
      the step that each process restored, and whether all are right.
    """
    reports = _run_case(DAMAGE)
    is_right = len({json.dumps(report["put_aside"]) for report in reports}) == 1
    rows = []
    for rank, report in enumerate(reports):
        [said] = report["put_aside"]
        is_right &= report["is_same"] and report["step"] == 1
        reason = re.sub(r"\S*/2.damaged", "STORE/2.damaged", said)
        rows.append([str(rank), str(report["step"]), reason])
        rows[-1].append("yes" if report["is_same"] else "NO")
        print(" | ".join(rows[-1]), flush=True)
    table = Table(
        title="Damage that one of four processes sees",
        text=(
            "`--mesh.dp 4 --zero 3`: each process reads a quarter. Steps 1 and 2 are "
            "saved, and one bit of the file of process 3 in step 2 is flipped; no "
            "other process reads that file. All processes must move the step aside "
            "and restore step 1."
        ),
        header=("process", "restored step", "put aside", "same bits"),
        rows=rows,
    )
    return table, is_right


def _mb(reports: list[dict[str, Any]], name: str) -> list[str]:
    return [f"{report[name] / 1e6:.1f}" for report in reports]


def _run_case(case: dict[str, int]) -> list[dict[str, Any]]:
    """Start the processes and return their reports, by rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(NUM_PROCESSES):
            asked = {
                **case,
                "folder": folder,
                "distributed": {
                    "coordinator": coordinator,
                    "num_processes": NUM_PROCESSES,
                    "process_id": rank,
                },
            }
            processes.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "scripts.faults.restore_bytes",
                        json.dumps(asked),
                    ],
                    cwd=REPOSITORY,
                    stdout=subprocess.DEVNULL,
                )
            )
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"the processes of {case} ended with {codes}")
        return [
            json.loads((Path(folder) / f"report-{rank}.json").read_text())
            for rank in range(NUM_PROCESSES)
        ]


def be_one_process(asked: dict[str, Any]) -> None:
    """Save and restore as one of the processes, and write the report."""
    simulate_devices(1)
    start(DistributedConfig(**asked["distributed"]))
    sizes = resolve(MeshConfig(dp=4, dp_shard=asked["dp_shard"]), jax.device_count())
    program = build_program(
        model=MODEL,
        optimizer=OptimConfig(),
        batch=BatchConfig(size=8),
        precision=PrecisionConfig(),
        seq_len=64,
        num_steps=10,
        seed=0,
        zero_level=asked["zero"],
        isolate_documents=True,
        mesh=build_mesh(sizes),
    )
    state = drawn_state(program)
    folder = Path(asked["folder"])
    first = Checkpoints(folder, CkptConfig())
    for step in (1, 2) if "damage" in asked else (1,):
        first.save(step, lambda: state, {})
        if not first.wait():
            raise RuntimeError(f"the state was not saved: {first.attempts()}")
    first.close()
    if "damage" in asked:
        if jax.process_index() == 0:
            flip_a_bit(folder / "checkpoints" / "2" / "state" / "ocdbt.process_3" / "d")
        Agreement("a file is damaged").together(lambda: None)
    second = Checkpoints(folder, CkptConfig())
    before = _rchar()
    restored = second.restore(program.abstract_saved)
    rchar = _rchar() - before
    second.close()
    assert restored is not None
    pairs = zip(jax.tree.leaves(restored.state), jax.tree.leaves(state), strict=True)
    shards = [
        shard for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards
    ]
    report = {
        "step": restored.step,
        "put_aside": restored.put_aside,
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        "bytes_read": restored.bytes_read,
        "rchar": rchar,
        "held": sum(shard.data.nbytes for shard in shards),
        "is_same": all(_same_shards(a, b) for a, b in pairs),
    }
    path = folder / f"report-{jax.process_index()}.json"
    path.write_text(json.dumps(report))


def flip_a_bit(folder: Path) -> None:
    """Flip one bit in the middle of the largest file of a folder."""
    path = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def drawn_state(program: Program) -> Any:
    """Make a state in canonical form, with random values from one seed per leaf."""
    names = by_path(program.abstract_saved)
    leaves = [drawn_array(name, leaf) for name, leaf in names.items()]
    return jax.tree.unflatten(jax.tree.structure(program.abstract_saved), leaves)


def drawn_array(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Draw a leaf, including negative zeros; its values depend only on its name."""
    values = drawn_values(name, leaf)
    get: Callable[[Any], np.ndarray] = values.__getitem__
    assert leaf.sharding is not None
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, get)


def drawn_values(name: str, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    """Return the global values that `drawn_array` places on devices."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = np.asarray(100 * rng.normal(size=leaf.shape)).astype(leaf.dtype)
    if np.issubdtype(leaf.dtype, np.floating):
        values = np.where(np.abs(values) < 5, -np.zeros_like(values), values)
    return np.asarray(values)


def _same_shards(got: jax.Array, wanted: jax.Array) -> bool:
    """Compare the bits of this process's shards of two arrays."""
    pairs = zip(got.addressable_shards, wanted.addressable_shards, strict=True)
    return got.dtype == wanted.dtype and all(
        a.index == b.index
        and np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
        for a, b in pairs
    )


def _rchar() -> int:
    lines = Path(f"/proc/{os.getpid()}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


if __name__ == "__main__":
    be_one_process(json.loads(sys.argv[1]))
