"""Compare the modelled step of five runs at two commits, by purpose of its kernels.

    python -m scripts.plan.step_by_source BEFORE [NOW] [--only CASE]

Needs git and what `make env-plan` installs. Compiles each case for described GPUs with
the package of each commit, and reads both with the planner of the working tree.
Compiled modules are kept in build/step_by_source/, so a stopped command resumes, and
`--only` compiles one case at a time. Writes docs/benchmarks/step_by_source.md once all
are compiled. NOW is HEAD by default.
"""

import argparse
import dataclasses
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mjax.config.command_line import parse_with
from mjax.plan.options import Options
from mjax.plan.planning import Schedule, read_schedule
from mjax.plan.result import Source
from mjax.plan.sources import OTHER
from mjax.plan.topology import settle
from mjax.recipes import RECIPES
from scripts.evidence import REPOSITORY, Table, write_page
from scripts.kernels.attention_loops import package_at

FOLDER = REPOSITORY / "build" / "step_by_source"
_WORKER = Path(__file__).with_name("compiled_text.py")
_MEGASCALE = (
    "--recipe megascale-175b --mesh.tp 8 --mesh.pp 8 --pipeline.chunks 6 "
    "--mesh.tp-overlap chunks"
)
_FULL = "--model.window None"
_256_GPUS = "--nodes 32 --batch.size 768 --batch.microbatches 48"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A run, and its layout at each commit."""

    title: str
    flags: str
    before: str
    now: str


CASES: Mapping[str, Case] = {
    "175b-256": Case(
        title="175B on 256 GPUs",
        flags=f"{_MEGASCALE} {_FULL} {_256_GPUS}",
        before="--model.remat full",
        now="--model.remat core",
    ),
    "175b-window-256": Case(
        title="175B on 256 GPUs, the recipe's window",
        flags=f"{_MEGASCALE} {_256_GPUS}",
        before="--model.remat full",
        now="--model.remat core",
    ),
    "175b-12288": Case(
        title="175B on 12,288 GPUs",
        flags=f"{_MEGASCALE} {_FULL} --nodes 1536 --batch.size 6144 "
        "--batch.microbatches 32",
        before="--model.remat full",
        now="--model.remat core",
    ),
    "gpt-1b3-8": Case(
        title="gpt-1b3 on 8 GPUs",
        flags="--recipe gpt-1b3 --nodes 1",
        before="--model.remat full --batch.microbatches 1",
        now="--model.remat core --batch.microbatches 4",
    ),
    "llama3-8b-16": Case(
        title="llama3-8b on 16 GPUs",
        flags="--recipe llama3-8b --zero 2 --nodes 2 --batch.microbatches 32",
        before="--model.remat full",
        now="--model.remat core",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Read:
    """One case at one commit."""

    schedule: Schedule
    total_bytes: int

    @property
    def sources(self) -> dict[str, Source]:
        """Rows by source name."""
        return {row.name: row for row in self.schedule.sources}


def compiled(case: str, flags: str, commit: str) -> Path:
    """Compile a case with the package of a commit, unless it is kept already.

    Args:
      case: key of `CASES`.
      flags: of the run.
      commit: full hash.
    Returns:
      The file of `compiled_text`.
    Raises:
      RuntimeError: the process failed.
    """
    # Keyed by the contents of the package: commits that do not change it share a file.
    out = FOLDER / resolve(f"{commit}:mjax") / f"{case}.json.gz"
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with package_at(commit, "mjax") as source:
        env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        done = subprocess.run(
            [sys.executable, str(_WORKER), str(out), *flags.split()],
            env=env | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(source)},
            stderr=subprocess.PIPE,
            text=True,
        )
    if done.returncode != 0:
        raise RuntimeError(f"compiling {case} at {commit} failed:\n{done.stderr}")
    return out


def read(path: Path, flags: str) -> Read:
    """Read a compiled case with the planner of the working tree."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found = json.load(file)
    config, _, options = parse_with(Options(), flags.split(), RECIPES, "case")
    config, sizes = settle(config, options.topology)
    schedule = read_schedule(
        config,
        sizes,
        options.topology,
        text=found["text"],
        params_bytes=found["params_bytes"],
    )
    return Read(schedule=schedule, total_bytes=found["total_bytes"])


def rows(before: Read, now: Read) -> list[tuple[str, ...]]:
    """Return a row for each source, longest at the first commit first."""
    names = {**before.sources, **now.sources}

    def seconds(found: Read, name: str) -> float:
        row = found.sources.get(name)
        return 0.0 if row is None else row.seconds

    order = sorted(
        names,
        key=lambda name: (name == OTHER, -seconds(before, name), -seconds(now, name)),
    )
    listed = [
        (name, *_cells(before, name), *_cells(now, name), _floor(now.sources.get(name)))
        for name in order
        if seconds(before, name) or seconds(now, name)
    ]
    total = ("step", *_total(before), *_total(now), "")
    return [*listed, total]


def _cells(found: Read, name: str) -> tuple[str, str, str]:
    row = found.sources.get(name)
    if row is None:
        return "0", "0.0%", ""
    moved = "" if row.num_bytes is None else f"{row.num_bytes / 1e9:,.0f}"
    share = row.seconds / found.schedule.modelled.step_s
    return f"{row.seconds:.3f}", f"{share:.1%}", moved


def _total(found: Read) -> tuple[str, str, str]:
    moved = sum(row.num_bytes or 0 for row in found.schedule.sources)
    return f"{found.schedule.modelled.step_s:.3f}", "100.0%", f"{moved / 1e9:,.0f}"


def _floor(row: Source | None) -> str:
    return "" if row is None or row.floor_s is None else f"{row.floor_s:.3f}"


def summary(case: Case, label: str, found: Read) -> tuple[str, ...]:
    """Return the row of a case at one commit."""
    modelled = found.schedule.modelled
    shares = (
        found.schedule.communication.overlapped_fraction(role)
        for role in ("tp", "dp", "pp")
    )
    return (
        case.title,
        label,
        case.before if label == "before" else case.now,
        f"{modelled.step_s:.3f}",
        f"{modelled.mfu:.1%}",
        f"{found.total_bytes / 2**30:.1f}",
        *("" if share is None else f"{share:.0%}" for share in shares),
        f"{found.sources[OTHER].seconds / modelled.step_s:.2%}",
    )


def tables(found: Mapping[str, tuple[Read, Read]]) -> list[Table]:
    """Return the tables of the page."""
    summaries = [
        summary(CASES[name], label, one)
        for name, both in found.items()
        for label, one in zip(("before", "now"), both, strict=True)
    ]
    layout = "remat, microbatches"
    head = ("run", "", layout, "step, s", "MFU", "GiB", "tp", "dp", "pp", "other")
    overlapped = (
        "Compiled for described H200s, then modelled by replay of the schedule: "
        "nothing ran on a GPU. MFU counts visible attention pairs, against the peak in "
        "bfloat16. *tp*, *dp*, *pp*: bytes in flight while a matmul or a kernel runs. "
        "*other*: share of the step that no rule places."
    )
    of_sources = "Seconds are of one GPU and step; GB are read and written in its "
    of_sources += "memory. The floor is what the algorithm needs with what is assumed "
    of_sources += "now (`mjax/plan/floors.py`); empty: no formula says it."
    columns = [
        f"{c} {when}" for when in ("before", "now") for c in ("s", "share", "GB")
    ]
    return [
        Table(title="Steps", text=overlapped, header=head, rows=summaries),
        *(
            Table(
                title=CASES[name].title,
                text=f"{of_sources} Flags: `{CASES[name].flags}`.",
                header=("source", *columns, "floor, s"),
                rows=rows(*both),
            )
            for name, both in found.items()
        ),
    ]


def resolve(name: str) -> str:
    """Return the hash of an object of git."""
    git = ["git", "rev-parse", "--verify", name]
    done = subprocess.run(git, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(git)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def main(argv: Sequence[str]) -> int:
    """Compile missing cases; write the page if all are there; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", help="commit to compare with")
    parser.add_argument("now", nargs="?", default="HEAD", help="default: HEAD")
    parser.add_argument("--only", choices=CASES, help="compile this case, no page")
    args = parser.parse_args(argv)
    try:
        commits = [resolve(f"{name}^{{commit}}") for name in (args.before, args.now)]
        found = {}
        for name in CASES if args.only is None else (args.only,):
            case = CASES[name]
            flags = [f"{case.flags} {rest}" for rest in (case.before, case.now)]
            both = [
                read(compiled(name, words, commit), words)
                for words, commit in zip(flags, commits, strict=True)
            ]
            found[name] = both[0], both[1]
            for label, one in zip(("before", "now"), both, strict=True):
                print(*summary(case, label, one), sep="  ", flush=True)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.only is None:
        command = f"python -m scripts.plan.step_by_source {' '.join(argv)}"
        written = f"{commits[0][:7]} and {commits[1][:7]}"
        title = f"The modelled step by source, at {written}"
        print(write_page("step_by_source", title, command, tables(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
