"""Choose the sizes of the attention kernels: compile, time, record.

    python -m scripts.kernels.tune_attention --prune-only   # here: what compiles well
    python -m scripts.kernels.tune_attention --out DIR      # on the GPU: times, winners
    python -m scripts.kernels.tune_attention --write-only --out DIR  # here: winners

The first needs `make env-plan` and no GPU. It writes the candidates without spills or
serialised matmuls that fit in shared memory to
docs/benchmarks/attention_candidates.json. The second times these candidates and writes
gpu_tuning.json, gpu_tuning.md and the table in mjax/kernels/attention/tuning.py; the
third writes only that table, from the gpu_tuning.json of an earlier second call. Ends
with 0, with 1 if something failed, with 2 on bad input.
"""

import argparse
import ast
import dataclasses
import datetime
import itertools
import json
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mjax.kernels.attention.tuning import MOSAIC_H200, MosaicKernel, MosaicTuning
from scripts.evidence import BENCHMARKS_DIR, REPOSITORY
from scripts.gpu import gate, pages, tuning_times
from scripts.gpu import report as gpu_report
from scripts.gpu.candidates import HEAD_DIMS, KERNELS, parse
from scripts.gpu.setting import Row

TUNING_PATH = REPOSITORY / "mjax" / "kernels" / "attention" / "tuning.py"
NOISE = 0.01
"""A candidate must be faster than the shipped sizes by more than this."""

Winners = dict[tuple[str, int], MosaicKernel]
"""Sizes by kernel and head width."""


def choose(
    rows: Sequence[Row], shipped: Mapping[int, MosaicTuning], noise: float = NOISE
) -> Winners:
    """Choose the fastest timed candidate of each kernel and head width.

    The forward kernel is chosen first: dkv takes its blocks of queries from the tiles
    that the forward kernel writes (`MosaicTuning`).

    Args:
      rows: rows of `tuning_times`; rows without a time are ignored.
      shipped: current sizes; kept unless they were timed too and a candidate is faster
        by more than the noise.
      noise: relative spread of the times.
    """
    timed: dict[tuple[str, int], dict[MosaicKernel, float]] = {}
    for row in rows:
        if row["status"] == "ok":
            c = parse(row["case"])
            timed.setdefault((c.kernel, c.head_dim), {})[c.config] = row["median_ms"]
    winners: Winners = {}
    chosen = dict(shipped)
    for kernel, head_dim in sorted(timed, key=lambda key: KERNELS.index(key[0])):
        now = getattr(chosen[head_dim], kernel)
        times = {
            config: ms
            for config, ms in timed[kernel, head_dim].items()
            if _fits(chosen[head_dim], kernel, config)
        }
        if now not in timed[kernel, head_dim] or not times:
            continue
        best = min(times, key=times.__getitem__)
        if times[now] <= (1 + noise) * times[best]:
            best = now
        winners[kernel, head_dim] = best
        chosen[head_dim] = dataclasses.replace(chosen[head_dim], **{kernel: best})
    return winners


def _fits(tuning: MosaicTuning, kernel: str, config: MosaicKernel) -> bool:
    """Return whether the sizes of one kernel are compatible with the others."""
    try:
        dataclasses.replace(tuning, **{kernel: config})
    except ValueError:
        return False
    return True


def rewrite(source: str, winners: Winners, where: str) -> str:
    """Return the module with the winners in its table MOSAIC_H200, else unchanged.

    Args:
      source: text of tuning.py; the table is followed by its docstring.
      winners: replace entries of the table.
      where: hardware, date and versions of the measurement.
    Raises:
      ValueError: there is no winner, or the module has no such table.
    """
    if not winners:
        raise ValueError("nothing was timed: there is no winner to write")
    lines = source.splitlines()
    begin, end = _table_lines(source)
    table = {H: dataclasses.asdict(tuning) for H, tuning in MOSAIC_H200.items()}
    for (kernel, head_dim), config in winners.items():
        table[head_dim][kernel] = dataclasses.asdict(config)
    new = ["MOSAIC_H200 = MappingProxyType(", "    {"]
    for head_dim, kernels in table.items():
        new.append(f"        {head_dim}: MosaicTuning(")
        value_dim = kernels["value_dim"]
        for kernel in KERNELS:
            fields = kernels[kernel].items()
            inside = ", ".join(f"{name}={value}" for name, value in fields)
            new.append(f"            {kernel}=MosaicKernel({inside}),")
        if value_dim is not None:
            new.append(f"            value_dim={value_dim},")
        new.append("        ),")
    new += ["    }", ")"]
    tuned: dict[int, list[str]] = {}
    for kernel, head_dim in sorted(winners):
        tuned.setdefault(head_dim, []).append(kernel)
    which = "; ".join(f"{H}: {', '.join(names)}" for H, names in sorted(tuned.items()))
    note = (
        f"By head width. Tuned on {where} ({which}; fastest of those that compile "
        "without spilling, scripts/kernels/tune_attention.py). The others are not "
        "tuned: the largest blocks that compile without spilling."
    )
    # Room for the quotes at both ends.
    new += textwrap.wrap(f'"""{note}', 85)
    new[-1] += '"""'
    return "\n".join([*lines[:begin], *new, *lines[end:]]) + "\n"


def _table_lines(source: str) -> tuple[int, int]:
    """Return the lines, begin and end, of the table and its docstring."""
    body = ast.parse(source).body
    for node, following in itertools.pairwise(body):
        is_table = isinstance(node, ast.Assign) and (
            ast.unparse(node.targets[0]) == "MOSAIC_H200"
        )
        if is_table and isinstance(following, ast.Expr):
            assert following.end_lineno is not None
            return node.lineno - 1, following.end_lineno
    raise ValueError("the module has no MOSAIC_H200 with a docstring below it")


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    args = _parse(argv)
    try:
        if args.prune_only:
            return _prune(args.kernel or KERNELS, args.head_dim or HEAD_DIMS)
        out = Path(args.out or BENCHMARKS_DIR)
        failed = 0 if args.write_only else _time(args, argv, out)
        _write(out, Path(args.tuning_file))
    except ValueError as error:
        print(f"tune_attention: error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"tune_attention: error: {error}", file=sys.stderr)
        return 1
    return int(failed > 0)


def _prune(kernels: Sequence[str], head_dims: Sequence[int]) -> int:
    """List the candidates that pass the gate; other kernels keep their lists."""
    found = gate.prune(kernels, head_dims, lambda text: print(text, flush=True))
    verdicts = gate.as_json(found)
    path = tuning_times.CANDIDATES_PATH
    if path.exists():
        stored = json.loads(path.read_text())["verdicts"]
        verdicts += [v for v in stored if not _is_of(v, kernels, head_dims)]
    content = {
        "gpu": "h200",
        "jax": version("jax"),
        "date": datetime.date.today().isoformat(),
        "verdicts": sorted(verdicts, key=_order),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    left = sum(v["fault"] is None for v in verdicts)
    print(f"{left} of {len(verdicts)} candidates are left, in {path}")
    return 0


def _is_of(
    verdict: Mapping[str, Any], kernels: Sequence[str], head_dims: Sequence[int]
) -> bool:
    candidate = parse(verdict["name"])
    return candidate.kernel in kernels and candidate.head_dim in head_dims


def _order(verdict: Mapping[str, Any]) -> tuple[int, ...]:
    c = parse(verdict["name"])
    sizes = (c.config.warpgroups, c.config.block, c.config.stages)
    return (KERNELS.index(c.kernel), c.head_dim, *sizes)


def _time(args: argparse.Namespace, argv: Sequence[str], out: Path) -> int:
    """Time the candidates on the GPU; return how many failed."""
    deadline = time.monotonic() + args.budget_s
    tuning_times.read_candidates()  # fail early if there are none
    machine = gpu_report.find_machine("gpu")
    origin = pages.Origin(
        mode="gpu",
        commit=args.commit or gpu_report.find_commit(),
        date=datetime.date.today().isoformat(),
        command=" ".join(["python -m scripts.kernels.tune_attention", *argv]),
        machine=machine,
    )
    counts = gpu_report.run_part(
        tuning_times.PART, origin, out, deadline=deadline, keep=args.keep
    )
    pages.write_page(out, tuning_times.PART)
    return counts["error"]


def _write(out: Path, tuning_path: Path) -> None:
    """Write the winners of gpu_tuning.json into the table."""
    path = pages.json_path(out, tuning_times.PART)
    if not path.exists():
        raise ValueError(f"there is no {path}: time the candidates on a GPU first")
    stored = json.loads(path.read_text())
    winners = choose(stored["rows"], MOSAIC_H200)
    machine = stored["machine"]
    where = (
        f"{machine['device_kind']}, {stored['date']}, jax {machine['versions']['jax']}"
    )
    tuning_path.write_text(rewrite(tuning_path.read_text(), winners, where))
    for (kernel, head_dim), config in sorted(winners.items()):
        print(f"{kernel} D={head_dim}: {config}")
    print(f"written to {tuning_path}")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tune_attention", description=(__doc__ or "").splitlines()[0]
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--prune-only", action="store_true", help="list what compiles well; no GPU"
    )
    modes.add_argument(
        "--write-only", action="store_true", help="write the winners of --out; no GPU"
    )
    parser.add_argument("--kernel", action="append", choices=KERNELS)
    parser.add_argument("--head-dim", action="append", type=int, choices=HEAD_DIMS)
    parser.add_argument("--out", help="folder of gpu_tuning.*; default docs/benchmarks")
    parser.add_argument("--tuning-file", default=str(TUNING_PATH))
    parser.add_argument(
        "--budget-s", type=gpu_report.positive, default=gpu_report.BUDGET_S
    )
    parser.add_argument("--keep", action="store_true", help="keep earlier good rows")
    parser.add_argument("--commit", help="to be written down; default: asks git")
    args = parser.parse_args(argv)
    if (args.kernel or args.head_dim) and not args.prune_only:
        parser.error("--kernel and --head-dim choose what --prune-only compiles")
    return args


if __name__ == "__main__":
    gpu_report.stop_by_signal()
    sys.exit(main(sys.argv[1:]))
