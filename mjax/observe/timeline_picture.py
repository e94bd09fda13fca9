"""A picture of a few steps of all ranks, as a page of its own.

Enters: merged steps. Leaves: HTML with an SVG inside, without scripts, fonts or
anything from a network; names of hosts and spans are escaped.
"""

import html
from collections.abc import Iterator

from mjax.observe import timeline_rows
from mjax.observe.merged import Merged, Rank
from mjax.observe.places import View
from mjax.observe.spans import Kind, Span

MOST_SPANS = 20_000
"""Chosen: browsers stay fluid with so many rectangles."""
_COLOURS: dict[Kind, str] = {
    "compute": "#4e9a6b",
    "tp": "#3b7dd8",
    "pp": "#7b6fd0",
    "dp": "#c2679b",
    "optimizer": "#a3922b",
    "data": "#e08a1e",
    "host": "#8a9199",
    "ckpt": "#d1605e",
    "eval": "#2aa5a0",
    "restart": "#8c1d18",
    "idle": "#d4d7db",
}
_LEFT, _WIDTH, _ROW, _BAR, _HEAD = 150, 1300, 20, 15, 26
_MOST_ARROWS = 2_000
_LEAST_TEXT = 6.5
"""Width of a letter, in pixels."""
_STYLE = """
body{font:13px system-ui,sans-serif;margin:24px;color:#1f2328;background:#fff}
svg text{font:11px system-ui,sans-serif;fill:#1f2328;pointer-events:none}
svg .rank{font-weight:600}svg .axis,svg .bound{fill:#667}
svg .bar{fill:#fff}.key{display:inline-block;width:12px;height:12px;margin:0 5px 0 14px}
"""


def page(found: Merged, view: View) -> str:
    """Return the page.

    Raises:
      ValueError: there are too many spans for a picture.
    """
    num = sum(len(rank.spans) for rank in found.ranks)
    if num > MOST_SPANS:
        raise ValueError(
            f"a picture of {num} spans is too large, at most {MOST_SPANS}; take fewer "
            "--steps, or write --out FILE.json and open it in Perfetto"
        )
    rows = _rows(found, view)
    height = max(top for _, _, top in rows) + _ROW + 30
    heading = html.escape(f"Run {found.run}, start {found.generation}, by {view}")
    kinds = {span.kind for rank in found.ranks for _, span in rank.spans}
    keys = "".join(
        f'<span class="key" style="background:{colour}"></span>{kind}'
        for kind, colour in _COLOURS.items()
        if kind in kinds
    )
    problems = "".join(f"<li>{html.escape(text)}</li>" for text in found.problems)
    drawn = "\n".join(
        (*_axis(found, height), *_bars(found, rows), *_arrows(found, rows))
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{heading}</title>
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
<style>{_STYLE}</style></head><body>
<h1 style="font-size:16px">{heading}</h1><p>{keys}</p>
<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{heading}"
 width="{_LEFT + _WIDTH + 20}" height="{height}">
<defs><marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="5"
 markerHeight="5" orient="auto"><path d="M0 0L6 3L0 6z" fill="#444"/></marker></defs>
{drawn}
</svg><ul>{problems}</ul></body></html>
"""


def _rows(found: Merged, view: View) -> list[tuple[Rank, str, int]]:
    """Return the rank, the stream and the top of each row."""
    rows, top = [], 30
    for rank in found.ranks:
        top += _HEAD
        for stream in timeline_rows.streams(rank, view):
            rows.append((rank, stream, top))
            top += _ROW
    return rows


def _x(found: Merged, time_ns: int) -> float:
    """Return where a time is; what is before the steps or after them, at the edge."""
    part = (time_ns - found.start_ns) / max(1, found.end_ns - found.start_ns)
    return _LEFT + _WIDTH * min(1.0, max(0.0, part))


def _axis(found: Merged, height: int) -> Iterator[str]:
    """Yield lines at round times, and what happened."""
    whole_ns = max(1, found.end_ns - found.start_ns)
    power_ns = max(1, 10 ** (len(str(whole_ns)) - 1) // 10)
    unit_ns = next(n for n in (2, 5, 10, 20) if whole_ns < 13 * n * power_ns) * power_ns
    for number in range(whole_ns // unit_ns + 1):
        x = _x(found, found.start_ns + number * unit_ns)
        yield f'<path d="M{x:.1f} 22V{height - 12}" stroke="#e4e6ea"/>'
        yield (
            f'<text class="axis" x="{x:.1f}" y="16" text-anchor="middle">'
            f"{number * unit_ns / 1e6:g} ms</text>"
        )
    for mark in found.marks:
        x = _x(found, mark.time_ns)
        said = html.escape(f"{mark.kind}: {mark.text}")
        yield (
            f'<path d="M{x:.1f} 22V{height - 12}" stroke="#d1242f" '
            f'stroke-dasharray="4 3"><title>{said}</title></path>'
            f'<text x="{x + 3:.1f}" y="30">{html.escape(mark.kind)}</text>'
        )


def _bars(found: Merged, rows: list[tuple[Rank, str, int]]) -> Iterator[str]:
    before = None
    for rank, stream, top in rows:
        if rank is not before:
            said = html.escape(timeline_rows.title(rank))
            yield (
                f'<text class="rank" x="4" y="{top - 6}">{said}<tspan class="bound" '
                f'font-weight="400" dx="8">{timeline_rows.bound(rank)}</tspan></text>'
            )
            before = rank
        yield f'<text x="14" y="{top + 12}">{html.escape(stream)}</text>'
        for step, span in rank.spans:
            is_inside = span.end_ns > found.start_ns and span.start_ns < found.end_ns
            if span.stream == stream and is_inside:
                yield _bar(found, step, span, top)


def _bar(found: Merged, step: int, span: Span, top: int) -> str:
    x, end = _x(found, span.start_ns), _x(found, span.end_ns)
    width = max(0.5, end - x)
    of = f", step {step}" if step > 0 else ""
    spent_ms = (span.end_ns - span.start_ns) / 1e6
    said = html.escape(f"{span.name} ({span.kind}){of}: {spent_ms:.3f} ms")
    text = ""
    if width > _LEAST_TEXT * len(span.name) + 4:
        inside = html.escape(span.name)
        text = f'<text class="bar" x="{x + 3:.1f}" y="{top + 11}">{inside}</text>'
    return (
        f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}" '
        f'fill="{_COLOURS[span.kind]}" stroke="#fff" stroke-width=".4">'
        f"<title>{said}</title></rect>{text}"
    )


def _arrows(found: Merged, rows: list[tuple[Rank, str, int]]) -> Iterator[str]:
    """Yield the sends of a pipeline, unless they would hide the rest."""
    tops = {(rank.header.rank, stream): top for rank, stream, top in rows}
    drawn = timeline_rows.arrows(found)
    for arrow in drawn if len(drawn) <= _MOST_ARROWS else ():
        middle = _BAR / 2
        y = tops[arrow.sender, arrow.sent.stream] + middle
        to_y = tops[arrow.receiver, arrow.received.stream] + middle
        x, to_x = _x(found, arrow.sent.end_ns), _x(found, arrow.received_ns)
        yield (
            f'<path d="M{x:.1f} {y}L{to_x:.1f} {to_y}" stroke="#444" fill="none" '
            'stroke-width=".8" opacity=".6" marker-end="url(#tip)"/>'
        )
