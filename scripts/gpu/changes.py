"""Time the step of gpt-1b3 on one GPU at two commits, and compare it with its model.

    python -m scripts.gpu.changes BEFORE=FOLDER AFTER=FOLDER --out DIR    # on a GPU
    python -m scripts.gpu.changes --write                                 # without one

BEFORE and AFTER name commits, the folders hold their packages mjax and scripts. The
first command measures each case with both, each in a separate process, lists the
kernels of one step of AFTER, and writes gpu_changes.json into DIR. The second reads
docs/benchmarks/gpu_changes.json and gpu_training.json, compiles each case of them for
a described H200 with the package of its commit, models its step as the planner does,
and writes docs/benchmarks/gpu_changes.md. It needs git and what `make env-plan`
installs.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.evidence import BENCHMARKS_DIR, Table, write_page
from scripts.gpu import supervise
from scripts.gpu.cells import fixed
from scripts.gpu.training import BASE, visible_share

NAME = "gpu_changes"
CASES = ("core", "none")
"""Values of --model.remat that are measured; all else is as in the base of
`training`."""
_PROGRAM = """
import dataclasses, json, sys
import jax
from scripts.gpu import training
from scripts.gpu.setting import make_setting
model = dataclasses.replace(training.BASE.model, remat=sys.argv[1])
case = dataclasses.replace(training.BASE, model=model)
if sys.argv[2] == "time":
    found = training.measure(case, make_setting("gpu"))
else:
    from jax.experimental.mosaic.gpu import profiler
    program = training.step_program(case, make_setting("gpu"))
    batch = training.random_batch(program, case.model.vocab_size, 0)
    state, step = program.init(), program.trace().lower().compile()
    for _ in range(3):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    cupti._cupti_init()
    jax.block_until_ready(step(state, batch))
    found = {}
    for name, ms in cupti._cupti_get_timings(True):
        count, total = found.get(name, (0, 0.0))
        found[name] = count + 1, total + ms
print("\\n@@" + json.dumps(found))
"""
FLAGS = (
    "--recipe gpt-1b3 --gpu h200 --nodes 1 --gpus-per-node 1 --batch.size 4 "
    "--batch.microbatches 1 --data.seq-len 8192 --model.window 1024 "
    "--model.attention mosaic_gpu --optim.name lamb --optim.eps 1e-6"
)
TRAINING_FLAGS: Mapping[str, str] = {
    "base": "--model.remat none",
    "full window": "--model.remat none --model.window None",
    "one document a row": "--model.remat none --data.no-isolate-documents",
    "serial block": "--model.remat none --model.block serial",
    "sequence 2048": "--model.remat none --batch.size 16 --data.seq-len 2048",
    "AdamW": "--model.remat none --optim.name adamw --optim.eps 1e-8",
}
"""Cases of `training` -> flags after `FLAGS`."""
_PARTS = ("matrix products", "attention and other kernels", "kernels bound by memory")


def run(folder: Path, remat: str, what: str) -> Any:
    """Run a case with the packages of a folder.

    Args:
      folder: folder that holds mjax and scripts.
      remat: value of --model.remat.
      what: "time" or "kernels".
    Raises:
      RuntimeError: the process failed.
    """
    env = supervise.environment(os.environ, "gpu", shared=False)
    env["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, remat, what],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith("@@")]
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"{remat} in {folder} failed: {done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix("@@"))


def measure(trees: Mapping[str, Path], out: Path) -> None:
    """Measure all cases with both trees; write after each case, so none is lost."""
    found: dict[str, Any] = {"rows": [], "kernels": {}}
    path = out / f"{NAME}.json"

    def keep() -> None:
        path.write_text(json.dumps(found, indent=1) + "\n")

    for remat in CASES:
        for commit, folder in trees.items():
            row = {"commit": commit, "remat": remat, **run(folder, remat, "time")}
            found["rows"].append(row)
            keep()
            print(commit, remat, f"{row['step_ms']:.1f} ms", flush=True)
    last = list(trees)[-1]
    kernels = run(trees[last], CASES[0], "kernels")
    found["kernels"] = {"commit": last, "remat": CASES[0], "ms": kernels}
    keep()


def kind_of(kernel: str) -> str:
    """Return the part of the modelled step that a kernel's name belongs to."""
    if kernel.startswith(("nvjet", "gemm_fusion", "cublas", "cutlass")):
        return _PARTS[0]
    return _PARTS[1] if kernel.startswith("attention_") else _PARTS[2]


def tables(found: Any, training: Any, model: Any) -> list[Table]:
    """Return the tables of the page.

    Args:
      found: the JSON that `measure` wrote.
      training: gpu_training.json.
      model: function of a commit and flags that returns {part: modelled seconds}.
    """
    rows, modelled = {}, {}
    for row in found["rows"]:
        rows[row["remat"], row["commit"]] = row
    commits = list(dict.fromkeys(row["commit"] for row in found["rows"]))
    pairs, steps = [], []
    for remat in CASES:
        before, after = (rows[remat, commit] for commit in commits)
        pairs.append(
            [
                remat,
                *(fixed(row["step_ms"], 1) for row in (before, after)),
                fixed(after["step_ms"] / before["step_ms"], 3),
                *(
                    f"{100 * row['mfu'] * share:.1f}"
                    for share in (1.0, visible_share(BASE))
                    for row in (before, after)
                ),
                *(fixed(row["peak_bytes"] / 2**30, 1) for row in (before, after)),
            ]
        )
        for commit in commits:
            parts = model(commit, f"{FLAGS} --model.remat {remat}")
            modelled[remat, commit] = parts
            steps.append((f"remat {remat}", commit, parts, rows[remat, commit]))
    done = {row["case"]: row for row in training["rows"] if row["status"] == "ok"}
    for case, flags in TRAINING_FLAGS.items():
        parts = model(training["commit"], f"{FLAGS} {flags}")
        steps.append((case, training["commit"], parts, done[case]))
    kernels = found["kernels"]
    return [
        Table(
            title="Two commits on one machine",
            text=(
                f"Milliseconds of a step, `{commits[0]}` and `{commits[1]}`, medians "
                "of 8 steps, on the machine named below the title of gpu_training.md. "
                "The second commit does not fill the stacks of saved activations with "
                "zeros. Everything else is as in the base of that page, where visible "
                "MFU is explained."
            ),
            header=(
                *("remat", "before", "after", "ratio", "MFU % before", "after"),
                *("visible MFU % before", "after", "peak GiB before", "after"),
            ),
            rows=pairs,
        ),
        Table(
            title="The planner's model against the GPU",
            text=(
                "Modelled by replay of the step that is compiled for a described H200, "
                "with the constants that mjax/plan/cost.py had before anything was "
                "measured: nothing was fitted. ratio: modelled / measured. The last "
                "column models the time from FLOPs alone, at the MFU measured in the "
                "first row. Both count the pairs of a whole row, although all steps "
                "but one isolate two documents: with a full window that is nearly "
                "twice the work. The first four rows and the others were measured on "
                "two machines of one kind."
            ),
            header=(
                *("step", "commit", "modelled ms", "measured ms", "ratio"),
                "constant MFU: ratio",
            ),
            rows=[_compared(*step, like=steps[0][-1]) for step in steps],
        ),
        Table(
            title="Kernels of a step, by kind",
            text=(
                f"One step with remat {kernels['remat']} at `{kernels['commit']}`, "
                "kernels as CUPTI times them. A matmul fused with its bias or its "
                "neighbours counts as a matmul; the sums that attention's backward "
                "pass needs outside its kernels count as memory-bound."
            ),
            header=("kind", "modelled ms", "measured ms", "measured / modelled"),
            rows=_by_kind(kernels["ms"], modelled[kernels["remat"], kernels["commit"]]),
        ),
        Table(
            title="The longest kernels",
            text="All that take 1 ms or more of that step.",
            header=("kernel", "runs", "ms"),
            rows=[
                [f"`{name}`", str(count), fixed(ms, 2)]
                for name, (count, ms) in sorted(
                    kernels["ms"].items(), key=lambda item: -item[1][1]
                )
                if ms >= 1
            ],
        ),
    ]


def _compared(
    case: str,
    commit: str,
    parts: Mapping[str, float],
    row: Mapping[str, Any],
    *,
    like: Mapping[str, Any],
) -> list[str]:
    modelled_ms, measured_ms = 1e3 * sum(parts.values()), row["step_ms"]
    ratios = modelled_ms / measured_ms, row["mfu"] / like["mfu"]
    return [
        *(case, commit[:7], fixed(modelled_ms, 1), fixed(measured_ms, 1)),
        *(fixed(ratio, 3) for ratio in ratios),
    ]


def _by_kind(
    kernels: Mapping[str, Sequence[Any]], modelled: Mapping[str, float]
) -> list[list[str]]:
    measured: dict[str, float] = dict.fromkeys(_PARTS, 0.0)
    for name, (_, ms) in kernels.items():
        measured[kind_of(name)] += ms
    pairs = [(part, 1e3 * modelled[part], measured[part]) for part in _PARTS]
    pairs.append(("all", sum(p[1] for p in pairs), sum(p[2] for p in pairs)))
    return [[n, fixed(a, 1), fixed(b, 1), fixed(b / a, 3)] for n, a, b in pairs]


def _model(commit: str, flags: str) -> Mapping[str, float]:
    """Compile a case with the package of a commit; return the modelled parts."""
    # Imported here: the planner's dependencies are missing on a GPU machine.
    from scripts.plan.step_by_source import compiled, read, resolve

    hashed = resolve(f"{commit}^{{commit}}")
    digest = hashlib.sha256(flags.encode()).hexdigest()[:12]
    path = compiled(f"gpu-{digest}", flags, hashed)
    return read(path, flags).schedule.modelled.parts_s


def main(argv: Sequence[str]) -> int:
    """Measure, or write the page; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", nargs="*", metavar="COMMIT=FOLDER")
    parser.add_argument("--out", type=Path, default=BENCHMARKS_DIR)
    parser.add_argument("--write", action="store_true", help="write the page only")
    args = parser.parse_args(argv)
    if args.write == bool(args.trees) or len(args.trees) not in (0, 2):
        parser.error(
            f"either --write or two COMMIT=FOLDER must be given, got {args.trees}"
        )
    if args.write:
        found, training = (
            json.loads((BENCHMARKS_DIR / f"{name}.json").read_text())
            for name in (NAME, "gpu_training")
        )
        title = "The step of gpt-1b3 on an H200: a change, and the planner's model"
        command = "python -m scripts.gpu.changes --write"
        print(write_page(NAME, title, command, tables(found, training, _model)))
        return 0
    named = (tree.partition("=") for tree in args.trees)
    measure({commit: Path(folder).resolve() for commit, _, folder in named}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
