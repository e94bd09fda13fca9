"""Draw a few steps of all ranks as a self-contained HTML page.

Input: merged steps, and the slots of a pipeline. Output: HTML with an SVG, without
scripts, fonts or network requests; names of hosts and spans are escaped.
"""

import html
from collections.abc import Iterator

from mjax.observe import slot_picture, timeline_rows
from mjax.observe.merged import Merged, Rank
from mjax.observe.places import View, device_of
from mjax.observe.slots import Slots, stage_of
from mjax.observe.spans import Kind, Span

MOST_SPANS = 20_000
"""Maximum number of spans. Browsers stay responsive with this many rectangles."""
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
_SLOTS = " slots"
"""Suffix of a stream's name for the row of its slots."""
_LEAST_TEXT = 6.5
"""Width of a letter, in pixels."""
_STYLE = """
body{font:13px system-ui,sans-serif;margin:24px;color:#1f2328;background:#fff}
svg text{font:11px system-ui,sans-serif;fill:#1f2328;pointer-events:none}
svg .rank{font-weight:600}svg .axis,svg .bound{fill:#667}
svg .bar{fill:#fff}svg .slot{text-anchor:middle}svg .bubble{fill:#8a9199}
.key{display:inline-block;width:12px;height:12px;margin:0 5px 0 14px}
"""


def page(
    found: Merged,
    view: View,
    slots: Slots | None = None,
    *,
    only_slots: bool = False,
) -> str:
    """Return the page.

    Args:
      found: merged steps.
      view: order of the ranks.
      slots: slots of a pipeline; None without a pipeline.
      only_slots: whether to leave out all spans.
    Raises:
      ValueError: there are too many spans for a picture, or no slots to draw.
    """
    slots = slots or Slots(schedule=None)
    if only_slots and not slots.bars:
        first, last = found.steps
        why = slots.problems or (
            "the run has no pipeline, or these steps have neither stamps nor windows; "
            f"train with --mesh.pp above 1 and --profile.steps {first}:{last + 1}",
        )
        raise ValueError("no slots to draw: " + "; ".join(why))
    num = len(slots.bars)
    if not only_slots:
        num += sum(len(rank.spans) for rank in found.ranks)
    if num > MOST_SPANS:
        raise ValueError(
            f"a picture of {num} spans is too large, at most {MOST_SPANS}; take fewer "
            "--steps, or write --out FILE.json and open it in Perfetto"
        )
    scale = _scale(found, slots, only_slots=only_slots)
    rows = _rows(found, view, slots, only_slots=only_slots)
    height = max(top for _, _, top in rows) + slot_picture.HEIGHT + 30
    heading = html.escape(f"Run {found.run}, start {found.generation}, by {view}")
    kinds = {span.kind for rank in found.ranks for _, span in rank.spans}
    kinds = set() if only_slots else kinds
    keys = "".join(
        f'<span class="key" style="background:{colour}"></span>{kind}'
        for kind, colour in _COLOURS.items()
        if kind in kinds
    )
    told = (*found.problems, *slots.problems)
    problems = "".join(f"<li>{html.escape(text)}</li>" for text in told)
    tops = {stream: top for _, stream, top in rows if stream.endswith(_SLOTS)}
    drawn = "\n".join(
        (
            *_axis(found, scale, height),
            *_bars(scale, rows),
            *slot_picture.drawn(slots, found.ranks, scale, tops),
        )
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{heading}</title>
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
<style>{_STYLE}</style></head><body>
<h1 style="font-size:16px">{heading}</h1><p>{keys}{slot_picture.key(slots)}</p>
<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{heading}"
 width="{_LEFT + _WIDTH + 20}" height="{height}">
<defs>{slot_picture.DEFINITIONS}</defs>
{drawn}
</svg><ul>{problems}</ul></body></html>
"""


def _scale(found: Merged, slots: Slots, *, only_slots: bool) -> slot_picture.Scale:
    """Return the time scale of the picture, from the steps or the slots."""
    start_ns, end_ns = found.start_ns, found.end_ns
    if only_slots:
        start_ns = min(bar.start_ns for bar in slots.bars)
        end_ns = max(bar.end_ns for bar in slots.bars)
    return slot_picture.Scale(
        left=_LEFT, width=_WIDTH, start_ns=start_ns, end_ns=max(end_ns, start_ns + 1)
    )


def _rows(
    found: Merged, view: View, slots: Slots, *, only_slots: bool
) -> list[tuple[Rank, str, int]]:
    """Return rank, stream and top of each row."""
    with_slots = {x.device for x in (*slots.bars, *slots.transfers)}
    rows, top = [], 30
    for rank in found.ranks:
        top += _HEAD
        for stream in timeline_rows.streams(rank, view, slots):
            if not only_slots:
                rows.append((rank, stream, top))
                top += _ROW
            if device_of(stream) in with_slots:
                rows.append((rank, stream + _SLOTS, top))
                top += slot_picture.HEIGHT
    return rows


def _axis(found: Merged, scale: slot_picture.Scale, height: int) -> Iterator[str]:
    """Yield grid lines at round times, and the events."""
    whole_ns = scale.end_ns - scale.start_ns
    power_ns = max(1, 10 ** (len(str(whole_ns)) - 1) // 10)
    unit_ns = next(n for n in (2, 5, 10, 20) if whole_ns < 13 * n * power_ns) * power_ns
    for number in range(whole_ns // unit_ns + 1):
        x = scale.x(scale.start_ns + number * unit_ns)
        yield f'<path d="M{x:.1f} 22V{height - 12}" stroke="#e4e6ea"/>'
        yield (
            f'<text class="axis" x="{x:.1f}" y="16" text-anchor="middle">'
            f"{number * unit_ns / 1e6:g} ms</text>"
        )
    for mark in found.marks:
        x = scale.x(mark.time_ns)
        said = html.escape(f"{mark.kind}: {mark.text}")
        yield (
            f'<path d="M{x:.1f} 22V{height - 12}" stroke="#d1242f" '
            f'stroke-dasharray="4 3"><title>{said}</title></path>'
            f'<text x="{x + 3:.1f}" y="30">{html.escape(mark.kind)}</text>'
        )


def _bars(
    scale: slot_picture.Scale, rows: list[tuple[Rank, str, int]]
) -> Iterator[str]:
    """Yield names of ranks and rows, and a bar for each span."""
    before = None
    for rank, stream, top in rows:
        if rank is not before:
            said = html.escape(timeline_rows.title(rank))
            yield (
                f'<text class="rank" x="4" y="{top - 6}">{said}<tspan class="bound" '
                f'font-weight="400" dx="8">{timeline_rows.bound(rank)}</tspan></text>'
            )
            before = rank
        lower = top + (slot_picture.HEIGHT // 2 if stream.endswith(_SLOTS) else 12)
        said = html.escape(_name(rank, stream))
        yield f'<text x="14" y="{lower}">{said}</text>'
        for step, span in rank.spans:
            is_inside = span.end_ns > scale.start_ns and span.start_ns < scale.end_ns
            if span.stream == stream and is_inside:
                yield _bar(scale, step, span, top)


def _name(rank: Rank, stream: str) -> str:
    """Return the name of a row."""
    device = device_of(stream.removesuffix(_SLOTS))
    if not stream.endswith(_SLOTS) or device is None:
        return stream
    return f"stage {stage_of(device, rank.header.mesh)}, device {device}"


def _bar(scale: slot_picture.Scale, step: int, span: Span, top: int) -> str:
    x, end = scale.x(span.start_ns), scale.x(span.end_ns)
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
