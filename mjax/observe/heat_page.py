"""Draw a heat map of hosts and phases as a single-file HTML page.

Input: percentages by row and column. Output: HTML with an SVG; it loads nothing from
the network and runs no script. Names are escaped. Colour-blind readers can distinguish
blue, white and orange; larger values are also written into their cells.
"""

import dataclasses
import html
import math

import numpy as np
from jaxtyping import Float

MOST_ROWS = 1000
"""Maximum number of rows. A page of that many rows is 20,000 pixels high."""
FULL = 20.0
"""Percentage from which a cell has the full colour. It is the slowdown of a throttled
host."""
_WRITTEN = 1.0
"""Smallest percentage that is written into its cell."""
_LESS, _NOTHING, _MORE = (33, 102, 172), (247, 247, 247), (217, 95, 2)
"""Blue and grey of ColorBrewer's RdBu, orange of its Dark2 (colorbrewer2.org)."""
_CELL_WIDTH, _CELL_HEIGHT, _TOP = 84, 20, 62
_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:24px;color:#1a1a1a;background:#fff}"
    "text{font:12px system-ui,sans-serif;fill:#1a1a1a}text.v{text-anchor:middle}"
    "text.light{fill:#fff}text.slow{font-weight:700}h1{font-size:20px}li{margin:2px 0}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heat:
    """Data of the heat map: H rows, P columns."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    percent: Float[np.ndarray, "H P"]
    """By how many percent a host is slower than its peers; NaN marks a missing
    value."""
    told: tuple[str, ...]
    """Problem of each row; "" if there is none."""
    marked: tuple[frozenset[int], ...]
    """Columns of each row that get a frame."""


def page(heat: Heat) -> str:
    """Return the page."""
    slow = [
        f"<li><b>{html.escape(name)}</b>: {html.escape(told)}</li>"
        for name, told in zip(heat.rows, heat.told, strict=True)
        if told
    ]
    found = f"<ul>{''.join(slow)}</ul>" if slow else "<p>No host is slow.</p>"
    hidden = len(heat.rows) - MOST_ROWS
    rest = f"<p>{hidden} more hosts, all with smaller values.</p>" if hidden > 0 else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\"><title>Heat map: "
        f"hosts and phases</title><style>{_STYLE}</style></head><body><h1>Hosts and "
        f"phases</h1><p>{html.escape(heat.title)}. Each cell shows by how many percent "
        "this host is slower than its "
        f"peers.</p>{found}{svg(heat)}{rest}</body></html>\n"
    )


def svg(heat: Heat, most_rows: int = MOST_ROWS) -> str:
    """Return only the SVG picture, of the first `most_rows` rows."""
    names = [_short(name) for name in heat.rows[:most_rows]]
    left = 16 + 7.5 * max((len(name) for name in names), default=0)
    left = max(left, 90.0)
    width = max(left + _CELL_WIDTH * len(heat.columns) + 8, left + 260)
    height = _TOP + _CELL_HEIGHT * len(names) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
        f'height="{height}" viewBox="0 0 {width:.0f} {height}" role="img" '
        'aria-label="Heat map of hosts and phases">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width:.0f}" height="{height}" fill="#fff"/>',
        *_legend(left),
    ]
    for number, phase in enumerate(heat.columns):
        x = left + _CELL_WIDTH * (number + 0.5)
        parts.append(
            f'<text class="v" x="{x:.1f}" y="{_TOP - 8}">{html.escape(phase)}</text>'
        )
    frames: list[str] = []
    for row, name in enumerate(names):
        y = _TOP + _CELL_HEIGHT * row
        style = "slow" if heat.told[row] else "row"
        parts.append(
            f'<text class="{style}" x="8" y="{y + 14}">{html.escape(name)}</text>'
        )
        for column, phase in enumerate(heat.columns):
            x, value = left + _CELL_WIDTH * column, float(heat.percent[row, column])
            parts += _cell((x, y), value, f"{heat.rows[row]}, {phase}")
            if column in heat.marked[row]:
                frames.append(_frame(x, y))
    return "".join([*parts, *frames, "</svg>"])


def _frame(x: float, y: int) -> str:
    """Return the frame of a slow cell. Frames are drawn after all cells."""
    return (
        f'<rect x="{x + 1:.1f}" y="{y + 1}" width="{_CELL_WIDTH - 3}" '
        f'height="{_CELL_HEIGHT - 3}" fill="none" stroke="#1a1a1a" stroke-width="2"/>'
    )


def _cell(corner: tuple[float, int], value: float, name: str) -> list[str]:
    x, y = corner
    is_missing = math.isnan(value)
    said = "no measurement" if is_missing else f"{value:+.1f}%"
    parts = [
        f'<rect x="{x:.1f}" y="{y}" width="{_CELL_WIDTH - 1}" '
        f'height="{_CELL_HEIGHT - 1}" fill="{colour(value)}">'
        f"<title>{html.escape(name)}: {said}</title></rect>"
    ]
    if is_missing or abs(value) >= _WRITTEN:
        style = "v light" if value < -0.6 * FULL else "v"
        text = "-" if is_missing else f"{value:+.0f}"
        parts.append(
            f'<text class="{style}" x="{x + _CELL_WIDTH / 2:.1f}" y="{y + 14}">'
            f"{text}</text>"
        )
    return parts


def colour(percent: float) -> str:
    """Return the colour of a value; grey if it is missing."""
    if math.isnan(percent):
        return "#d9d9d9"
    part = min(abs(percent) / FULL, 1.0)
    end = _MORE if percent > 0 else _LESS
    mixed = (round(n + part * (e - n)) for n, e in zip(_NOTHING, end, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _legend(left: float) -> list[str]:
    parts = []
    for number in range(21):
        value = (number - 10) / 10 * FULL
        parts.append(
            f'<rect x="{left + 8 * number:.1f}" y="8" width="8" height="12" '
            f'fill="{colour(value)}"/>'
        )
    for value, x in ((-FULL, left), (0.0, left + 84), (FULL, left + 168)):
        text = f"{value:+.0f}%" if value else "0"
        parts.append(f'<text class="v" x="{x:.1f}" y="34">{text}</text>')
    return parts


def _short(name: str) -> str:
    return name if len(name) < 41 else name[:38] + "..."
