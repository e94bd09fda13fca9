"""Read what Pallas Mosaic GPU kernels compile to, on a machine without a GPU.

Enters: the name of a function that returns cases, kernels with the shapes to compile
them for. Leaves: for each kernel its registers, spills, shared memory, and how often
the instructions occur that decide its speed; and what is wrong with it.

jax compiles such a kernel down to the code of the GPU, and writes what it did to a
folder that an environment variable names, if that is set before jax is imported. So
the cases are compiled in a process of their own, which is this module as a program:

    python -m scripts.kernels.compiled_kernels MODULE:FUNCTION GPU FILE
"""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from mjax.hardware.described import described_mesh
from mjax.hardware.gpus import GPUS
from mjax.mesh.axes import AxisSizes
from scripts.evidence import REPOSITORY

WATCHED = ("HGMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "STL", "LDL", "MUFU.EX2")
"""Instructions counted: Hopper's matrix product; bulk copies in, out and added; stores
to and loads from local memory; the exponential."""

_DUMP_VARIABLE = "MOSAIC_GPU_DUMP_TO"
_SERIALISED = re.compile(r"wgmma\.mma_async instructions are serialized.*")
_SPILLS = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_REGISTERS = re.compile(r"Used (\d+) registers")
_SET_REGISTERS = re.compile(r"setmaxnreg\.\w+\.sync\.aligned\.u32 (\d+)")
_LAUNCH = re.compile(r"gpu\.launch .* dynamic_shared_memory_size (%[\w.]+)")
_CONSTANT = re.compile(r"(%[\w.]+) = arith\.constant (\d+) : i32")
_OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?([A-Z][\w.]*)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCase:
    """A function that holds kernels, and what to compile it for."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    """Pytrees of jax.ShapeDtypeStruct, without sharding."""
    required: tuple[str, ...] = ("HGMMA", "UTMALDG")
    """Instructions of `WATCHED` that each of its kernels must have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """What one kernel became."""

    name: str
    registers: int
    """Per thread at the start."""
    set_registers: tuple[int, ...]
    """What its warpgroups set for themselves later, most first."""
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_memory_bytes: int
    """Per block, barriers included."""
    serialised: tuple[str, ...]
    """Why matrix products wait for each other, in the words of ptxas."""
    instructions: Mapping[str, int]
    """How often each of `WATCHED` stands in the code."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseReport:
    """What one case became, and what is wrong with it."""

    case: str
    compile_s: float
    kernels: tuple[CompiledKernel, ...]
    faults: tuple[str, ...]


def compile_cases(
    cases: str, *, gpu: str = "h200", timeout_s: float = 1200
) -> list[CaseReport]:
    """Compile the cases in a process of its own and read what came out.

    Args:
      cases: MODULE:FUNCTION; the function takes nothing and returns {name: KernelCase}.
      gpu: a name in `hardware.gpus.GPUS`.
      timeout_s: for all cases together.
    Raises:
      RuntimeError: the process failed; a case that does not compile is a fault of it.
    """
    with tempfile.TemporaryDirectory(prefix="mjax-kernels-") as folder:
        dumps = Path(folder) / "dumps"
        dumps.mkdir()
        out = Path(folder) / "reports.json"
        # Without the flags of the caller, which may be those of a test session.
        env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        env |= {_DUMP_VARIABLE: str(dumps), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "scripts.kernels.compiled_kernels",
                cases,
                gpu,
                str(out),
            ],
            cwd=REPOSITORY,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode != 0:
            raise RuntimeError(f"compiling {cases} for {gpu} failed:\n{done.stderr}")
        return [_from_json(report) for report in json.loads(out.read_text())]


def find_faults(
    kernels: Iterable[CompiledKernel],
    *,
    required: Iterable[str],
    max_shared_memory_bytes: int,
) -> tuple[str, ...]:
    """Say what is wrong with compiled kernels; nothing, if they may be shipped."""
    faults = []
    for kernel in kernels:
        if kernel.spill_store_bytes or kernel.spill_load_bytes:
            faults.append(
                f"{kernel.name} spills: {kernel.spill_store_bytes} bytes stored, "
                f"{kernel.spill_load_bytes} loaded"
            )
        faults += [f"{kernel.name}: {reason}" for reason in kernel.serialised]
        faults += [
            f"{kernel.name} has no {instruction}"
            for instruction in required
            if not kernel.instructions[instruction]
        ]
        if kernel.shared_memory_bytes > max_shared_memory_bytes:
            faults.append(
                f"{kernel.name} takes {kernel.shared_memory_bytes} bytes of shared "
                f"memory; a block has {max_shared_memory_bytes}"
            )
    return tuple(faults)


def read_dump(dumps: Path, stem: str) -> CompiledKernel:
    """Read the files that jax wrote of one kernel.

    Args:
      dumps: the folder.
      stem: of the files: the kernel's name and a number.
    Raises:
      RuntimeError: a file is missing or has no such text.
    """

    def text(suffix: str) -> str:
        path = dumps / f"{stem}{suffix}"
        if not path.exists():
            raise RuntimeError(
                f"jax wrote no {path.name}; ptxas and nvdisasm come with make env-plan"
            )
        return path.read_text()

    log = text(".ptxas")
    spills, registers = _SPILLS.search(log), _REGISTERS.search(log)
    if spills is None or registers is None:
        raise RuntimeError(f"cannot read what ptxas says of {stem}:\n{log}")
    return CompiledKernel(
        name=stem.rpartition("_")[0],
        registers=int(registers[1]),
        set_registers=tuple(
            sorted({int(n) for n in _SET_REGISTERS.findall(text(".ptx"))}, reverse=True)
        ),
        stack_bytes=int(spills[1]),
        spill_store_bytes=int(spills[2]),
        spill_load_bytes=int(spills[3]),
        shared_memory_bytes=_launched_shared_memory(dumps / f"{stem}.mlir-passes.log"),
        serialised=tuple(sorted(set(_SERIALISED.findall(log)))),
        instructions=count_instructions(text(".sass_ctrl")),
    )


def count_instructions(sass: str) -> dict[str, int]:
    """Count each of `WATCHED` in disassembled code, whatever its suffixes."""
    opcodes = _OPCODE.findall(sass)
    if not opcodes:
        raise RuntimeError(f"no instructions in this code: {sass[:200]!r}")
    return {
        watched: sum(f"{opcode}.".startswith(f"{watched}.") for opcode in opcodes)
        for watched in WATCHED
    }


def _launched_shared_memory(path: Path) -> int:
    """Return the bytes with which the kernel is launched, read from its first form."""
    constants: dict[str, int] = {}
    with path.open() as lines:
        for line in lines:
            if constant := _CONSTANT.search(line):
                constants[constant[1]] = int(constant[2])
            if launch := _LAUNCH.search(line):
                return constants[launch[1]]
    raise RuntimeError(f"no launch in {path.name}")


def _compile_all(cases: Mapping[str, KernelCase], gpu: str) -> list[CaseReport]:
    """Compile each case for one described GPU; runs where the dumps are written."""
    dumps = Path(os.environ[_DUMP_VARIABLE])
    one = AxisSizes(pp=1, dp_replicate=1, dp_shard=1, tp=1)
    mesh = described_mesh(one, gpu=gpu)
    sharding = NamedSharding(mesh, PartitionSpec())
    reports = []
    for name, case in cases.items():
        args = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            case.args,
        )
        before = set(dumps.iterdir())
        started_s = time.monotonic()
        kernels, faults = (), ()
        try:
            with use_abstract_mesh(mesh.abstract_mesh):
                jax.jit(case.function).lower(*args).compile()
        except Exception as error:  # of whatever part of jax; it is the report
            faults = (f"does not compile: {error}",)
        compile_s = time.monotonic() - started_s
        if not faults:
            new = sorted(set(dumps.glob("*.ptxas")) - before)
            kernels = tuple(read_dump(dumps, path.stem) for path in new)
            faults = find_faults(
                kernels,
                required=case.required,
                max_shared_memory_bytes=GPUS[gpu].shared_memory_per_block_bytes,
            )
        if not faults and not kernels:
            faults = ("no kernel was compiled: none in it, or the same as before",)
        for path in dumps.glob("*.mlir-passes.log"):  # some 60 MB each
            path.unlink()
        reports.append(
            CaseReport(case=name, compile_s=compile_s, kernels=kernels, faults=faults)
        )
    return reports


def _from_json(report: dict[str, Any]) -> CaseReport:
    """Undo dataclasses.asdict and JSON, which knows no tuples."""

    def kernel(fields: dict[str, Any]) -> CompiledKernel:
        lists = {name: v for name, v in fields.items() if isinstance(v, list)}
        fields = fields | {name: tuple(v) for name, v in lists.items()}
        return CompiledKernel(**fields)

    kernels = tuple(kernel(fields) for fields in report["kernels"])
    faults = tuple(report["faults"])
    report = report | {"kernels": kernels, "faults": faults}
    return CaseReport(**report)


def _main(cases: str, gpu: str, out: str) -> None:
    module, _, function = cases.partition(":")
    found = getattr(importlib.import_module(module), function)()
    reports = [dataclasses.asdict(report) for report in _compile_all(found, gpu)]
    Path(out).write_text(json.dumps(reports))


if __name__ == "__main__":
    _main(*sys.argv[1:])
