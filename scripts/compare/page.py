"""The page of a study and its figure, from the runs that are finished."""

import itertools
import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import LogLocator, NullFormatter

from scripts.compare.grid import Result, Results, losses, runs_at, tuned
from scripts.compare.studies import (
    HELD_OUT_ROWS,
    Arm,
    Comparison,
    Size,
    Study,
)
from scripts.compare.verdict import CONFIDENCE, Difference, Tuned, compare
from scripts.evidence import BENCHMARKS_DIR, MADE, Table, write_page

# Okabe and Ito's colours, which the colour-blind tell apart.
_COLOURS = ("#0072b2", "#d55e00")
_EDGES = {
    None: "inside",
    "lowest": "**lowest rate: widen the grid**",
    "highest": "**highest rate: widen the grid**",
    "only": "**one rate: not tuned**",
}


def differences(
    study: Study, size: Size, results: Results
) -> list[tuple[Comparison, Difference]]:
    """Return the comparisons of which both arms are finished, with their verdicts."""
    found = {arm.name: tuned(arm, size, results) for arm in study.arms}
    made = []
    for one in study.comparisons:
        arm, against = found[one.arm], found[one.against]
        if arm is not None and against is not None:
            made.append((one, compare(arm, against)))
    return made


def write(study: Study, size: Size, results: Results) -> list[str]:
    """Write docs/benchmarks/<study>.md and .png from the arms that are finished.

    Args:
      study: what is compared.
      size: of the models and the runs.
      results: of its runs.
    Returns:
      What is wrong with the study: a null comparison that is separated.
    Raises:
      ValueError: no comparison has both its arms finished.
    """
    compared = differences(study, size, results)
    if not compared:
        raise ValueError(
            f"no comparison of {study.name} has both its arms finished; run "
            f"{_command(study, size)} again"
        )
    whole = {
        arm.name: best
        for arm in study.arms
        if (best := tuned(arm, size, results)) is not None
    }
    draw(study, size, results, BENCHMARKS_DIR / f"{study.name}.png")
    tables = [
        _verdicts(study, compared, whole),
        _arms(study, size, results, whole),
        *_at_large(study),
    ]
    made = [
        one.made
        for arm in study.arms
        if arm.name in whole
        for one in _results(arm, size, results)
    ]
    tables[1] = _with_commits(tables[1], made)
    write_page(study.name, study.title, _command(study, size), tables, made=made[0])
    return [
        f"{one.title}: separated, so the other verdicts cannot be trusted"
        for one, found in compared
        if one.is_null and found.verdict != "not separated"
    ]


def _command(study: Study, size: Size) -> str:
    option = "" if size == study.sizes[0] else f" --size {size.name}"
    return f"python -m scripts.compare {study.name}{option}"


def _results(arm: Arm, size: Size, results: Results) -> list[Result]:
    rates = losses(arm, size, results)
    runs = [run for rate in rates for run in runs_at(arm, size, rate)]
    return [one for one in map(results.get, runs) if one is not None]


def _with_commits(table: Table, made: list[str]) -> Table:
    commits = sorted(
        {found["commit"] for one in made if (found := re.match(MADE, one))}
    )
    text = f"{table.text} Commits of the runs: {', '.join(commits)}."
    return Table(title=table.title, text=text, header=table.header, rows=table.rows)


def _verdicts(
    study: Study,
    compared: list[tuple[Comparison, Difference]],
    whole: dict[str, Tuned],
) -> Table:
    absent = [arm.label for arm in study.arms if arm.name not in whole]
    lacking = f" Not finished, and left out: {', '.join(absent)}." if absent else ""
    rows = [
        (
            one.title,
            f"{found.mean:+.4f}",
            f"{found.low:+.4f} to {found.high:+.4f}",
            "overlap" if found.bands_overlap else "apart",
            f"**{found.verdict}**",
        )
        for one, found in compared
    ]
    return Table(
        title="Verdicts",
        text=(
            f"{study.text}\n\nEach arm at its best rate. Difference of held-out loss "
            "after the last step, nats per token, of the first minus the second "
            "(negative: the first is better): the mean over pairs of seeds (in the "
            "null comparison the i-th with the i-th, which share nothing) and "
            f"Student's {CONFIDENCE:.0%} interval of it. A pair is "
            "separated if that interval excludes 0 and the bands, least to "
            "largest loss over the seeds, are apart; only then is it ranked. Identical "
            "arms with independent losses pass both in 2.6% of cases, for each "
            "comparison by itself. Not separated does not mean equal: the interval "
            f"says how large a difference remains possible.{lacking}\n\n"
            f"![Held-out loss with bands, and loss by rate]({study.name}.png)"
        ),
        header=("comparison", "difference", "interval", "bands", "verdict"),
        rows=rows,
    )


def _arms(study: Study, size: Size, results: Results, whole: dict[str, Tuned]) -> Table:
    rows = []
    for arm in study.arms:
        if arm.name not in whole:
            continue
        best = whole[arm.name]
        runs = _results(arm, size, results)
        last = [
            one.bits_per_byte
            for one in map(results.get, runs_at(arm, size, best.rate))
            if one is not None and one.bits_per_byte is not None
        ]
        tried = ", ".join(
            f"{rate:g}: {np.mean(found):.4f}"
            for rate, found in losses(arm, size, results).items()
            if found is not None
        )
        run = runs_at(arm, size, best.rate)[0]
        rows.append(
            (
                arm.label,
                f"{run.steps:,}",
                tried,
                f"{best.rate:g}",
                _EDGES[best.edge],
                f"{best.mean:.4f}",
                f"{min(best.losses):.4f} to {max(best.losses):.4f}",
                f"{np.mean(last):.4f}" if last else "diverged",
                f"{sum(one.wall_s for one in runs) / 60:.1f}",
            )
        )
    return Table(
        title="Arms",
        text=(
            f"{size.about[0].upper()}{size.about[1:]}; sequences of {size.seq_len} "
            f"tokens, {size.rows} in a batch (4 x batch: {4 * size.rows}), "
            f"{size.tokens:,} tokens a run unless said otherwise; warm-up over a tenth "
            "of the steps, then cosine to a tenth. Runs of one seed see the same "
            f"sequences in the same order. Held-out loss on {HELD_OUT_ROWS} sequences, "
            "the same for every run; the rate is chosen on them too. While the best "
            "rate is at an edge of its grid, up to two rates are added beyond it. "
            "This is not 1.3B, and says nothing about it."
        ),
        header=(
            *("arm", "steps", "rates: mean loss", "best rate", "in the grid"),
            *("held-out loss", "range", "bits per byte", "minutes of a core"),
        ),
        rows=rows,
    )


def large_command(arm: Arm, rate: float, seed: int) -> list[str]:
    """Return the flags that train an arm with 1.3B parameters."""
    return [
        *("--recipe", "gpt-1b3", "--data.path", "corpus/", *arm.large_flags),
        *("--optim.lr", f"{rate:g}", "--seed", str(seed)),
        *("--work-dir", f"runs/1b3/{_large_name(arm)}-{rate:g}-{seed}"),
    ]


def _at_large(study: Study) -> list[Table]:
    arms = [arm for arm in study.arms if arm.large_rates]
    if not arms:
        return []
    loops = []
    for arm in arms:
        words = " ".join(large_command(arm, 1.0, 0))
        words = words.replace("--optim.lr 1 --seed 0", "--optim.lr $lr --seed $seed")
        words = words.replace(
            f"{_large_name(arm)}-1-0", f"{_large_name(arm)}-$lr-$seed"
        )
        rates = " ".join(f"{rate:g}" for rate in arm.large_rates)
        seeds = " ".join(map(str, arm.seeds))
        loops.append(
            f"for lr in {rates}; do for seed in {seeds}; do\n"
            f"  python -m mjax.train {words}\ndone; done"
        )
    rows = [
        (_large_name(arm), f"{len(arm.large_rates) * len(arm.seeds)}", _changes(arm))
        for arm in arms
    ]
    return [
        Table(
            title="The same at 1.3B on GPUs",
            text=(
                "Not run: it needs GPUs. On one node of 8, with a corpus in `corpus/`; "
                "`gpt-1b3` has a parallel block, full attention, AdamW and bfloat16, "
                "sequences of 2,048, batches of 512 and 27 billion tokens a run. "
                "Its reference is in bfloat16, so float32 is the other arm. The "
                "rates are those around GPT-3's; LAMB's are a guess. Widen a grid "
                "whose best rate is at its edge.\n\n```bash\n"
                + "\n".join(loops)
                + "\n```"
            ),
            header=("arm", "runs", "differs from gpt-1b3"),
            rows=rows,
        )
    ]


def _large_name(arm: Arm) -> str:
    return arm.large_name or arm.name


def _changes(arm: Arm) -> str:
    return f"`{' '.join(arm.large_flags)}`" if arm.large_flags else "nothing"


def draw(study: Study, size: Size, results: Results, path: Path) -> None:
    """Draw held-out loss over tokens for each comparison, and loss over rates.

    Losses of a comparison are drawn less the mean of the arm compared against, since
    they fall by whole nats where arms differ by hundredths.
    The figure has a light card of its own, which reads on light and dark pages.

    Args:
      study: what is compared.
      size: of the models and the runs.
      results: of its runs; arms that are not finished are left out.
      path: of the PNG file.
    """
    compared = differences(study, size, results)
    columns = 2
    count = len(compared) + 1
    figure, grid = pyplot.subplots(
        -(-count // columns),
        columns,
        figsize=(9, 3.1 * -(-count // columns)),
        layout="constrained",
        squeeze=False,
        facecolor="white",
    )
    panels = list(grid.ravel())
    for axes, (one, found) in zip(panels, compared, strict=False):
        pair = (study.arm(one.against), study.arm(one.arm))
        zero = _curves(pair[0], size, results)[1].mean(0)
        for arm, colour in zip(pair, _COLOURS, strict=True):
            _band(axes, arm, size, results, zero, colour)
        axes.set_title(f"{one.title}\n{found.verdict}", fontsize=9)
        axes.set_xlabel("tokens", fontsize=8)
        axes.set_ylabel(f"nats per token from {pair[0].label}", fontsize=8)
        axes.legend(frameon=False, fontsize=8)
    _rates(panels[len(compared)], study, size, results)
    for axes in panels[: len(compared) + 1]:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    for axes in panels[len(compared) + 1 :]:
        axes.remove()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curves(
    arm: Arm, size: Size, results: Results
) -> tuple[list[int], Float[np.ndarray, "seeds evals"]]:
    """Return the tokens at the evaluations, and the losses of a finished arm there."""
    best = tuned(arm, size, results)
    assert best is not None, arm.name
    runs = map(results.get, runs_at(arm, size, best.rate))
    curves = [one.curve for one in runs if one is not None]
    tokens = [place for place, _ in min(curves, key=len)]
    values = [[loss for _, loss in curve[: len(tokens)]] for curve in curves]
    return tokens, np.array(values)


def _band(
    axes: Any,
    arm: Arm,
    size: Size,
    results: Results,
    zero: Float[np.ndarray, "evals"],
    colour: str,
) -> None:
    """Draw the mean over the seeds, less `zero`, and the band of their range."""
    tokens, losses_at = _curves(arm, size, results)
    count = min(len(zero), len(tokens))
    tokens, values = tokens[:count], losses_at[:, :count] - zero[:count]
    best = tuned(arm, size, results)
    assert best is not None, arm.name
    label = f"{arm.label}, lr {best.rate:g}"
    axes.plot(tokens, values.mean(0), color=colour, label=label, marker=".", lw=1.2)
    axes.fill_between(tokens, values.min(0), values.max(0), color=colour, alpha=0.25)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}M")


def _rates(axes: Any, study: Study, size: Size, results: Results) -> None:
    """Draw the last held-out loss over the learning rate, with bands over seeds."""
    markers = itertools.cycle("osD^vPX")
    for arm in study.arms:
        found = losses(arm, size, results)
        if any(one is None for one in found.values()):
            continue
        values = np.array(list(found.values()))
        (line,) = axes.plot(
            list(found),
            values.mean(1),
            marker=next(markers),
            markersize=3.5,
            lw=1,
            label=arm.label,
        )
        axes.fill_between(
            list(found),
            values.min(1),
            values.max(1),
            color=line.get_color(),
            alpha=0.2,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_title("last held-out loss by learning rate", fontsize=9)
    axes.set_xlabel("peak learning rate", fontsize=8)
    axes.set_ylabel("nats per token", fontsize=8)
    axes.legend(frameon=False, fontsize=7)
