"""Draw schedules as text, as SVG, and as a page with the counts.

Input: a `Schedule`. Output: strings. In each picture each tick is a column, and each
stage has two lines: forward half-ticks above backward half-ticks. A filled half-tick
shows the microbatch and the virtual stage: `3b` is microbatch 3 in the stage's second
virtual stage, `3` if a stage has only one. In an idle half-tick (grey, or a dot in
text) the stage waits while other stages work: the idle half-ticks are the bubble. If no
stage works in a half-tick, it is left out and the tick is shorter.
"""

import colorsys
import html
from collections.abc import Iterator
from typing import Any

from mjax.pipeline.schedule import IDLE, Schedule

_ROW_HEIGHT = 18
_STAGE_GAP = 8
_LEFT = 110
_TOP = 22
_FONT = "font-family='ui-sans-serif, Helvetica, Arial, sans-serif'"

_COLOURS = """
svg { --ink: #16191d; --paper: #ffffff; --line: #5b6570; --idle: #e4e6e9; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e8eaed; --paper: #14181d; --line: #a4afba; --idle: #333b44; }
}
svg { background: var(--paper); } svg rect { stroke: var(--paper); }
svg text { fill: var(--ink); } svg .idle { fill: var(--idle); }
svg .phase { stroke: var(--line); } svg .onforward { fill: #111111; }
svg .onbackward { fill: #ffffff; }
"""
"""Style of the image, alone or in a page, for light and dark colour schemes."""

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 ui-sans-serif, Helvetica, Arial, sans-serif; color: #16191d;
       background: #ffffff; margin: 2em auto; max-width: 1400px; padding: 0 1.5em; }
@media (prefers-color-scheme: dark) {
  body { color: #e8eaed; background: #14181d; }
}
h1 { font-size: 1.3em; }
.picture { overflow-x: auto; }
ul { list-style: none; padding: 0; }
svg { vertical-align: middle; }
th, td { text-align: left; vertical-align: top; padding: 0 1.2em 0 0;
         font-weight: normal; }
td { font-variant-numeric: tabular-nums; }
@page { size: landscape; margin: 1cm; }
@media print { .picture svg { width: 100%; height: auto; } body { margin: 0; } }
"""


def counts(schedule: Schedule) -> dict[str, Any]:
    """Return the counts of a training schedule, ready for JSON."""
    both = zip(schedule.forward_sends, schedule.backward_sends, strict=True)
    return {
        "schedule": schedule.name,
        "stages": schedule.num_stages,
        "chunks": schedule.num_chunks,
        "microbatches": schedule.num_microbatches,
        "ticks": schedule.num_ticks,
        "bubble": schedule.bubble,
        "bubble_formula": _bubble_formula(schedule),
        "bubble_ticks": schedule.bubble_ticks,
        "in_flight": list(schedule.in_flight),
        "sends": [forward + backward for forward, backward in both],
        "stash_slots": schedule.num_stash_slots,
        "gradient_slots": schedule.num_gradient_slots,
        "phases": [
            {
                "start": phase.start,
                "stop": phase.stop,
                "forward": phase.has_forward,
                "backward": phase.has_backward,
            }
            for phase in schedule.phases
        ],
    }


def text(schedule: Schedule, *, num_columns: int = 100) -> str:
    """Draw a schedule in lines of at most num_columns characters.

    Longer lines are wrapped. Capitals name virtual stages in backward half-ticks.
    """
    width = max(1 + _longest_label(schedule), len(str(schedule.num_ticks)))
    margin = len(_margin(schedule.num_stages - 1, "F"))
    per_block = max(1, (num_columns - margin) // width)
    blocks = []
    for start in range(0, schedule.num_ticks, per_block):
        ticks = range(start, min(start + per_block, schedule.num_ticks))
        numbers = (str(tick) if tick % 5 == 0 else "" for tick in ticks)
        lines = ["tick".ljust(margin) + "".join(n.rjust(width) for n in numbers)]
        for stage in range(schedule.num_stages):
            for kind in ("forward", "backward"):
                cells = (_text_cell(schedule, kind, tick, stage) for tick in ticks)
                line = "".join(cell.rjust(width) for cell in cells)
                lines.append(_margin(stage, kind[0].upper()) + line)
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks)


def count_lines(schedule: Schedule) -> list[str]:
    """Format the counts of a training schedule, one line per count: name and value."""
    rows = list(_count_rows(schedule))
    width = 2 + max(len(name) for name, _ in rows)
    return [f"{name:<{width}}{value}" for name, value in rows]


def svg(schedule: Schedule) -> str:
    """Draw a schedule as a self-contained SVG image."""
    cell = _cell_width(schedule)
    width = _LEFT + cell * schedule.num_ticks + 1
    height = _stage_top(schedule.num_stages)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}' role='img' aria-label='{_title(schedule)}' "
        f"{_FONT} font-size='10' text-anchor='middle'>",
        f"<style>{_COLOURS}</style>",
    ]
    for tick in range(0, schedule.num_ticks, 5):
        parts.append(_svg_text(_LEFT + tick * cell + cell // 2, _TOP - 8, str(tick)))
    for phase in schedule.phases[1:]:
        x = _LEFT + phase.start * cell
        parts.append(
            f"<path class='phase' d='M{x} {_TOP - 4}V{height - 2}' "
            "stroke-dasharray='3 3'/>"
        )
    for stage in range(schedule.num_stages):
        top = _stage_top(stage)
        parts.append(_svg_text(26, top + _ROW_HEIGHT + 4, f"stage {stage}"))
        parts.append(_svg_text(80, top + 13, "forward"))
        parts.append(_svg_text(80, top + _ROW_HEIGHT + 13, "backward"))
        for tick in range(schedule.num_ticks):
            parts.extend(_svg_cells(schedule, tick, stage))
    return "\n".join([*parts, "</svg>"]) + "\n"


def page(schedule: Schedule) -> str:
    """Return an HTML page with the picture, a legend of its colours, and the counts.

    The page is self-contained, has no script, and prints in landscape.
    """
    title = _title(schedule)
    legend = "\n".join(f"<li>{item}</li>" for item in _legend(schedule))
    rows = "\n".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in _count_rows(schedule)
    )
    return (
        "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{title}</h1>\n<div class='picture'>\n{svg(schedule)}</div>\n"
        f"<ul>\n{legend}\n</ul>\n<table>\n{rows}\n</table>\n</body>\n</html>\n"
    )


def colours(chunk: int) -> tuple[str, str]:
    """Return the forward and backward colours of a local virtual stage.

    Hues are a golden angle apart, so that any number of them differ. Forward is light
    and backward dark, so that they differ in black and white too.
    """
    hue = (0.58 + 0.381966 * chunk) % 1
    return _hex(hue, lightness=0.82), _hex(hue, lightness=0.27)


def _hex(hue: float, *, lightness: float) -> str:
    parts = colorsys.hls_to_rgb(hue, lightness, 0.67)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def _title(schedule: Schedule) -> str:
    v = schedule.num_chunks
    virtual = f", {v} virtual stages per stage" if v > 1 else ""
    return (
        f"{schedule.name}: {schedule.num_stages} stages{virtual}, "
        f"{schedule.num_microbatches} microbatches"
    )


def _bubble_formula(schedule: Schedule) -> float:
    work = schedule.num_chunks * schedule.num_microbatches
    return (schedule.num_stages - 1) / work


def _count_rows(schedule: Schedule) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each count, formatted for readers."""
    names = {
        (True, False): "forward",
        (True, True): "forward and backward",
        (False, True): "backward",
    }
    phases = ", ".join(
        f"{phase.stop - phase.start} {names[phase.has_forward, phase.has_backward]}"
        for phase in schedule.phases
    )
    yield "ticks", f"{schedule.num_ticks}: {phases}"
    yield "bubble, counted", f"{schedule.bubble:.4f} of the ideal time"
    yield "bubble, (P - 1) / (v M)", f"{_bubble_formula(schedule):.4f}"
    yield "idle half-ticks", f"{schedule.bubble_ticks} of each kind, per stage"
    yield "in flight", f"{_listed(schedule.in_flight)} virtual-stage inputs, by stage"
    yield "sent forward", f"{_listed(schedule.forward_sends)} activations, by stage"
    yield "sent backward", f"{_listed(schedule.backward_sends)} gradients, by stage"
    yield (
        "buffer entries",
        f"{schedule.num_stash_slots} for virtual-stage inputs, "
        f"{schedule.num_gradient_slots} for gradients",
    )


def _listed(values: tuple[int, ...]) -> str:
    return " ".join(map(str, values))


def _letters(chunk: int) -> str:
    """Name a virtual stage: a to z, then aa, ab and so on."""
    before = _letters(chunk // 26 - 1) if chunk >= 26 else ""
    return before + chr(ord("a") + chunk % 26)


def _label(schedule: Schedule, chunk: int, microbatch: int) -> str:
    return f"{microbatch}{_letters(chunk) if schedule.num_chunks > 1 else ''}"


def _longest_label(schedule: Schedule) -> int:
    last = (schedule.num_chunks - 1, schedule.num_microbatches - 1)
    return len(_label(schedule, *last))


def _slot(
    schedule: Schedule, kind: str, tick: int, stage: int
) -> tuple[int, int] | None:
    """Return (virtual stage, microbatch), IDLE, or None if all stages are idle."""
    chunk = getattr(schedule, f"{kind}_chunk")[tick]
    microbatch = getattr(schedule, f"{kind}_microbatch")[tick]
    if (chunk == IDLE).all():
        return None
    return int(chunk[stage]), int(microbatch[stage])


def _margin(stage: int, kind: str) -> str:
    return f"stage {stage:<2}{kind}" if kind == "F" else f"{kind:>9}"


def _text_cell(schedule: Schedule, kind: str, tick: int, stage: int) -> str:
    slot = _slot(schedule, kind, tick, stage)
    if slot is None:
        return ""
    if slot[0] == IDLE:
        return "."
    label = _label(schedule, *slot)
    return label if kind == "forward" else label.upper()


def _cell_width(schedule: Schedule) -> int:
    return 10 + 6 * _longest_label(schedule)


def _stage_top(stage: int) -> int:
    return _TOP + stage * (2 * _ROW_HEIGHT + _STAGE_GAP)


def _svg_text(x: int, y: int, words: str, kind: str = "") -> str:
    style = f" class='on{kind}'" if kind else ""
    return (
        f"<text x='{x}' y='{y}'{style} pointer-events='none'>"
        f"{html.escape(words)}</text>"
    )


def _svg_cells(schedule: Schedule, tick: int, stage: int) -> Iterator[str]:
    """Yield the two half-ticks of a stage in a tick, and their labels."""
    width = _cell_width(schedule)
    x = _LEFT + tick * width
    for row, kind in enumerate(("forward", "backward")):
        slot = _slot(schedule, kind, tick, stage)
        if slot is None:
            continue
        y = _stage_top(stage) + row * _ROW_HEIGHT
        where = f"stage {stage}, tick {tick}, {kind}"
        if slot[0] == IDLE:
            yield _svg_rect(x, y, width, "idle", None, f"{where}: idle")
            continue
        chunk, microbatch = slot
        whole = chunk * schedule.num_stages + stage
        names = (
            f"virtual stage {chunk} (in the model: {whole}), microbatch {microbatch}"
        )
        fill = colours(chunk)[row]
        yield _svg_rect(x, y, width, kind, fill, f"{where}: {names}")
        yield _svg_text(x + width // 2, y + 13, _label(schedule, *slot), kind)


def _svg_rect(
    x: int, y: int, width: int, kind: str, fill: str | None, title: str
) -> str:
    painted = "" if fill is None else f" fill='{fill}'"
    return (
        f"<rect class='{kind}' x='{x}' y='{y}' width='{width}' height='{_ROW_HEIGHT}'"
        f"{painted}><title>{title}</title></rect>"
    )


def _swatch(fill: str | None) -> str:
    painted = "class='idle'" if fill is None else f"fill='{fill}'"
    return (
        f"<svg width='26' height='{_ROW_HEIGHT}'><rect width='24' height='14' y='2' "
        f"{painted}/></svg>"
    )


def _legend(schedule: Schedule) -> Iterator[str]:
    """Yield the meaning of each colour, as HTML."""
    for chunk in range(schedule.num_chunks):
        light, dark = colours(chunk)
        first = chunk * schedule.num_stages
        name = f"{_letters(chunk)}: " if schedule.num_chunks > 1 else ""
        yield (
            f"{_swatch(light)} {_swatch(dark)} {name}forward and backward of virtual "
            f"stage {chunk} of each stage (in the model: {first} to "
            f"{first + schedule.num_stages - 1})"
        )
    yield (
        f"{_swatch(None)} idle: the stage waits while others work. The idle "
        "half-ticks are the bubble."
    )
    yield (
        "Empty: no stage works in this half-tick, and it takes no time. Numbers are "
        "microbatches. Dashed lines separate the phases."
    )
