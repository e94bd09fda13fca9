r"""Remake the three figures of README.md, and the one of docs/benchmarks/demo.md.

`python -m scripts.readme_figures curves RUN` draws the curves of a finished run of the
demo recipe into docs/figures/demo_curves.png, as the run itself has in plots/.

`python -m scripts.readme_figures mesh` draws the mesh of 8 nodes of 8 H200s into
docs/figures/mesh.svg. The nodes are described, not present; this needs the extra
[plan].

`python -m scripts.readme_figures plan PAGE` shows the schedule of a page of the planner
in Chromium: docs/figures/plan.png. That of README.md is of this plan:

    python -m mjax.plan --recipe megascale-175b --gpu h200 --nodes 32 --html plan.html
"""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

from mjax.cli import flags
from mjax.cli.flags.fields import Positional

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
WIDTH, SHOWN = 1100, 3
"""Width in pixels; number of pictures of the schedule."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curves:
    """Draw the curves of a finished run."""

    run: Annotated[Path, Positional("RUN")]
    """Work dir of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """Draw the mesh of a described cluster."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Take a picture of a page of the planner."""

    page: Annotated[Path, Positional("PAGE")]
    """The file that `python -m mjax.plan --html PAGE` writes."""


def curves(run: Path) -> None:
    """Copy the figure that the run drew at its end.

    Raises:
      ValueError: the run has none.
    """
    drawn = run / "plots" / "curves.png"
    if not drawn.exists():
        raise ValueError(f"{run} has no plots/curves.png; give a run that has ended")
    (FIGURES / "demo_curves.png").write_bytes(drawn.read_bytes())


def mesh() -> None:
    """Draw four stages on 8 nodes, each two tensor-parallel groups."""
    from mjax.hardware.described import described_devices
    from mjax.mesh import drawing
    from mjax.mesh.axes import AxisSizes
    from mjax.mesh.build import build_mesh

    sizes = AxisSizes(pp=4, dp_replicate=1, dp_shard=4, tp=4)
    built = build_mesh(sizes, described_devices(64))
    (FIGURES / "mesh.svg").write_text(drawing.svg(built), encoding="utf-8")


def plan(page: Path) -> None:
    """Show the schedule, from its heading to its first pictures.

    Raises:
      ValueError: there is no such page, or no schedule on it.
    """
    from playwright.sync_api import sync_playwright

    if not page.is_file() or page.read_text().count("class='picture'") < SHOWN:
        raise ValueError(f"{page} is no page of mjax.plan --html with a schedule")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        shown = browser.new_page(viewport={"width": WIDTH, "height": 800})
        shown.goto(page.absolute().as_uri())
        first = shown.locator("h1").nth(1).bounding_box()
        last = shown.locator(".picture").nth(SHOWN - 1).bounding_box()
        assert first is not None
        assert last is not None
        height = last["y"] + last["height"] - first["y"] + 24
        shown.screenshot(
            path=FIGURES / "plan.png",
            full_page=True,
            clip={"x": 0, "y": first["y"] - 12, "width": WIDTH, "height": height},
        )
        browser.close()


def main() -> int:
    """Run one command."""
    try:
        wanted = flags.read(
            Curves | Mesh | Plan, sys.argv[1:], prog="python -m scripts.readme_figures"
        )
        if isinstance(wanted, Curves):
            curves(wanted.run)
        elif isinstance(wanted, Mesh):
            mesh()
        else:
            plan(wanted.page)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
