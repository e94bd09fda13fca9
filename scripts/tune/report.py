"""The page of `scripts.tune.chats`, and its figure."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from scripts.evidence import REPOSITORY, Table, commit, write_page

FIGURE = REPOSITORY / "docs" / "figures" / "fine_tuning.png"
_BOUND = 1.05
_LABELS = {
    "unigram": "unigram of the training answers (null model)",
    "base": "base, untouched (null model)",
    "shuffled": "all parameters, answers shuffled (null model)",
    "full": "all parameters",
    "lora": "LoRA, all linear layers",
}
_ASKED = {
    "lines": "The answer is the other half of the line, which can only be guessed.",
    "kinds": "The answer is class, method or function, which the capitals in the name "
    "tell.",
}

_ADDED = {
    ("lines", "full"): (3e-6,),
    ("kinds", "full"): (3e-2,),
    ("kinds", "lora"): (3e-4,),
}
"""Rates added after some choices were at the edge of the grid."""

Found = Mapping[str, Any]
"""The data that `scripts.tune.chats.Results` saves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One kind of chats, as `docstrings` names them."""

    seeds: Sequence[int]
    grid: Mapping[str, Sequence[float]]
    """Learning rates of each kind of training."""


def chosen(found: Found, draw: str, kind: str) -> tuple[float, Mapping[str, Any]]:
    """Return the learning rate with the least validation loss, and its curve.

    Args:
      found: all results.
      draw: TASK/SEED.
      kind: of training.
    """
    curves = {
        float(key.rpartition("/")[2]): value
        for key, value in found.items()
        if key.startswith(f"{draw}/{kind}/")
    }
    lr = min(curves, key=lambda rate: min(curves[rate]["validation"]))
    return lr, curves[lr]


def write(
    found: Found,
    tasks: Mapping[str, Task],
    num_trained: Mapping[str, int],
    rank: int,
    passes: int,
) -> None:
    """Write the page and the figure, and print the ratios.

    Args:
      found: all results.
      tasks: of the experiment, by name.
      num_trained: parameters of each kind.
      rank: of the adapters.
      passes: maximum of a run.
    """
    draw(found, tasks)
    share = num_trained["lora"] / num_trained["full"]
    setting = (
        f"At {commit()}. A base of {num_trained['full']:,} parameters is trained on "
        "docstrings of the standard library, exported to a Hugging Face folder and "
        "imported again. The question of a chat is the dotted name of a class, method "
        "or function of another module, and the first half of the first line of its "
        "docstring. 200 chats are trained on, 100 validate, 200 are held out; no "
        "module is in two of these or in the base's text. Learning rate (tables below) "
        "and passes are those of the least validation loss, for both ways of training; "
        "the held-out chats are read once, after that. Each seed draws other modules, "
        "chats, adapters and another order. Nats a token of the answers (bytes), the "
        "end of the turn included: mean, and the range over the seeds. LoRA, rank "
        f"{rank}, trains {share:.1%} of the parameters.\n\n"
        "![Loss on validation answers](../figures/fine_tuning.png)\n\n"
    )
    tables = list[Table]()
    for name, task in tasks.items():
        held_out = _held_out_table(found, name, task, num_trained)
        if not tables:
            held_out = dataclasses.replace(held_out, text=setting + held_out.text)
        tables.append(held_out)
        tables += [
            _grid_table(found, name, task.seeds, kind, rates, passes)
            for kind, rates in task.grid.items()
        ]
    tables.append(_checks(found))
    command = "python -m scripts.tune.chats --work-dir runs/chats"
    title = "Fine-tuning a small imported model on 200 chats"
    write_page("fine_tuning", title, command, tables)


def _held_out_table(
    found: Found, name: str, task: Task, num_trained: Mapping[str, int]
) -> Table:
    losses = [found[f"{name}/{seed}/held-out"] for seed in task.seeds]
    ratios = [loss["lora"] / loss["full"] for loss in losses]
    mean = sum(loss["lora"] for loss in losses) / sum(loss["full"] for loss in losses)
    verdict = "holds" if mean <= _BOUND else "is missed"
    print(name, mean, ratios)
    rows = []
    for way, label in _LABELS.items():
        trained = num_trained.get("full" if way == "shuffled" else way, 0)
        rows.append(
            (
                label,
                f"{trained:,} ({trained / num_trained['full']:.1%})",
                _range([loss[way] for loss in losses]),
                _range([loss[way] / loss["full"] for loss in losses]),
            )
        )
    return Table(
        title=f"Held-out answers: {name}",
        text=f"{_ASKED[name]} {len(losses)} seeds. LoRA against all parameters, ratio "
        f"of the means: {mean:.3f} (single seeds {min(ratios):.3f} to "
        f"{max(ratios):.3f}); the bound of {_BOUND} {verdict}.",
        header=("trained", "parameters", "held out", "of full"),
        rows=rows,
    )


def _range(values: Sequence[float]) -> str:
    mean = sum(values) / len(values)
    return f"{mean:.3f} ({min(values):.3f} to {max(values):.3f})"


def _grid_table(
    found: Found,
    name: str,
    seeds: Sequence[int],
    kind: str,
    rates: Sequence[float],
    passes: int,
) -> Table:
    best = {seed: chosen(found, f"{name}/{seed}", kind)[0] for seed in seeds}
    inside = all(rates[0] < lr < rates[-1] for lr in best.values())
    where = "none is at the edge" if inside else "one is at the edge of the grid"
    late = [f"{lr:g}" for lr in _ADDED.get((name, kind), ())]
    added = f" Added after a first look at the held-out chats: {', '.join(late)}."
    added = added if late else ""
    rows = []
    for lr in rates:
        cells = [f"{lr:g}"]
        for seed in seeds:
            curve = found[f"{name}/{seed}/{kind}/{lr:g}"]["validation"]
            least = min(curve)
            mark = " *" if lr == best[seed] else ""
            cells.append(f"{least:.4f} ({curve.index(least)}){mark}")
        rows.append(cells)
    return Table(
        title=f"Validation: {name}, {_LABELS[kind].split(',')[0]}",
        text=(
            "Least loss on validation answers, in parentheses the pass after which it "
            f"was reached. * is chosen: {where}. A run ends when the loss has not "
            f"fallen for five passes, and at {passes} passes.{added}"
        ),
        header=("learning rate", *(f"seed {seed}" for seed in seeds)),
        rows=rows,
    )


def _checks(found: Found) -> Table:
    checks = found["resumed"]
    return Table(
        title="Merged and resumed",
        text="The trainer's own run of 60 steps, with the LoRA rate of lines, seed 0.",
        header=("what", "found", "bound"),
        rows=[
            (
                "largest difference of logits, merged and not",
                f"{checks['difference']:.1e}",
                "1e-5",
            ),
            (
                f"{checks['tensors']} tensors of the state after step 60, resumed at "
                "30",
                "the same bits" if checks["same"] else "other bits",
                "the same bits",
            ),
        ],
    )


def draw(found: Found, tasks: Mapping[str, Task]) -> None:
    """Draw the chosen validation curves of all seeds, a plot for each task."""
    figure, plots = pyplot.subplots(1, len(tasks), figsize=(9, 3.6))
    for axes, (name, task) in zip(plots, tasks.items(), strict=True):
        for kind, color in zip(task.grid, ("tab:blue", "tab:orange"), strict=True):
            for seed in task.seeds:
                curve = chosen(found, f"{name}/{seed}", kind)[1]["validation"]
                label = _LABELS[kind] if seed == task.seeds[0] else None
                axes.plot(curve, color=color, label=label, linewidth=1.2)
        axes.set_title(name)
        axes.set_xlabel("passes over the 200 chats")
        axes.grid(alpha=0.3)
    plots[0].set_ylabel("loss on validation answers, nats a token")
    plots[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=110)
