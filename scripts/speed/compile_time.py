"""Measure how long a training step takes to trace, to lower and to compile.

    python -m scripts.speed.compile_time --rows FILE

It measures two things. First, mjax against `scripts/speed/bare_loop.py`, with the
workload of `bench_overhead` on 8 simulated devices: one process builds both programs
repeatedly in turns, and the order changes from pair to pair. Second, each recipe on the
fewest nodes on which the search finds a layout that fits in closed form, compiled for
described GPUs as `python -m mjax.plan` does (needs `make env-plan`), a process each.

Seconds are CPU-seconds of the process, user and system, which other programs disturb
less than the clock. Appends each measurement to FILE, one JSON object per line, skips
those that FILE has, and writes docs/benchmarks/compile_time.md from it.
"""

import argparse
import dataclasses
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from mjax.config.command_line import parse
from mjax.config.train import TrainConfig
from mjax.hardware.described import described_mesh
from mjax.plan.compile import OPTIONS, compilable
from mjax.plan.options import Topology
from mjax.plan.search import search
from mjax.plan.topology import settle, with_vocabulary
from mjax.recipes import RECIPES, TUNED_FOR
from mjax.step.traced import trace_step
from scripts.evidence import Table, commit, write_page
from scripts.speed import bench_overhead

BOUND = 1.5
"""Times the bare loop."""
BOUND_S = 120.0
"""CPU-seconds of a recipe."""
PARTS = ("trace", "lower", "compile")
LEVELS = (None, 0)
"""Values of `xla_backend_optimization_level`; None leaves XLA's default."""
EXTRA = {
    "llama3-8b, 2 nodes, tp 2, 8 microbatches": (
        "llama3-8b",
        2,
        "--mesh.tp 2 --batch.microbatches 8",
    )
}
"""(recipe, nodes, flags): formerly the slowest to compile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe on some nodes of its GPUs."""

    name: str
    recipe: str
    nodes: int
    flags: str

    @property
    def topology(self) -> Topology:
        """The GPUs that the recipe is tuned for."""
        return Topology(gpu=TUNED_FOR[self.recipe][0], nodes=self.nodes)

    @property
    def config(self) -> TrainConfig:
        """The configuration of the run; XLA can compile its attention without a GPU."""
        flags = f"--recipe {self.recipe} {self.flags}".split()
        config = parse(flags, RECIPES, "python -m scripts.speed.compile_time")[0]
        return compilable(with_vocabulary(config), self.topology)[0]


def smallest(recipe: str) -> Case:
    """Find the fewest nodes on which a layout fits, and the fastest layout there.

    Args:
      recipe: a name in `TUNED_FOR`.
    Raises:
      ValueError: nothing fits on as many nodes as the recipe is tuned for.
    """
    gpu, most = TUNED_FOR[recipe]
    config = with_vocabulary(RECIPES[recipe]())
    for nodes in range(1, most + 1):
        found = search(config, Topology(gpu=gpu, nodes=nodes))
        if found:
            return Case(name=recipe, recipe=recipe, nodes=nodes, flags=found[0].flags)
    raise ValueError(f"no layout of {recipe} fits on up to {most} nodes of {gpu}")


def time_parts(
    trace: Callable[[], jax.stages.Traced], options: dict[str, Any]
) -> tuple[dict[str, float], str]:
    """Trace, lower and compile; return the CPU-seconds of each, and the program.

    Args:
      trace: builds the program and traces it.
      options: of the compiler.
    """
    at = [time.process_time()]
    traced = trace()
    at.append(time.process_time())
    lowered = traced.lower()
    at.append(time.process_time())
    compiled = lowered.compile(compiler_options=options)
    at.append(time.process_time())
    seconds = [b - a for a, b in itertools.pairwise(at)]
    return dict(zip(PARTS, seconds, strict=True)), str(compiled.as_text())


def compile_case(case: Case, level: int | None) -> dict[str, Any]:
    """Compile a case in this process; return its row.

    Args:
      case: what to compile.
      level: of `LEVELS`.
    """
    config, sizes = settle(case.config, case.topology)
    mesh = described_mesh(
        sizes, gpu=case.topology.gpu, gpus_per_node=case.topology.gpus_per_node
    )
    options: dict[str, Any] = dict(OPTIONS)
    if level is not None:
        options["xla_backend_optimization_level"] = level
    seconds, text = time_parts(lambda: trace_step(config, mesh)[1], options)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "kind": "recipe",
        "commit": commit(),
        "case": dataclasses.asdict(case),
        "level": level,
        **seconds,
        "process": used.ru_utime + used.ru_stime,
        "resident_gb": used.ru_maxrss * 1024 / 1e9,
        "instructions": text.count(" = "),
    }


def pairs(count: int) -> list[dict[str, Any]]:
    """Build both programs of the benchmark in turns; return a row for each pair."""
    work = bench_overhead.Workload()
    bench_overhead.simulate_devices(work)
    ours = bench_overhead.MjaxStep(work)
    bare = bench_overhead.BareStep(work, ours.state.params)
    traces: dict[str, Callable[[], jax.stages.Traced]] = {
        "mjax": lambda: bench_overhead.mjax_program(work).trace(),
        "bare": bare.trace,
    }
    rows = []
    for pair in range(count + 1):
        row: dict[str, Any] = {"kind": "pair", "commit": commit()}
        for name in traces if pair % 2 else reversed(traces):
            jax.clear_caches()
            row[name], text = time_parts(traces[name], {})
            row[name]["fusions"] = text.count(" fusion(")
        if pair:  # the first one imports the compiler's dependencies
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def total(parts: dict[str, float]) -> float:
    """Return the sum of the parts."""
    return sum(parts[name] for name in PARTS)


def measured_at(rows: Sequence[dict[str, Any]]) -> str:
    """Name the commits of the rows; the page may be written later."""
    return "Measured at " + ", ".join(
        f"`{c}`" for c in dict.fromkeys(map(_commit, rows))
    )


def _commit(row: dict[str, Any]) -> str:
    return row["commit"]


def pair_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Write medians of both programs, and of their ratios."""
    measures: dict[str, Callable[[dict[str, float]], float]] = {
        **{f"{name}, CPU-s": lambda p, name=name: p[name] for name in PARTS},
        "**all three, CPU-s**": total,
        "fusions": lambda p: p["fusions"],
    }
    cells = []
    for title, measure in measures.items():
        ours, bare = ([measure(row[name]) for row in rows] for name in ("mjax", "bare"))
        ratios = [a / b for a, b in zip(ours, bare, strict=True)]
        digits = 0 if title == "fusions" else 2
        cells.append(
            (
                title,
                *(f"{statistics.median(x):.{digits}f}" for x in (ours, bare)),
                f"{statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})",
            )
        )
    return Table(
        title="Against the bare loop",
        text=f"""Medians of {len(rows)} pairs in turns, on a machine that other programs
used too. Bound for *all three*: {BOUND} times the bare loop. A fusion is a kernel of
the CPU. Trace includes building the program. {measured_at(rows)}.""",
        header=("", "mjax", "bare", "mjax / bare (min to max)"),
        rows=cells,
    )


def recipe_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Write a row for each recipe and level, and name the missing ones."""
    done = {(row["case"]["name"], row["level"]) for row in rows}
    missing = {
        level: [name for name in (*TUNED_FOR, *EXTRA) if (name, level) not in done]
        for level in LEVELS
    }
    still = "\n".join(
        f"\nNot measured yet at level {'default' if level is None else level}: "
        f"{'; '.join(names)}."
        for level, names in missing.items()
        if names
    )
    return Table(
        title="Recipes",
        text=f"""Each on the fewest nodes of 8 GPUs on which the search finds a layout
that fits in closed form, with its fastest layout there, compiled without a GPU in a
process of its own. Nothing ran. *Level* is `xla_backend_optimization_level`; a run has
XLA's default. *Process* is everything from the start of Python. Bound:
{BOUND_S:.0f} CPU-s for the three parts. {measured_at(rows)}.
{still}""".rstrip(),
        header=(
            *("recipe", "GPUs", "flags", "level"),
            *(f"{name}, CPU-s" for name in PARTS),
            *("all three, CPU-s", "process, CPU-s", "peak RSS, GB", "instructions"),
        ),
        rows=[
            (
                row["case"]["name"],
                f"{8 * row['case']['nodes']} x {TUNED_FOR[row['case']['recipe']][0]}",
                f"`{row['case']['flags']}`",
                "default" if row["level"] is None else str(row["level"]),
                *(f"{row[name]:.1f}" for name in PARTS),
                f"**{total(row):.1f}**",
                *(f"{row[name]:.1f}" for name in ("process", "resident_gb")),
                str(row["instructions"]),
            )
            for row in rows
        ],
    )


def measure_recipes(path: Path) -> None:
    """Compile every case that is not in the file, each in a separate process."""
    found = [smallest(recipe) for recipe in TUNED_FOR]
    found += [
        Case(name=name, recipe=recipe, nodes=nodes, flags=flags)
        for name, (recipe, nodes, flags) in EXTRA.items()
    ]
    for level in LEVELS:
        for case in found:
            done = {(r["case"]["name"], r["level"]) for r in read(path, "recipe")}
            if (case.name, level) in done:
                continue
            job = json.dumps({"case": dataclasses.asdict(case), "level": level})
            command = [sys.executable, "-m", "scripts.speed.compile_time", "--job", job]
            out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            line = out.stdout.splitlines()[-1]
            append(path, [json.loads(line)])
            print(line, flush=True)


def read(path: Path, kind: str) -> list[dict[str, Any]]:
    """Return the rows of a kind: `pair` or `recipe`."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to the file."""
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> int:
    """Measure, write the page; return 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=Path, help="what is measured goes here")
    parser.add_argument(
        "--report", action="store_true", help="write the page, measure nothing"
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--job", help="compile one case in this process")
    args = parser.parse_args()
    if args.job is not None:
        job = json.loads(args.job)
        print(json.dumps(compile_case(Case(**job["case"]), job["level"])))
        return 0
    if args.rows is None:
        parser.error("give --rows FILE")
    if not args.report:
        if not read(args.rows, "pair"):
            append(args.rows, pairs(args.pairs))
        measure_recipes(args.rows)
    turns, recipes = read(args.rows, "pair"), read(args.rows, "recipe")
    path = write_page(
        "compile_time",
        "How long a step takes to compile",
        "python -m scripts.speed.compile_time --rows FILE",
        [pair_table(turns), recipe_table(recipes)],
    )
    print(f"wrote {path}")
    ratio = statistics.median(total(r["mjax"]) / total(r["bare"]) for r in turns)
    slow = [row for row in recipes if total(row) > BOUND_S]
    return int(ratio > BOUND or bool(slow))


if __name__ == "__main__":
    sys.exit(main())
