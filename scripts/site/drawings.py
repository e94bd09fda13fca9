"""Draw the figures of docs/concepts.md: `python -m scripts.site.drawings`.

Output: docs/figures/concept_*.svg. Layouts and counts in a drawing are computed:
devices from the mesh axes, bytes from the levels of ZeRO, blocks of a window from its
mask.
"""

import html
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mjax.mesh.axes import AXES

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
_PAPER, _LINE = "var(--paper)", "#8a93a6"
# Words in a box are dark in both schemes: the fills of boxes are the same in both.
_STYLE = """<style>
svg { --ink: #1f2430; --paper: #ffffff; --grey: #e6e9f0; }
text { fill: var(--ink); } .boxed { fill: #1f2430; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e8eaed; --paper: #14181d; --grey: #2c333c; }
}
</style>
"""
_BLUE, _ORANGE, _GREEN, _RED, _GREY = (
    *("#9ec5fe", "#ffcf99", "#a8dcb5"),
    *("#f5a3a3", "var(--grey)"),
)


def picture(width: int, height: int, title: str, marks: Iterator[str]) -> str:
    """Return an SVG of marks on a card in the reader's light or dark scheme."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title)}" '
        'font-family="system-ui, sans-serif" font-size="13">\n'
        + _STYLE
        + f'<rect width="{width}" height="{height}" rx="8" fill="{_PAPER}"/>\n'
        + "\n".join(marks)
        + "\n</svg>\n"
    )


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    """Return a rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
        f'fill="{fill}" stroke="{_LINE}"/>'
    )


def text(
    x: float, y: float, words: str, anchor: str = "start", kind: str | None = None
) -> str:
    """Return words with their baseline at y, in a class of the style sheet."""
    of_kind = f' class="{kind}"' if kind else ""
    return (
        f'<text x="{x:g}" y="{y:g}"{of_kind} text-anchor="{anchor}">'
        f"{html.escape(words)}</text>"
    )


def labelled(x: float, y: float, width: float, fill: str, words: str) -> Iterator[str]:
    """Yield a box 26 high with words in its middle."""
    yield box(x, y, width, 26, fill)
    yield text(x + width / 2, y + 18, words, "middle", "boxed")


def mesh() -> str:
    """Draw 16 devices on two nodes as a mesh of pp 2, dp_shard 4, tp 2."""
    sizes = {"pp": 2, "dp_shard": 4, "tp": 2}
    shape = [sizes.get(axis, 1) for axis in AXES]
    devices = np.arange(16).reshape(shape)

    def marks() -> Iterator[str]:
        fills = (_BLUE, _ORANGE)
        for place in itertools.product(*map(range, shape)):
            at = dict(zip(AXES, place, strict=True))
            x = 110 + 150 * at["dp_shard"]
            y = 52 + 110 * at["pp"]
            if at["tp"] == 0:
                yield box(x - 8, y - 8, 130, 42, _PAPER)
            device = int(devices[place])
            yield from labelled(
                x + 60 * at["tp"], y, 54, fills[at["pp"]], f"GPU {device}"
            )
        for stage in range(2):
            y = 52 + 110 * stage
            yield text(14, y + 18, f"stage {stage}")
            yield text(14, y + 52, f"node {stage}: GPUs {8 * stage} to {8 * stage + 7}")
        for shard in range(4):
            yield text(167 + 150 * shard, 30, f"shard {shard} of dp", "middle")
        yield text(
            14,
            248,
            "Frame: a tensor-parallel group of 2, on the fastest links. "
            "Column: devices that process the same samples.",
        )

    return picture(740, 264, "A mesh of 16 GPUs: pp 2, dp_shard 4, tp 2", marks())


def bytes_per_parameter(level: int, shards: int) -> dict[str, float]:
    """Return bytes of a device for each parameter, at a level of ZeRO.

    Masters, both moments and gradients are float32, weights of the step bfloat16. The
    step has several microbatches: up to level 2 it adds up whole gradients. At level 3
    the layer that is gathered now comes on top. See docs/parallelism.md.
    """
    return {
        "masters and moments": 12 / (shards if level >= 1 else 1),
        "weights in bfloat16": 2 / (shards if level >= 3 else 1),
        "gradients": 4 / (shards if level >= 3 else 1),
    }


def zero() -> str:
    """Draw the bytes of a device for each parameter, for ZeRO 0 to 3 over 8 devices."""

    def marks() -> Iterator[str]:
        fills = dict(
            zip(bytes_per_parameter(0, 8), (_BLUE, _ORANGE, _GREEN), strict=True)
        )
        for level in range(4):
            x, y = 90.0, 46 + 40 * level
            yield text(14, y + 18, f"--zero {level}")
            sizes = bytes_per_parameter(level, 8)
            for name, size in sizes.items():
                yield box(x, y, 28 * size, 26, fills[name])
                x += 28 * size
            yield text(x + 8, y + 18, f"{sum(sizes.values()):g} bytes")
        for index, (name, fill) in enumerate(fills.items()):
            yield box(90 + 190 * index, 14, 14, 14, fill)
            yield text(110 + 190 * index, 26, name)

    return picture(720, 216, "Bytes of a device per parameter for ZeRO 0 to 3", marks())


def overlap() -> str:
    """Draw what runs at the same time in a step: matmuls and three kinds of traffic."""

    def marks() -> Iterator[str]:
        lanes = ("matmuls", "tp, in the node", "dp, weights", "dp, gradients")
        for row, name in enumerate(lanes):
            yield text(14, 36 + 40 * row, name)
        for layer in range(4):
            x = 130 + 130 * layer
            yield from labelled(x, 18, 126, _BLUE, f"layer {layer}")
            for chunk in range(3):
                yield box(x + 6 + 42 * chunk, 58, 34, 26, _ORANGE)
            if layer < 3:
                yield from labelled(x + 4, 98, 100, _GREEN, f"gather {layer + 1}")
            if layer > 0:
                yield from labelled(x + 4, 138, 100, _RED, f"reduce {layer - 1}")
        yield text(
            14,
            192,
            "Weights are gathered one layer ahead. In the backward pass, gradients are "
            "reduced one layer later.",
        )

    return picture(680, 208, "Communication beside the matmuls of four layers", marks())


def window() -> str:
    """Draw the blocks of 64 x 64 scores that a causal window of 256 keeps."""
    length, block, size = 1024, 64, 256
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    visible = (distance >= 0) & (distance < size)
    num = length // block
    parts = visible.reshape(num, block, num, block).mean(axis=(1, 3))

    def marks() -> Iterator[str]:
        for query, key in itertools.product(range(num), repeat=2):
            share = parts[query, key]
            fill = _GREY if share == 0 else _BLUE if share == 1 else _ORANGE
            yield (
                f'<rect x="{20 + 17 * key}" y="{20 + 17 * query}" width="16" '
                f'height="16" fill="{fill}"/>'
            )
        counts = (
            (parts == 0).sum(),
            (parts == 1).sum(),
            ((parts > 0) & (parts < 1)).sum(),
        )
        for row, (fill, name, count) in enumerate(
            zip(
                (_GREY, _BLUE, _ORANGE),
                ("skipped", "no mask", "masked"),
                counts,
                strict=True,
            )
        ):
            yield box(320, 40 + 34 * row, 18, 18, fill)
            yield text(348, 54 + 34 * row, f"{name}: {count} of {num * num} blocks")
        yield text(320, 170, "rows: queries, columns: keys")
        yield text(320, 190, f"{length} positions, window {size}, blocks of {block}")

    return picture(620, 312, "Blocks of attention scores under a window", marks())


def recovery() -> str:
    """Draw a run that loses a host and continues with the spare one."""

    def marks() -> Iterator[str]:
        for row, name in enumerate(("host 0", "host 1", "spare", "checkpoints")):
            yield text(14, 36 + 40 * row, name)
        for step in range(5):
            x = 110 + 52 * step
            yield from labelled(x, 18, 48, _BLUE, f"{step + 1}")
            if step < 4:
                yield from labelled(x, 58, 48, _BLUE, f"{step + 1}")
        yield from labelled(110 + 52 * 4, 58, 48, _RED, "fault")
        yield from labelled(110 + 52 * 2, 138, 100, _GREEN, "save 3")
        for y in (18, 98):
            yield from labelled(374, y, 100, _ORANGE, "restore 3")
            for step in range(3, 6):
                yield from labelled(478 + 52 * (step - 3), y, 48, _BLUE, f"{step + 1}")
        yield text(
            14,
            192,
            "Steps 4 and 5 are computed again from the same samples, with the same "
            "losses.",
        )

    return picture(660, 208, "A run loses a host and continues with a spare", marks())


DRAWINGS: dict[str, Callable[[], str]] = {
    "mesh": mesh,
    "overlap": overlap,
    "recovery": recovery,
    "window": window,
    "zero": zero,
}
"""Drawing functions by the name of the figure."""


if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (FIGURES / f"concept_{name}.svg").write_text(draw())
