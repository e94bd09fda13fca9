"""Draw the slots of a pipeline in the picture of a timeline.

Input: slots, and the positions of times and rows in the picture. Output: parts of an
SVG. A row has a lane for forward slots, one for transfers, and one for backward slots.
As in docs/pipeline.md, numbers are microbatches, letters are virtual stages, forward
slots are light and backward slots dark. An idle slot is hatched over its whole tick.
"""

import dataclasses
import html
from collections.abc import Iterator, Mapping, Sequence

from mjax.observe.merged import Rank
from mjax.observe.schedule import DIRECTIONS, Direction
from mjax.observe.slots import Bar, Slots, Transfer
from mjax.observe.timeline_rows import arrows

HEIGHT = 46
"""Height of a row, in pixels."""
_LANE, _WIRE = 17, 4
_TOPS: dict[Direction, int] = {"forward": 0, "backward": _LANE + _WIRE}
_HUES = (("#b5d5f5", "#1f5fa8"), ("#f8d3a8", "#a85a12"), ("#bfe5c8", "#1d7a3e"))
_HUES += (("#e3c8f0", "#7a3a9c"),)
"""Colours of forward and backward, by virtual stage; they repeat."""
_REPLICAS = "#2aa5a0"
_SENT: dict[Direction, str] = {"forward": "#c9447a", "backward": "#6b2145"}
MOST_ARROWS = 2_000
"""Maximum number of arrows; above it, none is drawn. More would hide the rest."""
_LETTER = 6.5
"""Width of a letter, in pixels."""
_TIP = """<marker id="{}" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6"
 markerHeight="6" orient="auto"><path d="M0 0L6 3L0 6z" fill="{}"/></marker>
"""
DEFINITIONS = "".join(_TIP.format(*both) for both in _SENT.items())
DEFINITIONS += """<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse"
 patternTransform="rotate(45)"><rect width="6" height="6" fill="#f1f2f4"/>
<path d="M0 0V6" stroke="#b9bec5" stroke-width="2.4"/></pattern>"""
"""Elements for the SVG's `defs`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps times to horizontal positions in the picture, in pixels."""

    left: int
    width: int
    start_ns: int
    end_ns: int

    def x(self, time_ns: int) -> float:
        """Return the position of a time; a time outside the picture is at its edge."""
        part = (time_ns - self.start_ns) / max(1, self.end_ns - self.start_ns)
        return self.left + self.width * min(1.0, max(0.0, part))


def key(slots: Slots) -> str:
    """Return the legend of the colours of slots."""
    if slots.schedule is None or not slots.bars:
        return ""
    said = []
    for chunk in range(min(slots.schedule.num_chunks, len(_HUES))):
        for name, colour in zip(("forward", "backward"), _HUES[chunk], strict=True):
            letter = chr(ord("a") + chunk)
            said.append((colour, f"{name}, {letter}"))
    found = "".join(
        f'<span class="key" style="background:{colour}"></span>{text}'
        for colour, text in said
    )
    hatch = "repeating-linear-gradient(45deg,#f1f2f4 0 3px,#b9bec5 3px 6px)"
    sent = [(_SENT[way], f"transfer {way}") for way in DIRECTIONS]
    if any(one.role == "dp" for one in slots.transfers):
        sent.append((_REPLICAS, "weights and gradients over dp"))
    wires = "".join(
        f'<span class="key" style="background:{colour};height:4px"></span>{text}'
        for colour, text in (sent if slots.transfers else ())
    )
    idle = f'<span class="key" style="background:{hatch}"></span>idle (bubble)'
    what = "<br>Slots: numbers are microbatches, letters virtual stages. "
    return what + found + idle + wires


def drawn(
    slots: Slots, ranks: Sequence[Rank], scale: Scale, tops: Mapping[str, int]
) -> Iterator[str]:
    """Yield slots, transfers and arrows.

    Args:
      slots: slots to draw.
      ranks: ranks in the picture.
      scale: time scale.
      tops: top of each row in pixels, by name of the row.
    """
    for bar in slots.bars:
        yield _slot(bar, scale, _top(bar, tops))
    for sent in slots.transfers:
        top = tops[f"device:{sent.device} slots"] + _LANE
        yield _transfer(sent, scale, top)
    found = arrows(slots, ranks)
    for arrow in found if len(found) <= MOST_ARROWS else ():
        x, to_x = scale.x(arrow.sent.end_ns), scale.x(arrow.received_ns)
        y, to_y = (_top(bar, tops) + _LANE / 2 for bar in (arrow.sent, arrow.received))
        direction = arrow.sent.slot.direction
        yield (
            f'<path d="M{x:.1f} {y}L{to_x:.1f} {to_y}" stroke="{_SENT[direction]}" '
            'fill="none" stroke-width="1" opacity=".75" '
            f'marker-end="url(#{direction})"/>'
        )


def _top(bar: Bar, tops: Mapping[str, int]) -> int:
    return tops[f"device:{bar.device} slots"] + _TOPS[bar.slot.direction]


def _slot(bar: Bar, scale: Scale, top: int) -> str:
    x, end = scale.x(bar.start_ns), scale.x(bar.end_ns)
    width = max(0.5, end - x)
    spent_ms = (bar.end_ns - bar.start_ns) / 1e6
    how = "" if bar.work is None else f", virtual stage {bar.work.chunk}"
    said = html.escape(
        f"{bar.name}{how}, tick {bar.slot.tick}, step {bar.step}: {spent_ms:.3f} ms"
    )
    if bar.work is None:
        colour, style, text = "url(#idle)", "slot bubble", "idle"
    else:
        light, dark = _HUES[bar.work.chunk % len(_HUES)]
        is_forward = bar.slot.direction == "forward"
        colour, style = (light, "slot") if is_forward else (dark, "slot bar")
        text = bar.name[1:]
    inside = ""
    if width > _LETTER * len(text):
        middle = (x + end) / 2
        inside = f'<text class="{style}" x="{middle:.1f}" y="{top + 12}">{text}</text>'
    return (
        f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_LANE - 1}" '
        f'fill="{colour}" stroke="#fff" stroke-width=".5"><title>{said}</title></rect>'
        f"{inside}"
    )


def _transfer(sent: Transfer, scale: Scale, top: int) -> str:
    x, end = scale.x(sent.start_ns), scale.x(sent.end_ns)
    spent_ms = (sent.end_ns - sent.start_ns) / 1e6
    said = f"{sent.role}, {sent.direction}, tick {sent.tick}: {spent_ms:.3f} ms"
    colour = _REPLICAS if sent.role == "dp" else _SENT[sent.direction]
    return (
        f'<rect x="{x:.2f}" y="{top}" width="{max(0.5, end - x):.2f}" '
        f'height="{_WIRE - 1}" fill="{colour}" opacity=".8">'
        f"<title>{said}</title></rect>"
    )
