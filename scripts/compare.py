"""Train variants for equal tokens and draw their losses in one figure.

Commands, from the root of the repository:

    python -m scripts.compare optimizers    LAMB and AdamW at 1x and 4x the batch
    python -m scripts.compare blocks        parallel and serial block
    python -m scripts.compare windows       full attention and a window of seq/4
    python -m scripts.compare fp8           projections in bfloat16 and in FP8

With `--arm I --seed S` a command trains one run of a study and draws nothing. Every
run is `python -m mjax.train` on the demo corpus, in a work dir of its own below
`runs/compare`; a finished one is not repeated. Writes `docs/benchmarks/<name>.md` and
`docs/benchmarks/<name>.png`.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

from scripts.evidence import about

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs" / "compare"
SEQ_LEN = 128
ROWS = 8
STEPS = 400
TOKENS = ROWS * SEQ_LEN * STEPS
SEEDS = (0, 1, 2)
# All layers alike: the recipe leaves positions out of every fourth.
FULL = ("--model.rope", "True", "--model.window", "None")
WINDOW = ("--model.rope", "True", "--model.window", str(SEQ_LEN // 4))
FULL_PARALLEL = (*FULL, "--model.block", "parallel")
FULL_SERIAL = (*FULL, "--model.block", "serial")
WINDOW_PARALLEL = (*WINDOW, "--model.block", "parallel")


@dataclasses.dataclass(frozen=True)
class Arm:
    """One curve: a name, its flags, its batch, and the learning rates it tries."""

    label: str
    flags: tuple[str, ...]
    batch: int
    rates: tuple[float, ...]
    seeds: tuple[int, ...] = (0,)
    tokens: int = TOKENS

    @property
    def steps(self) -> int:
        """Steps in which the run sees its tokens."""
        return self.tokens // (self.batch * SEQ_LEN)


BF16 = ("--precision.compute", "bfloat16")
IN_FP8 = (*BF16, "--precision.matmul", "fp8")
# 4 times the parameters of the blocks of the demo model.
LARGER = (
    *("--model.layers", "8", "--model.d-model", "192"),
    *("--model.heads", "6", "--model.d-ff", "512"),
)
ADAMW, LAMB = ("--optim.name", "adamw"), ("--optim.name", "lamb")
STUDIES = {
    "optimizers": (
        Arm("AdamW, batch 8", ADAMW, ROWS, (1e-3, 3e-3, 1e-2), SEEDS),
        Arm("AdamW, batch 32", ADAMW, 4 * ROWS, (2e-3, 6e-3, 2e-2), SEEDS),
        Arm("LAMB, batch 32", LAMB, 4 * ROWS, (1e-2, 2e-2, 4e-2, 8e-2), SEEDS),
    ),
    "blocks": (
        Arm("parallel block", FULL_PARALLEL, ROWS, (1e-2,)),
        Arm("serial block", FULL_SERIAL, ROWS, (1e-2,)),
    ),
    "windows": (
        Arm("full attention", FULL_PARALLEL, ROWS, (1e-2,)),
        Arm("window = seq/4", WINDOW_PARALLEL, ROWS, (1e-2,)),
    ),
    "fp8": (
        Arm("demo, bfloat16", BF16, ROWS, (1e-2,), SEEDS),
        Arm("demo, FP8", IN_FP8, ROWS, (1e-2,), SEEDS),
        Arm("larger, bfloat16", (*BF16, *LARGER), ROWS, (1e-2,), SEEDS, TOKENS // 2),
        Arm("larger, FP8", (*IN_FP8, *LARGER), ROWS, (1e-2,), SEEDS, TOKENS // 2),
    ),
}
NOTES = {
    "fp8": (
        "The larger model has 8 layers of width 192 and half the tokens. Operands of "
        "the projections are quantised as on a GPU (e4m3, gradients e5m2, a scale for "
        "each tensor from its largest value) and multiplied in bfloat16, which holds "
        "each of their values; compute is bfloat16 in all runs. Runs of one seed have "
        "the same initial parameters and the same batches.\n"
    )
}
"""Text of a page beside its table."""


def train(arm: Arm, rate: float, seed: int) -> list[dict[str, Any]]:
    """Run one variant, unless it has run; return its metric rows."""
    flags = [
        *arm.flags,
        *("--data.seq-len", str(SEQ_LEN), "--batch.size", str(arm.batch)),
        *("--steps", str(arm.steps), "--seed", str(seed), "--optim.lr", str(rate)),
        *("--optim.warmup-steps", str(arm.steps // 10), "--log.every", "100"),
        # The same held-out text for every batch size.
        *("--eval.every", str(arm.steps), "--eval.batches", str(512 // arm.batch)),
        *("--ckpt.every", str(arm.steps)),
    ]
    name = "_".join(flags).replace("--", "").replace("/", "")
    work_dir = RUNS / name
    if not (work_dir / "summary.json").exists():
        command = [sys.executable, "-m", "mjax.train", "--work-dir", str(work_dir)]
        print(" ".join(flags), flush=True)
        subprocess.run(
            [*command, *flags], check=True, cwd=ROOT, stdout=subprocess.DEVNULL
        )
    lines = (work_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def final(rows: list[dict[str, Any]]) -> float:
    """Return the held-out bits per byte of a run's last evaluation."""
    value = rows[-1]["eval_bits_per_byte"]
    return float("nan") if value is None else value


def compare(study: str) -> None:
    """Run all arms of a study, then write its table and its figure."""
    lines = ["| run | best lr | tried (bits/byte) | seeds | mean | spread |"]
    lines.append("|---|---|---|---|---|---|")
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for arm in STUDIES[study]:
        tried = {rate: final(train(arm, rate, arm.seeds[0])) for rate in arm.rates}
        best = min(tried, key=lambda rate: (np.isnan(tried[rate]), tried[rate]))
        if len(tried) > 1 and best in (min(tried), max(tried)):
            print(f"{arm.label}: the best rate {best} is at the edge of the grid")
        runs = [train(arm, best, seed) for seed in arm.seeds]
        _draw(axes, arm, best, runs)
        finals = [final(rows) for rows in runs]
        shown = ", ".join(f"{rate:g}: {value:.3f}" for rate, value in tried.items())
        each = " ".join(f"{value:.3f}" for value in finals)
        spread = f"{max(finals) - min(finals):.3f}" if len(finals) > 1 else "one seed"
        lines.append(
            f"| {arm.label} | {best:g} | {shown} | {each} | {np.mean(finals):.3f} "
            f"| {spread} |"
        )
    axes.set(xlabel="tokens", ylabel="training loss, nats per byte", ylim=(None, 3.5))
    axes.legend()
    folder = ROOT / "docs" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{study}.png", dpi=110)
    table = "\n".join(lines)
    (folder / f"{study}.md").write_text(_page(study, table))
    print(table)


def _draw(axes: Any, arm: Arm, rate: float, runs: list[list[dict[str, Any]]]) -> None:
    """Draw the mean over seeds, smoothed over 2% of the run, and the seeds' range."""
    losses = np.array([[row["loss"] for row in rows] for rows in runs])
    width = max(1, arm.steps // 50)
    kernel = np.ones(width) / width
    smooth = np.array([np.convolve(line, kernel, mode="valid") for line in losses])
    tokens = (np.arange(smooth.shape[1]) + width) * arm.batch * SEQ_LEN
    label = f"{arm.label}, lr {rate:g}"
    (line,) = axes.plot(tokens, smooth.mean(0), label=label)
    axes.fill_between(
        tokens, smooth.min(0), smooth.max(0), alpha=0.25, color=line.get_color()
    )


def _page(study: str, table: str) -> str:
    """Write the page of a study: command, setting, table, figure."""
    return (
        f"# Compared: {study}\n\n"
        f"{about()}. Made by `python -m scripts.compare {study}`.\n\nDemo model "
        f"and corpus, sequence {SEQ_LEN}, {TOKENS:,} tokens each; held-out bits per "
        "byte after the last step. Where several rates are tried, the first seed tries "
        "them; the band in the figure is the range over the seeds. "
        f"{NOTES.get(study, '')}\n\n{table}\n\n![training loss]({study}.png)\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", choices=sorted(STUDIES))
    parser.add_argument("--arm", type=int, help="train one run of this arm only")
    parser.add_argument("--seed", type=int, default=0, help="of this run")
    asked = parser.parse_args()
    if asked.arm is None:
        compare(asked.study)
    else:
        arm = STUDIES[asked.study][asked.arm]
        train(arm, arm.rates[0], asked.seed)
