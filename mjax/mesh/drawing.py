"""Drawings of a mesh: a column per pipeline stage, a row per data-parallel position.

Input: a mesh. Output: lines for a terminal, or an SVG image. Each row and column has a
box with the devices of one tensor-parallel group, which communicate most and are
neighbours. Of a large mesh only the first rows and columns are drawn; the number of the
others is given.
"""

import html
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from mjax.mesh.axes import AXES
from mjax.mesh.build import host_of

MAX_ROWS, MAX_STAGES, MAX_TP = 16, 8, 8
"""Maximum numbers of data-parallel positions, of stages, and of devices in a
tensor-parallel group that are drawn."""

_DEVICE, _GAP, _ROW, _LEFT, _TOP = 34, 16, 40, 190, 64
_HUES = ("#2f6db5", "#c0671b", "#2a8a66", "#7a55a3", "#a8403f", "#5d6b1f")
_HUES += ("#2b8091", "#8a4a6e")
"""Colours of hosts, used cyclically."""

_STYLE = """
svg { background: #ffffff; --ink: #1a1a1a; --faint: #6b6b6b; --line: #9aa5b1; }
@media (prefers-color-scheme: dark) {
  svg { background: #14181d; --ink: #e8eaed; --faint: #9aa5b1; --line: #5a6570; }
}
text { fill: var(--ink); } .faint { fill: var(--faint); } .device text { fill: #fff; }
.group { fill: none; stroke: var(--line); }
"""


def text(mesh: Mesh, *, num_columns: int = 100) -> str:
    """Draw a mesh in lines of text.

    Args:
      mesh: made by `build_mesh`.
      num_columns: maximum characters per line, unless a single stage needs more.
    """
    grid = _grid(mesh)
    names, shown = _row_names(mesh), min(grid.shape[2], MAX_TP)
    digits = max(len(str(device.id)) for device in grid.ravel())
    margin = max(map(len, names)) + 2

    def cell(devices: Any) -> str:
        ids = [str(device.id).rjust(digits) for device in devices[:shown]]
        more = ["..."] if len(devices) > shown else []
        return f" {'  '.join([*ids, *more])} ".center(len(f"stage {grid.shape[0]}"))

    inner = len(cell(grid[0, 0]))
    room = max(1, (num_columns - margin + 2) // (inner + 4))
    stages = range(min(grid.shape[0], MAX_STAGES, room))
    titles = "  ".join(f"stage {stage}".center(inner + 2) for stage in stages)
    lines = [*_legend(mesh), "", " " * margin + titles]
    edge = "─" * inner
    for row in range(min(grid.shape[1], MAX_ROWS)):
        cells = "  ".join(f"│{cell(grid[stage, row])}│" for stage in stages)
        lines.append(" " * margin + "  ".join([f"┌{edge}┐"] * len(stages)))
        lines.append(names[row].ljust(margin) + cells)
        lines.append(" " * margin + "  ".join([f"└{edge}┘"] * len(stages)))
    lines += _left_out(grid, len(stages))
    return "\n".join(line.rstrip() for line in lines)


def svg(mesh: Mesh) -> str:
    """Draw a mesh as an SVG image, each host in a colour, for light and dark pages.

    Args:
      mesh: made by `build_mesh`.
    """
    grid = _grid(mesh)
    stages = range(min(grid.shape[0], MAX_STAGES))
    rows = range(min(grid.shape[1], MAX_ROWS))
    shown = min(grid.shape[2], MAX_TP)
    cell = max(shown * _DEVICE, 60) + _GAP
    notes = [*_left_out(grid, len(stages))]
    width = max(_LEFT + cell * len(stages) + 10, 520)
    height = _TOP + _ROW * len(rows) + 34 + 18 * len(notes)
    title, *explained = _legend(mesh)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
        f"width='{width}' height='{height}' role='img' "
        f"aria-label='{html.escape(title, quote=True)}' font-size='12' "
        "font-family='ui-sans-serif, Helvetica, Arial, sans-serif'>",
        f"<style>{_STYLE}</style>",
        f"<text x='10' y='20' font-weight='bold'>{html.escape(title)}</text>",
    ]
    names = _row_names(mesh)
    hosts = list(dict.fromkeys(host_of(device) for device in grid.ravel()))
    for stage in stages:
        x = _LEFT + stage * cell + (cell - _GAP) / 2
        parts.append(f"<text x='{x}' y='{_TOP - 12}' text-anchor='middle'>")
        parts.append(f"stage {stage}</text>")
    for row in rows:
        y = _TOP + row * _ROW
        parts.append(f"<text x='10' y='{y + 21}'>{html.escape(names[row])}</text>")
        for stage in stages:
            devices = grid[stage, row, :shown]
            parts += _group(_LEFT + stage * cell, y, devices, hosts)
    y = _TOP + _ROW * len(rows) + 18
    for line in ["; ".join([*explained, "a color is a host"]), *notes]:
        parts.append(f"<text class='faint' x='10' y='{y}'>{html.escape(line)}</text>")
        y += 18
    return "\n".join([*parts, "</svg>"]) + "\n"


def _group(x: int, y: int, devices: Any, hosts: list[int]) -> Iterator[str]:
    """Yield the SVG elements of a tensor-parallel group: its box and its devices."""
    width = len(devices) * _DEVICE
    yield f"<rect class='group' x='{x - 3}' y='{y}' width='{width + 4}' height='32' "
    yield "rx='5'/>"
    for at, device in enumerate(devices):
        left, host = x + at * _DEVICE, host_of(device)
        fill = _HUES[hosts.index(host) % len(_HUES)]
        yield (
            f"<g class='device'><title>device {device.id}, host {host}, process "
            f"{device.process_index}</title><rect x='{left}' y='{y + 4}' "
            f"width='{_DEVICE - 2}' height='24' rx='3' fill='{fill}'/>"
            f"<text x='{left + _DEVICE / 2 - 1}' y='{y + 20}' text-anchor='middle'>"
            f"{device.id}</text></g>"
        )


def _grid(mesh: Mesh) -> np.ndarray:
    """Return the devices, [stages, data-parallel positions, tp]."""
    grid: np.ndarray = mesh.devices
    return grid.reshape(grid.shape[0], -1, grid.shape[-1])


def _row_names(mesh: Mesh) -> list[str]:
    """Return the name of each data-parallel position, by the axes longer than 1."""
    sizes = mesh.devices.shape[1:-1]
    names = []
    for place in np.ndindex(*sizes):
        parts = [
            f"{axis} {at}"
            for axis, at, size in zip(AXES[1:-1], place, sizes, strict=True)
            if size > 1
        ]
        names.append(", ".join(parts) or "dp 0")
    return names


def _legend(mesh: Mesh) -> Iterator[str]:
    grid = mesh.devices
    long = [f"{axis} {n}" for axis, n in mesh.shape.items() if n > 1]
    hosts = len({host_of(device) for device in grid.ravel()})
    yield (
        f"{' x '.join(long) or 'one device'}: {grid.size} devices on {hosts} "
        f"host{'s' * (hosts > 1)}"
    )
    yield f"a box is a tensor-parallel group of {grid.shape[-1]}"
    yield "a column is a pipeline stage, a row a place along data parallelism"


def _left_out(grid: np.ndarray, num_stages: int) -> Iterator[str]:
    """Yield a line for each kind of part that is not drawn in full.

    The line says how many are left out. The first num_stages stages are drawn.
    """
    for size, most, what in zip(
        grid.shape,
        (num_stages, MAX_ROWS, MAX_TP),
        ("stages", "rows of data parallelism", "devices of each box"),
        strict=True,
    ):
        if size > most:
            yield f"... and {size - most} more {what}"
