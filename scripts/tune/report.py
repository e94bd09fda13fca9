"""The page of `scripts.tune.chats`, and its figure."""

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

Found = Mapping[str, Any]
"""What `scripts.tune.chats.Results` keeps."""


def chosen(found: Found, seed: int, kind: str) -> tuple[float, Mapping[str, Any]]:
    """Return the learning rate with the least validation loss, and its curve."""
    curves = {
        float(key.rpartition("/")[2]): value
        for key, value in found.items()
        if key.startswith(f"{seed}/{kind}/")
    }
    lr = min(curves, key=lambda rate: min(curves[rate]["validation"]))
    return lr, curves[lr]


def write(
    found: Found,
    seeds: Sequence[int],
    grid: Mapping[str, Sequence[float]],
    num_trained: Mapping[str, int],
    rank: int,
    passes: int,
) -> None:
    """Write the page and the figure, and print the ratios.

    Args:
      found: all results.
      seeds: of the experiment.
      grid: learning rates of each kind.
      num_trained: parameters of each kind.
      rank: of the adapters.
      passes: most that a run may make.
    """
    losses = [found[f"{seed}/held-out"]["answers"] for seed in seeds]
    kinds = [found[f"{seed}/held-out"]["kinds"] for seed in seeds]
    ratios = [loss["lora"] / loss["full"] for loss in losses]
    mean = sum(ratios) / len(ratios)
    verdict = "holds" if mean <= _BOUND else "is missed"
    share = num_trained["lora"] / num_trained["full"]
    draw(found, seeds, grid)
    write_page(
        "fine_tuning",
        "Fine-tuning a small imported model on 200 chats",
        "python -m scripts.tune.chats --work-dir runs/chats",
        [
            Table(
                title="Loss on held-out answers",
                text=(
                    f"At {commit()}. A base of {num_trained['full']:,} parameters is "
                    "trained on docstrings of the standard library, exported to a "
                    "Hugging Face folder and imported again. The question of a chat "
                    "is the dotted name of a class, method or function of another "
                    "module and the first half of the first line of its docstring; "
                    "the answer is which of the three it is, and the other half. "
                    "The kind follows from the question, the rest can only be "
                    "guessed. 200 chats are trained on, 100 validate, 200 are "
                    "held out; no module is in two of these or in the base's text. "
                    "Learning rate (tables below) and passes are those of the least "
                    "validation loss, for both ways of training; the held-out chats "
                    "are read once, after that. Each seed draws other modules, chats, "
                    "adapters and another order. Nats a token of the answers (bytes), "
                    "the end of the turn included, and nats of the first byte of the "
                    "answers alone, which says the kind: mean, and the range over "
                    f"{len(seeds)} seeds. LoRA, rank {rank}, trains {share:.1%} of the "
                    f"parameters. LoRA against all parameters: {mean:.3f} "
                    f"({min(ratios):.3f} to {max(ratios):.3f}); the bound of {_BOUND} "
                    f"{verdict}.\n\n"
                    "![Loss on validation answers](../figures/fine_tuning.png)"
                ),
                header=("trained", "parameters", "held out", "of full", "kind"),
                rows=[
                    (
                        *_row(kind, losses, num_trained),
                        _range([each[kind] for each in kinds]),
                    )
                    for kind in _LABELS
                ],
            ),
            *(_grid_table(found, seeds, *each, passes) for each in grid.items()),
            _checks(found),
        ],
    )
    print(ratios, mean, losses, kinds)


def _row(
    kind: str, losses: Sequence[Mapping[str, float]], num_trained: Mapping[str, int]
) -> Sequence[str]:
    whole = num_trained["full"]
    trained = whole if kind == "shuffled" else num_trained.get(kind, 0)
    return (
        _LABELS[kind],
        f"{trained:,} ({trained / whole:.1%})",
        _range([loss[kind] for loss in losses]),
        _range([loss[kind] / loss["full"] for loss in losses]),
    )


def _range(values: Sequence[float]) -> str:
    mean = sum(values) / len(values)
    return f"{mean:.3f} ({min(values):.3f} to {max(values):.3f})"


def _grid_table(
    found: Found, seeds: Sequence[int], kind: str, rates: Sequence[float], passes: int
) -> Table:
    best = [chosen(found, seed, kind)[0] for seed in seeds]
    inside = all(rates[0] < lr < rates[-1] for lr in best)
    where = "none is at the edge" if inside else "one is at the edge of the grid"
    rows = []
    for lr in rates:
        cells = [f"{lr:g}"]
        for seed in seeds:
            curve = found[f"{seed}/{kind}/{lr:g}"]["validation"]
            least = min(curve)
            mark = " *" if lr == chosen(found, seed, kind)[0] else ""
            cells.append(f"{least:.4f} ({curve.index(least)}){mark}")
        rows.append(cells)
    return Table(
        title=f"Validation: {_LABELS[kind].split(',')[0]}",
        text=(
            "Least loss on validation answers, in parentheses the pass after which it "
            f"was reached. * is chosen: {where}. A run ends when the loss has not "
            f"fallen for three passes, and at {passes} passes."
        ),
        header=("learning rate", *(f"seed {seed}" for seed in seeds)),
        rows=rows,
    )


def _checks(found: Found) -> Table:
    checks = found["resumed"]
    return Table(
        title="Merged and resumed",
        text="The trainer's own run of 60 steps, with the LoRA rate of seed 0.",
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


def draw(
    found: Found, seeds: Sequence[int], grid: Mapping[str, Sequence[float]]
) -> None:
    """Draw the chosen validation curves of all seeds."""
    figure, axes = pyplot.subplots(figsize=(6, 3.6))
    for kind, color in zip(grid, ("tab:blue", "tab:orange"), strict=True):
        for seed in seeds:
            curve = chosen(found, seed, kind)[1]["validation"]
            label = _LABELS[kind] if seed == seeds[0] else None
            axes.plot(curve, color=color, label=label, linewidth=1.2)
    axes.set_xlabel("passes over the 200 chats")
    axes.set_ylabel("loss on validation answers, nats a token")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=110)
