"""Write the page of the demo run, and its figure.

    make train ARGS='--work-dir RUN' && .venv/bin/python -m scripts.demo_page RUN

Input: the work dir of a finished run of the demo recipe with its own steps. Output:
docs/benchmarks/demo.md and docs/figures/demo_curves.png. Run it at the commit that made
the run. Exits with 1 if the run does not learn: held-out bits per byte must be below
half of the entropy of single bytes.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mjax.cli import exit_codes
from mjax.config.train import TrainConfig, from_json
from mjax.data.dataset import Dataset, open_dataset
from mjax.observe import spans
from mjax.observe.ledger import ledger
from scripts import readme_figures
from scripts.evidence import REPOSITORY, Table, read_metrics, write_page

LEARNS_BELOW = 0.5
"""Bound of the ratio of held-out bits per byte to the entropy of single bytes."""
_WARM_UP_STEPS = 50
_STARTING: tuple[str, ...] = ("import", "build", "compile")
"""Spans of the start that the page shows."""


def read_summary(run: Path) -> dict[str, Any]:
    """Return summary.json.

    Raises:
      ValueError: the run has not ended, or not evaluated the last step.
    """
    path = run / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    if summary.get("exit") != exit_codes.DONE or summary.get("eval_loss") is None:
        raise ValueError(f"{run} has no finished run; wait for the end of `make train`")
    return summary


def starting_s(files: Sequence[spans.SpanFile]) -> dict[str, float]:
    """Return the seconds of the parts of a start.

    Raises:
      ValueError: the run was started more than once, so its time is not that of a run.
    """
    if len(files) != 1:
        raise ValueError(f"the run must have one process and one start: {len(files)}")
    found = dict.fromkeys(_STARTING, 0.0)
    for line in files[0].lines:
        for span in line.spans:
            if span.name in found:
                found[span.name] += (span.end_ns - span.start_ns) / 1e9
    return found


def rows(
    config: TrainConfig,
    dataset: Dataset,
    summary: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    *,
    parts_s: Mapping[str, float],
    wall_s: float,
    evaluated: float,
) -> list[list[str]]:
    """Return the rows of the table.

    Args:
      config: of the run.
      dataset: that it read.
      summary: of the run.
      steps: rows of metrics.jsonl.
      parts_s: result of `starting_s`.
      wall_s: seconds from the start of the process to its end.
      evaluated: the loss that `mjax.evaluate` computes from the last checkpoint.
    """
    held_out = dataset.corpora[0].counts["held_out"]
    bits, entropy = summary["eval_bits_per_byte"], summary["unigram_bits_per_byte"]
    loss = summary["eval_loss"]
    warm = steps[_WARM_UP_STEPS:]
    step_s = statistics.median(row["step_s"] for row in warm)
    tokens = config.batch.size * config.data.seq_len
    windows = ", ".join(str(window or "none") for window in config.model.window)
    start = ", ".join(f"{part_s:.1f}" for part_s in parts_s.values())
    difference = abs(evaluated / loss - 1)
    longest_ms = 1e3 * max(row["data_wait_s"] for row in warm)
    return [
        [
            "corpus",
            f"{dataset.num_documents:,} files, {dataset.num_bytes:,} bytes",
        ],
        [
            "held out",
            f"{held_out.num_documents:,} whole files, {held_out.num_bytes:,} bytes",
        ],
        ["sha256 of the corpus", f"`{summary['corpus_hash']}`"],
        [
            "model",
            f"{summary['params']:,} parameters, {config.model.layers} "
            f"{config.model.block} blocks, windows {windows}; "
            f"{config.optim.name.upper()}",
        ],
        [
            "trained on",
            f"{len(steps)} steps of {config.batch.size} x {config.data.seq_len} bytes: "
            f"{len(steps) * tokens:,} bytes",
        ],
        ["held-out loss", f"{loss:.4f} nats = **{bits:.3f} bits per byte**"],
        ["entropy of single bytes in the same text", f"{entropy:.3f} bits per byte"],
        ["ratio", f"**{bits / entropy:.1%}**"],
        [
            "the same loss by `python -m mjax.evaluate RUN --held-out`",
            f"{evaluated:.4f} nats, relative difference {difference:.1e}",
        ],
        ["time, without installation", f"**{minutes(wall_s)}**"],
        [
            f"of it: {', '.join(parts_s)}, first step",
            f"{start}, {steps[0]['step_s']:.1f} s",
        ],
        [
            f"median step after the {_WARM_UP_STEPS}th",
            f"{step_s * 1e3:.0f} ms, {tokens / step_s:,.0f} tokens/s; longest wait for "
            f"data {longest_ms:.2f} ms",
        ],
    ]


def minutes(seconds: float) -> str:
    """Return a time as minutes and seconds, rounded."""
    whole, rest = divmod(round(seconds), 60)
    return f"{whole} min {rest} s"


def evaluate(run: Path) -> float:
    """Return the held-out loss that `mjax.evaluate` computes, in nats per token.

    Raises:
      CalledProcessError: it failed.
    """
    words = ["-m", "mjax.evaluate", str(run), "--held-out", "--json"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(json.loads(done.stdout)["loss"])


def main() -> int:
    """Write page and figure; return 1 if the run does not learn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="work dir of the run")
    run = parser.parse_args().run.absolute()
    try:
        summary = read_summary(run)
        files, _ = spans.read_run(run)
        parts_s = starting_s(files)
        readme_figures.curves(run)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    config = from_json((run / "config.json").read_text())
    ratio = summary["eval_bits_per_byte"] / summary["unigram_bits_per_byte"]
    fault = "" if ratio < LEARNS_BELOW else f"the ratio is {ratio:.1%}"
    table = Table(
        title="Run",
        text="The corpus is the source of the standard library of Python "
        f"{summary['python_version']}; another version has another library, and other "
        "figures. The batch, depth and rate of the recipe were chosen by the held-out "
        "loss of shorter runs, so the held-out text is not untouched. The time is that "
        "of the process, from its start to its end. Bound: a ratio below "
        f"{LEARNS_BELOW:.0%}. Not met: {fault or 'none'}.\n\n"
        "![curves](../figures/demo_curves.png)",
        header=("", ""),
        rows=rows(
            config,
            open_dataset(config.data, seed=config.seed),
            summary,
            read_metrics(run),
            parts_s=parts_s,
            wall_s=ledger(run, files).wall_s,
            evaluated=evaluate(run),
        ),
    )
    command = "make train ARGS='--work-dir RUN'` and `python -m scripts.demo_page RUN"
    print(write_page("demo", "The demo run", command, [table]))
    print(fault, end="\n" if fault else "")
    return int(bool(fault))


if __name__ == "__main__":
    sys.exit(main())
