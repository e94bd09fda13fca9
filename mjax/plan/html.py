"""Draw a plan as an HTML page: the schedule as streams, and the text of the page.

Input: a `Plan`. Output: a self-contained page without scripts. The first picture is the
whole step, as long as the modelled step; the other pictures are computations of the
compiled program that the step executes. Lanes of a picture, from the top: passes of the
step, compute and waits, the links inside the node, the network between nodes, the link
to the host. Boxes too narrow to see are merged with their neighbours. The page supports
light and dark colour schemes.
"""

import dataclasses
import html
from collections.abc import Iterator, Sequence

from mjax.plan.page import page, title
from mjax.plan.result import WHOLE_STEP, Picture, Plan, Span

_WIDTH = 1200
_LEFT = 110
_LANE = 26
_GAP = 6
_TOP = 8
_AXIS = 22
_NARROWEST = 0.6
"""Pixels; a narrower box is merged with the next one."""
_SHORTEST_PASS = 15.0
"""Pixels; a narrower pass is merged with the previous one."""

_PASS = "pass"
_LANES = {
    _PASS: (),
    "compute": ("compute", "wait"),
    "node links": ("node",),
    "network": ("network",),
    "host link": ("host",),
}
"""Streams drawn in each lane, from the top."""
_FOOT = _TOP + len(_LANES) * (_LANE + _GAP) - _GAP

COLOURS = {
    "product": ("#1f5fa8", "matmul"),
    "kernel": ("#1d7a5c", "attention or another hand-written kernel"),
    "memory": ("#b9c7d6", "memory-bound kernel"),
    "loop": ("#8f8fb5", "loop"),
    "branch": ("#6fb0b8", "branch of a conditional"),
    "wait": ("#d43d2a", "waiting: communication that is not overlapped"),
    "tp": ("#e6a817", "over tp"),
    "dp": ("#8c5fb0", "over dp"),
    "pp": ("#c76b98", "over pp"),
    "host": ("#5b8a3c", "to or from host memory"),
    "mixed": ("#7a7a7a", "over axes of several roles"),
}
"""Fill and meaning, by kind of box."""

_LEAST_BRANCH = 0.05
"""A branch with less than this fraction of a picture's time is not named."""

_LABELS = {"product": "matmul", "kernel": "kernel", "memory": "memory"}
"""Labels of wide boxes whose label differs from the kind."""
_DARK_INK = ("memory", "loop", "branch", "tp", "pp")
"""Kinds with a light fill and dark labels."""
_WIDE, _SEAM = 6.0, 0.8
"""Pixels: a box at least this wide is drawn narrower, to leave a gap to its
neighbour."""
_LETTER = 7.0
"""Upper bound of the width of a letter in a label, in pixels."""

_STYLE = """
:root { color-scheme: light dark; --ink: #16191d; --paper: #ffffff; --faint: #5b6570;
        --line: #9aa5b1; --panel: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --paper: #14181d; --faint: #a4afba; --line: #5a6570;
          --panel: #1d232a; }
}
body { font: 15px/1.5 ui-sans-serif, Helvetica, Arial, sans-serif; color: var(--ink);
       background: var(--paper); margin: 2em auto; max-width: 1400px;
       padding: 0 1.5em; }
h1 { font-size: 1.3em; } h2 { font-size: 1em; margin: 1.2em 0 0.2em; }
h2 + p { margin: 0; font-size: 0.93em; color: var(--faint); }
pre { font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; overflow-x: auto;
      background: var(--panel); padding: 1em; border-radius: 6px; }
.picture { overflow-x: auto; }
.picture svg { min-width: 1000px; width: 100%; height: auto; }
@media (min-width: 1000px) { pre { white-space: pre-wrap; } }
ul { list-style: none; padding: 0; } li { display: inline-block; margin-right: 1.5em; }
svg { vertical-align: middle; }
svg text { fill: var(--ink); } svg path { stroke: var(--line); }
svg .pass { fill: var(--panel); stroke: var(--line); }
svg .light { fill: #ffffff; } svg .dark { fill: #16191d; }
@page { size: landscape; margin: 1cm; }
@media print { body { margin: 0; max-width: none; } }
"""


def document(plan: Plan) -> str:
    """Return the HTML page."""
    name = html.escape(title(plan))
    drawn = "\n".join(_section(picture) for picture in plan.pictures)
    if not plan.pictures:
        drawn = "<p>No schedule to draw: the step was not compiled.</p>"
    return (
        "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        f"<title>{name}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{name}</h1>\n<pre>{html.escape(page(plan))}</pre>\n"
        "<h1>Schedule on four streams, modelled time</h1>\n"
        f"{_legend(plan.pictures)}{drawn}\n</body>\n</html>\n"
    )


def _legend(pictures: Sequence[Picture]) -> str:
    """Explain the colours, if there is a picture."""
    if not pictures:
        return ""
    # Only the computations with most of the time have a picture of their own.
    more = {"loop": ": the bodies with most of the time are drawn below"}
    shown = more if len(pictures) > 1 else {}
    lines = "\n".join(
        f"<li>{_swatch(fill)} {html.escape(words + shown.get(kind, ''))}</li>"
        for kind, (fill, words) in COLOURS.items()
    )
    return f"<ul>\n{lines}\n</ul>\n"


def svg(picture: Picture) -> str:
    """Return a picture as an SVG image."""
    total_s = _total_s(picture)
    scale = _WIDTH / total_s
    height = _FOOT + _AXIS
    label = html.escape(_heading(picture), quote=True)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_LEFT + _WIDTH + 40} "
        f"{height}' role='img' aria-label='{label}' font-size='12' "
        "font-family='ui-sans-serif, Helvetica, Arial, sans-serif'>"
    ]
    for lane, (words, streams) in enumerate(_LANES.items()):
        y = _TOP + lane * (_LANE + _GAP) + 17
        parts.append(f"<text x='0' y='{y}'>{words}</text>")
        if words == _PASS:
            named = passes(picture.spans, _SHORTEST_PASS / scale)
            parts.extend(_pass_box(span, scale) for span in named)
        for span in joined(_lane(picture.spans, streams), _NARROWEST / scale):
            parts.append(_box(span, lane, scale))
    parts.extend(_axis(total_s, scale))
    return "\n".join([*parts, "</svg>"])


def passes(spans: Sequence[Span], shortest_s: float) -> list[Span]:
    """Merge the boxes of the compute stream that belong to the same passes.

    Boxes without a name, waits, and passes that are too short to see count as parts of
    the previous pass; at the beginning, of the next one.

    Args:
      spans: boxes of a picture.
      shortest_s: seconds of the shortest pass that is not merged.
    Returns:
      boxes without gaps, in order of time; empty if no box has the name of a pass.
    """
    found: list[Span] = []
    for span in _lane(spans, _LANES["compute"]):
        last = found[-1] if found else None
        if last is not None and span.passes in ((), last.passes):
            found[-1] = dataclasses.replace(last, stop_s=span.stop_s)
        else:
            found.append(dataclasses.replace(span, stream=_PASS))
    merged: list[Span] = []

    def is_short(span: Span) -> bool:
        return span.stop_s - span.start_s < shortest_s

    for span in found:
        last = merged[-1] if merged else None
        if last is None:
            merged = [span]
        elif is_short(span) or span.passes == last.passes:
            merged[-1] = dataclasses.replace(last, stop_s=span.stop_s)
        elif len(merged) == 1 and (is_short(last) or not last.passes):
            merged = [dataclasses.replace(span, start_s=last.start_s)]
        else:
            merged.append(span)
    return [span for span in merged if span.passes]


def joined(spans: list[Span], narrowest_s: float) -> Iterator[Span]:
    """Merge boxes that are too narrow to see with the boxes after them.

    Args:
      spans: boxes of one lane, in order of time.
      narrowest_s: seconds of the narrowest box that is not merged.
    Yields:
      the boxes, in order; a merged box has the kind of its longest part.
    """
    group: list[Span] = []
    for span in spans:
        is_near = group and span.start_s - group[-1].stop_s < narrowest_s
        is_wide = span.stop_s - span.start_s >= narrowest_s
        if group and (is_wide or not is_near):
            yield _one(group)
            group = []
        if is_wide:
            yield span
        else:
            group.append(span)
            if span.stop_s - group[0].start_s >= narrowest_s:
                yield _one(group)
                group = []
    if group:
        yield _one(group)


def _one(group: list[Span]) -> Span:
    longest = max(group, key=lambda span: span.stop_s - span.start_s)
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    return Span(
        stream=longest.stream,
        name=f"{longest.name}{more}",
        kind=longest.kind,
        start_s=group[0].start_s,
        stop_s=group[-1].stop_s,
        passes=longest.passes,
    )


def _lane(spans: Sequence[Span], streams: tuple[str, ...]) -> list[Span]:
    """Return the boxes of a lane, in order of time."""
    chosen = [span for span in spans if span.stream in streams]
    return sorted(chosen, key=lambda span: span.start_s)


def _section(picture: Picture) -> str:
    return (
        f"<h2 title='{html.escape(picture.name, quote=True)}'>"
        f"{html.escape(_heading(picture))}</h2>\n"
        f"{_note(picture)}"
        f"<div class='picture'>\n{svg(picture)}\n</div>"
    )


def _heading(picture: Picture) -> str:
    """Return the title of a picture: its place, its passes, and how often it runs."""
    words = picture.where[:1].upper() + picture.where[1:]
    if picture.where == WHOLE_STEP:
        return words
    passes = f": {', '.join(picture.passes)}" if picture.passes else ""
    return f"{words}{passes}; {picture.runs:,} per step"


def _note(picture: Picture) -> str:
    """Return a paragraph with the time of a mean run and how often its branches run.

    It is empty if every branch is taken in every run of the computation.
    """
    if not picture.branches:
        return ""
    total_s = _total_s(picture)
    named = [b for b in picture.branches if b.seconds > _LEAST_BRANCH * total_s]
    rarely = [f"{b.part} ({_time(b.seconds)}) runs in {b.runs:.3g}" for b in named]
    if len(named) < len(picture.branches):
        rarely.append("short branches run in some")
    return (
        f"<p>Drawn with every branch, {_time(total_s)}. The mean of the "
        f"{picture.runs:,} passes is {_time(picture.mean_s)}: {', '.join(rarely)}."
        "</p>\n"
    )


def _total_s(picture: Picture) -> float:
    return max(span.stop_s for span in picture.spans)


def _pass_box(span: Span, scale: float) -> str:
    x, width = _LEFT + span.start_s * scale, (span.stop_s - span.start_s) * scale
    words = ", ".join(span.passes)
    box = (
        f"<rect class='{_PASS}' x='{x:.1f}' y='{_TOP}' width='{width:.1f}' "
        f"height='{_LANE}'><title>{words}: {_time(span.stop_s - span.start_s)}"
        "</title></rect>"
    )
    return box + _label(words, x, width, _TOP, "ink")


def _label(words: str, x: float, width: float, y: int, ink: str) -> str:
    """Return a label centred in a box; empty if the box is too narrow for it."""
    if width < _LETTER * len(words) + 6:
        return ""
    return (
        f"<text class='{ink}' x='{x + width / 2:.1f}' y='{y + 17}' "
        f"text-anchor='middle' pointer-events='none'>{words}</text>"
    )


def _box(span: Span, lane: int, scale: float) -> str:
    kind = "wait" if span.stream == "wait" else span.kind
    fill = COLOURS[kind][0]
    x, width = _LEFT + span.start_s * scale, (span.stop_s - span.start_s) * scale
    y = _TOP + lane * (_LANE + _GAP)
    time, of = _time(span.stop_s - span.start_s), ", ".join(span.passes)
    what = f"{f'{of}, ' if of else ''}{COLOURS[kind][1]}: {time} ({span.name})"
    drawn = width - _SEAM if width > _WIDE else max(width, 0.3)
    box = (
        f"<rect class='{kind}' x='{x:.1f}' y='{y}' width='{drawn:.1f}' "
        f"height='{_LANE}' fill='{fill}'><title>{html.escape(what)}</title></rect>"
    )
    words = f"wait {span.kind}" if kind == "wait" else _LABELS.get(kind, kind)
    if kind in ("loop", "branch") and span.passes:
        long = f"{kind}: {', '.join(span.passes)}"
        words = long if width >= _LETTER * len(long) + 6 else words
    return box + _label(words, x, width, y, "dark" if kind in _DARK_INK else "light")


def _axis(total_s: float, scale: float) -> Iterator[str]:
    y = _FOOT
    for part in range(5):
        x = _LEFT + part / 4 * total_s * scale
        yield f"<path d='M{x:.1f} {y}v5'/>"
        yield (
            f"<text x='{x:.1f}' y='{y + 18}' text-anchor='middle'>"
            f"{_time(part / 4 * total_s)}</text>"
        )


def _swatch(fill: str) -> str:
    box = f"<rect width='20' height='12' fill='{fill}'/>"
    return f"<svg width='22' height='14'>{box}</svg>"


def _time(seconds: float) -> str:
    """Format a time in the largest unit in which it is above 1."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
