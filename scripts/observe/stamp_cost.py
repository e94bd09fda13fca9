"""Cost of stamps in a step, compiled for described GPUs with and without them.

    make env-plan && .venv/bin/python -m scripts.observe.stamp_cost

Compiles whole training steps for described H200s, without GPUs, and reads XLA's
schedules. Writes docs/benchmarks/stamp_cost.md, and ends with 1 if stamps change a
collective, make compute wait longer for collectives in the model, overlap fewer bytes,
or add more than one kernel per stamp plus one.

Whether XLA makes a collective asynchronous tells nothing about its overlap. It does so
if any instruction lies between start and end, even a stamp or the copy of one number.
So the waits are modelled, without the time of launches.
"""

import dataclasses
import functools
import sys
import time
from collections import Counter
from collections.abc import Mapping

from mjax.config.optim import OptimConfig
from mjax.config.step import BatchConfig, PrecisionConfig
from mjax.hardware.described import described_mesh
from mjax.hardware.gpus import GPUS
from mjax.mesh.axes import AxisSizes
from mjax.model.config import ModelConfig
from mjax.pipeline.config import PipelineConfig
from mjax.plan.compile import OPTIONS, read_memory
from mjax.plan.cost import CostModel
from mjax.plan.hlo.analysis import Analysis, analyse
from mjax.plan.hlo.counts import launches
from mjax.plan.hlo.parse import Instruction, Module, parse
from mjax.plan.hlo.walk import walk
from mjax.plan.hlo.work import is_stamp
from mjax.plan.replay import replay
from mjax.recipes.gpt import gpt_1b3
from mjax.step.program import build_program
from scripts.evidence import Table, write_page

STAMP_S = 4e-6
"""Cost of one stamp: a launch inside a graph. Estimated, not measured on a GPU."""
ROLES = ("tp", "dp", "pp")
COST = CostModel.of(GPUS["h200"])
WORK = dataclasses.replace(COST, launch_s=0.0)
"""Costs without launches: a kernel takes the time of its bytes and FLOPs, so a stamp or
the copy of a number takes none."""
MOST_WAIT_S = 1e-6
"""Wait that stamps may add for a role when XLA reorders tiny kernels. The shortest
collective of a step takes 5 us in this model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step."""

    name: str
    model: ModelConfig
    sizes: AxisSizes
    rows: int
    microbatches: int = 1
    tp_chunks: int = 1
    zero: int = 1
    pipeline: PipelineConfig | None = None


def _sizes(pp: int = 1, dp: int = 1, tp: int = 1) -> AxisSizes:
    return AxisSizes(pp=pp, dp_replicate=1, dp_shard=dp, tp=tp)


MEGASCALE = ModelConfig(
    layers=4,
    d_model=12_288,
    heads=128,
    vocab_size=4096,
    block="parallel",
    attention="mosaic_gpu",
)
SMALL = dataclasses.replace(MEGASCALE, d_model=4096, heads=32)
CASES = (
    Case(
        name="4 layers of 175B, tp 8 in chunks",
        model=MEGASCALE,
        sizes=_sizes(tp=8),
        rows=1,
        tp_chunks=8,
    ),
    Case(
        name="gpt-1b3, one GPU",
        model=dataclasses.replace(gpt_1b3().model, attention="mosaic_gpu"),
        sizes=_sizes(),
        rows=8,
    ),
    Case(
        name="4 layers of width 4096, dp 4 x tp 2, ZeRO-3, 3 microbatches",
        model=SMALL,
        sizes=_sizes(dp=4, tp=2),
        rows=12,
        microbatches=3,
        zero=3,
    ),
    Case(
        name="8 layers of width 4096, pp 4 x tp 2, 2 virtual stages, 8 microbatches",
        model=dataclasses.replace(SMALL, layers=8),
        sizes=_sizes(pp=4, tp=2),
        rows=8,
        microbatches=8,
        pipeline=PipelineConfig(chunks=2),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Compiled properties of a step."""

    analysis: Analysis
    waits_s: Mapping[str, float]
    """Modelled seconds that compute waits for collectives, by role; see `WORK`."""
    launches: Counter[str]
    """Launches of one step: stamps, and other kernels."""
    step_s: float
    """Modelled."""
    temp_bytes: int
    compile_s: float

    @property
    def collectives(self) -> Counter[tuple[str, str, str, int]]:
        """Properties of a collective -> how often it runs in a step."""
        return Counter(
            (c.kind, c.role, c.dtype, c.wire_bytes)
            for c in self.analysis.collectives
            for _ in range(c.runs)
        )

    def hidden_bytes(self, role: str) -> int:
        """Bytes over an axis that are sent while a matmul or a kernel runs."""
        return sum(
            c.wire_bytes * c.runs
            for c in self.analysis.collectives
            if c.role == role and c.is_overlapped
        )


@functools.cache
def compile_case(case: Case, *, stamps: bool) -> Found:
    """Compile and read a step."""
    program = build_program(
        model=case.model,
        optimizer=OptimConfig(),
        batch=BatchConfig(size=case.rows, microbatches=case.microbatches),
        precision=PrecisionConfig(),
        seq_len=2048,
        num_steps=10,
        seed=0,
        zero_level=case.zero,
        isolate_documents=False,
        mesh=described_mesh(case.sizes),
        pipeline=case.pipeline,
        tp_chunks=case.tp_chunks,
        stamps=stamps,
    )
    lowered = program.trace().lower()
    started_s = time.perf_counter()
    compiled = lowered.compile(compiler_options=OPTIONS)
    compile_s = time.perf_counter() - started_s
    text = compiled.as_text()
    assert text is not None
    temp_bytes = read_memory(compiled).temporary_bytes
    return read(text, case.sizes, temp_bytes=temp_bytes, compile_s=compile_s)


def read(
    text: str, sizes: AxisSizes, *, temp_bytes: int = 0, compile_s: float = 0.0
) -> Found:
    """Read a scheduled module of one step."""
    module = parse(text)
    analysis = analyse(module, sizes)
    return Found(
        analysis=analysis,
        waits_s=replay(module, analysis, WORK).exposed_s,
        launches=_launches(module),
        step_s=replay(module, analysis, COST).step_s,
        temp_bytes=temp_bytes,
        compile_s=compile_s,
    )


def _launches(module: Module) -> Counter[str]:
    """Count the launches of a step; all branches of a conditional count."""

    def follow(x: Instruction) -> tuple[str, ...]:
        return x.branches or ((x.body,) if x.opcode == "while" else ())

    found: Counter[str] = Counter()
    for site in walk(module, follow):
        if launches(site.instruction):
            kind = "stamp" if is_stamp(site.instruction) else "other"
            found[kind] += site.runs()
    return found


def find_faults(case: Case) -> list[str]:
    """Return changes by stamps that must not occur."""
    plain, stamped = (compile_case(case, stamps=on) for on in (False, True))
    return [f"{case.name}: {fault}" for fault in compare(plain, stamped)]


def compare(plain: Found, stamped: Found) -> list[str]:
    """Return changes from a step without stamps to one with stamps, as find_faults."""
    faults = []
    if plain.collectives != stamped.collectives:
        lost = plain.collectives - stamped.collectives
        new = stamped.collectives - plain.collectives
        faults.append(f"collectives differ, lost {lost}, new {new}")
    for role, waits_s in stamped.waits_s.items():
        before_s = plain.waits_s.get(role, 0.0)
        if waits_s > before_s + MOST_WAIT_S:
            faults.append(
                f"compute waits {(waits_s - before_s) * 1e6:.1f} us more for {role}"
            )
    for role in ROLES:
        before, after = plain.hidden_bytes(role), stamped.hidden_bytes(role)
        if after < before:
            faults.append(f"{before - after} bytes less hidden over {role}")
    num_stamps = stamped.launches["stamp"]
    more = stamped.launches.total() - plain.launches.total()
    if not 0 < more <= num_stamps + 1:  # the log is copied at the entry of a loop
        faults.append(f"{num_stamps} stamps add {more} kernels")
    return faults


def row(case: Case) -> list[str]:
    """Return a case's row."""
    plain, stamped = (compile_case(case, stamps=on) for on in (False, True))
    num_stamps = stamped.launches["stamp"]
    more = stamped.launches.total() - plain.launches.total()
    hidden = [
        f"{found.hidden_bytes(role) / 1e6:.0f}"
        for role in ROLES
        for found in (plain, stamped)
        if plain.hidden_bytes(role)
    ]
    same = plain.collectives == stamped.collectives
    temp = (stamped.temp_bytes - plain.temp_bytes) / 2**20
    return [
        case.name,
        f"{plain.collectives.total()}, {'the same' if same else 'others'}",
        ", ".join(f"{sum(x.waits_s.values()) * 1e3:.3f}" for x in (plain, stamped)),
        ", ".join(hidden) or "none",
        str(num_stamps),
        f"{plain.launches.total()} -> {stamped.launches.total()} ({more:+})",
        f"{temp:+.2f}",
        f"{stamped.step_s * 1e3:.1f}",
        f"{num_stamps * STAMP_S / stamped.step_s:.3%}",
        f"{plain.compile_s:.0f}, {stamped.compile_s:.0f}",
    ]


def main() -> int:
    """Write the page; return 1 if stamps change what they should not."""
    rows, faults = [], []
    for case in CASES:
        rows.append(row(case))
        faults += find_faults(case)
        print(rows[-1], *faults, sep="\n", flush=True)
    table = Table(
        title="With and without stamps",
        text="Whole training steps, compiled for H200s. Collectives: how many run in "
        "a step; the same, if each has its kind, role, dtype and bytes as before. "
        "Waits: of compute for collectives, modelled without launches. "
        "Kernels: those of all branches of a choice. Hidden: a matmul or a kernel "
        "runs between start and end; megabytes without and with stamps, for each role "
        f"that has any. Cost: {STAMP_S * 1e6:.0f} us per stamp (an estimate), as a "
        "share of the modelled step (docs/overlap.md); gpu_stamps.md has one measured.",
        header=(
            "step",
            "collectives",
            "waits, ms, without and with",
            "hidden, MB, without and with",
            "stamps",
            "kernels",
            "temporaries, MiB",
            "step modelled, ms",
            "cost",
            "compiled in s, without and with",
        ),
        rows=rows,
    )
    command = "python -m scripts.observe.stamp_cost"
    print(write_page("stamp_cost", "Stamps in a compiled step", command, [table]))
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
