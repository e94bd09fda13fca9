"""Plot the curves of a run: loss, learning rate, gradient norm, throughput.

Input: the rows of metrics.jsonl. Output: one PNG file with four panels, whose curves
are fields of the rows. The loss is in bits per byte, which can be compared between
texts and tokenizers. A panel has a second scale for another field only if all rows
agree on the ratio: nats per token of the training text (held-out text has other bytes
per token), and MFU (which another number of GPUs changes).
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_RAW, _SMOOTH, _EVAL, _BASE = "#a9c4e6", "#1f5fa8", "#d95f02", "#6b6b6b"
"""Colours that remain distinct with red-green colour blindness."""
_MOST_POINTS = 4000
"""Maximum number of points of a raw curve: more than a panel has pixels."""
_SPEED = "tokens_per_s"
_SHOWN_TIME = 0.98
"""Share of a run's time whose throughput the panel shows. Not measured."""
_DECADES = 30
"""Ratio of high to low gradient norms above which their scale is logarithmic. Not
measured."""
_SAME = 1e-6
"""Relative difference of ratios of two fields that counts as rounding. The fields are
float64, of float32 losses."""
_SMOOTHED_OVER = 50
"""Steps of a run per step of its smoothing window. Not measured."""


def draw(
    rows: Sequence[Row],
    path: Path,
    *,
    unigram_bits: float | None,
) -> None:
    """Draw the four panels.

    Args:
      rows: rows of metrics.jsonl; a value may be absent or None.
      path: path of the PNG file; its folder is created.
      unigram_bits: entropy of single held-out bytes, in bits per byte, drawn as a line;
        a useful model is below it.
    """
    figure = make_figure(rows, unigram_bits)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def make_figure(rows: Sequence[Row], unigram_bits: float | None) -> Any:
    """Return a Matplotlib figure with the panels loss, rate, norm, throughput.

    Arguments as for `draw`.
    """
    # Matplotlib takes about a second to import, so it is loaded only to draw.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 5.4), layout="constrained")
    loss, rate, norm, speed = figure.subplots(2, 2, sharex=True).ravel()
    _draw_loss(loss, rows, unigram_bits)
    _curve(rate, rows, "lr", _SMOOTH)
    rate.set(title="learning rate")
    rate.set_ylim(bottom=0)
    rate.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _both(norm, rows, "grad_norm")
    norm.set(title="gradient norm")
    _scale_norm(norm, rows)
    usual = [row for row in rows if not row.get("profiled")]
    _draw_speed(speed, usual)
    speed.set(title="throughput", ylabel="tokens/s")
    _scale_speed(speed, usual)
    for panel in (loss, rate, norm, speed):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.01)
        panel.title.set_fontsize(10)
        panel.yaxis.label.set_fontsize(9)
        panel.tick_params(labelsize=8)
    for panel in (norm, speed):
        panel.set_xlabel("step", fontsize=9)
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    return figure


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the running mean of a curve, over fewer steps at its beginning.

    A loss falls fast at first, and a mean over the full window would lag behind it.

    Args:
      values: one for each step.
    """
    longest = max(1.0, len(values) / _SMOOTHED_OVER)
    mean, means = 0.0, list[float]()
    for index, value in enumerate(values):
        mean += (value - mean) / min(longest, 1 + index / 10)
        means.append(mean)
    return means


def thinned(
    steps: Sequence[int], values: Sequence[float], most: int
) -> tuple[list[int], list[float]]:
    """Return the points of a curve; if it is long, only the extremes of each piece.

    Args:
      steps: step numbers, ascending.
      values: one for each step.
      most: approximate number of points to keep.
    """
    length = -(-2 * len(steps) // most)
    if length <= 2:
        return [*steps], [*values]
    kept: list[int] = []
    for begin in range(0, len(steps), length):
        piece = range(begin, min(begin + length, len(steps)))
        kept += sorted(
            {min(piece, key=values.__getitem__), max(piece, key=values.__getitem__)}
        )
    return [steps[at] for at in kept], [values[at] for at in kept]


def _points(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _curve(panel: Any, rows: Sequence[Row], name: str, color: str, **more: Any) -> None:
    steps, values = _points(rows, name)
    _plot(panel, steps, values, color=color, **more)


def _both(panel: Any, rows: Sequence[Row], name: str, label: str = "") -> None:
    """Draw the raw curve, pale, and the smoothed curve."""
    steps, values = _points(rows, name)
    _plot(panel, steps, values, color=_RAW, linewidth=0.6)
    _plot(panel, steps, smoothed(values), color=_SMOOTH, label=label)


def _plot(
    panel: Any, steps: Sequence[int], values: Sequence[float], **style: Any
) -> None:
    panel.plot(*thinned(steps, values, _MOST_POINTS), **{"linewidth": 1.4} | style)


def _draw_loss(panel: Any, rows: Sequence[Row], unigram_bits: float | None) -> None:
    _both(panel, rows, "bits_per_byte", "training, smoothed")
    steps, values = _points(rows, "eval_bits_per_byte")
    if steps:
        panel.plot(
            *(steps, values),
            **{"color": _EVAL, "marker": "o", "markersize": 3.5, "linewidth": 1},
            label="held-out text",
        )
    if unigram_bits is not None:
        panel.axhline(unigram_bits, color=_BASE, linestyle=":", label="single bytes")
    skipped = [row["step"] for row in rows if row.get("skipped")]
    if skipped:
        panel.plot(
            *(skipped, [0.02] * len(skipped)),
            **{"color": "black", "marker": "x", "markersize": 5, "linestyle": ""},
            transform=panel.get_xaxis_transform(),
            label="skipped",
        )
    panel.set(title="loss", ylabel="bits per byte")
    losses = _points(rows, "bits_per_byte")[1]
    top = _quantile(losses, 0.999)
    if top is not None:  # a spike must not flatten the curve
        known = [*values, *([] if unigram_bits is None else [unigram_bits])]
        top, low = max(top, *known, 0.0), min(*losses, *known, top)
        panel.set_ylim(low - 0.05 * (top - low), top + 0.05 * (top - low) or 1.0)
    _second_scale(
        panel, "training, nats per token", _ratio(rows, "loss", "bits_per_byte")
    )
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8, framealpha=0.9, loc="upper right")


def _ratio(rows: Sequence[Row], name: str, per: str) -> float | None:
    """Return the ratio of two fields; None if rows differ in it, or none has both."""
    ratios = [row[name] / row[per] for row in rows if row.get(name) and row.get(per)]
    if not ratios or max(ratios) - min(ratios) > _SAME * max(ratios):
        return None
    return ratios[0]


def _second_scale(panel: Any, label: str, ratio: float | None) -> None:
    """Add a scale on the right: values of the panel times a ratio, if it is known."""
    if ratio is None:
        return
    scale = panel.secondary_yaxis(
        "right", functions=(lambda x: x * ratio, lambda x: x / ratio)
    )
    scale.set_ylabel(label, fontsize=9)
    scale.spines["right"].set_color("#cccccc")
    scale.tick_params(labelsize=8)


def _draw_speed(panel: Any, rows: Sequence[Row]) -> None:
    """Draw the throughput; the smoothed curve averages seconds per token, not rates."""
    steps, rates = _points([row for row in rows if row.get("tokens_per_s")], _SPEED)
    _plot(panel, steps, rates, color=_RAW, linewidth=0.6)
    _plot(
        panel,
        steps,
        [1 / mean for mean in smoothed([1 / rate for rate in rates])],
        color=_SMOOTH,
    )


def usual_top(rates: Sequence[float]) -> float | None:
    """Return the throughput that a run exceeds in 2% of its time; None without values.

    The metrics of a step can be read late, with those of the next one. The next step
    then seems to take almost no time, at many times the usual throughput. Steps are
    weighted by their time, so even many such steps hardly change the result.

    Args:
      rates: tokens per second of each step, above 0.
    """
    if not rates:
        return None
    ordered = sorted(rates)
    # The median limits the weight of a step that compiles or waits.
    most_s = 1 / ordered[(len(ordered) - 1) // 2]
    weights = [min(1 / rate, most_s) for rate in ordered]
    sums = itertools.accumulate(weights)
    limit = _SHOWN_TIME * sum(weights)
    return next(
        (rate for rate, past in zip(ordered, sums, strict=True) if past >= limit),
        ordered[-1],
    )


def _scale_norm(panel: Any, rows: Sequence[Row]) -> None:
    """Show the usual norms, on a logarithmic scale if they differ much."""
    norms = [norm for norm in _points(rows, "grad_norm")[1] if norm > 0]
    low, top = _quantile(norms, 0.02), _quantile(norms, 0.998)
    if low is not None and top is not None and top > _DECADES * low:
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0, top=None if top is None else 1.1 * top)


def _scale_speed(panel: Any, rows: Sequence[Row]) -> None:
    """Show the usual throughput from 0, and the MFU if the peak is known."""
    top = usual_top([rate for rate in _points(rows, _SPEED)[1] if rate > 0])
    panel.set_ylim(bottom=0, top=None if top is None else 1.15 * top)
    panel.yaxis.set_major_formatter(lambda value, _: _short(value))
    share = _ratio(rows, "mfu", _SPEED)
    _second_scale(panel, "MFU, %", None if share is None else 100 * share)


def _short(number: float) -> str:
    for factor, letter in ((1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:g}{letter}"
    return f"{number:g}"


def _quantile(values: Sequence[float], share: float) -> float | None:
    if not values:
        return None
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
