"""Plan a run without a GPU: `python -m mjax.plan <train's flags> --gpu h200 --nodes 4`.

Enters: the flags of a run and the cluster that it is for. Leaves: one page on stdout,
or with --json one object; progress is on stderr. Exit codes: 0 done, whether the run
fits or not; 2 bad input, before anything is compiled; 1 anything else.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from mjax.config.command_line import Command, parse_with
from mjax.config.train import TrainConfig, to_json
from mjax.hardware.described import NoPluginError
from mjax.mesh.axes import AxisSizes
from mjax.plan.advice import advise
from mjax.plan.html import document
from mjax.plan.page import page
from mjax.plan.planning import plan_by_formulas, plan_compiled, traced_bytes
from mjax.plan.result import Plan, as_json
from mjax.plan.search import (
    MAX_ROWS,
    SEARCHED,
    Candidate,
    Row,
    compile_best,
    search,
    table,
)
from mjax.plan.search import as_json as row_as_json
from mjax.plan.topology import Topology, check_plannable, settle, with_vocabulary
from mjax.recipes import RECIPES
from mjax.run.ending import is_ours

PROG = "python -m mjax.plan"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What the planner is asked, beside the flags of the run."""

    gpu: str = "h200"
    """GPU of the cluster: a100-80g, h100, h200 or b200."""
    nodes: int = 1
    """Nodes of the cluster; the mesh takes all of it."""
    gpus_per_node: int = 8
    """GPUs of a node."""
    json: bool = False
    """Print one JSON object, and nothing else, on stdout."""
    html: str | None = None
    """File for a page with the schedule drawn."""
    search: bool = False
    """Try meshes, chunks, microbatches and remat under the batch size; rank them."""
    search_compile: int = 3
    """With --search: how many of the best are compiled."""
    search_window: tuple[int, ...] = ()
    """With --search: attention windows to try beside the model's own."""

    def __post_init__(self) -> None:
        """Refuse a cluster that cannot be, and a file in no folder."""
        _ = self.topology
        if self.search_compile < 1:
            raise ValueError(
                f"--search-compile must be at least 1, got {self.search_compile}"
            )
        if any(window < 1 for window in self.search_window):
            raise ValueError(
                "--search-window must be at least 1 (a query sees itself), got "
                f"{' '.join(map(str, self.search_window))}"
            )
        if self.html is not None and not Path(self.html).parent.is_dir():
            folder = Path(self.html).parent
            raise ValueError(
                f"--html {self.html}: there is no folder {folder}; make it"
            )
        if self.html is not None and Path(self.html).is_dir():
            raise ValueError(
                f"--html {self.html} is a folder; name a file, for example "
                f"--html {Path(self.html) / 'plan.html'}"
            )

    @property
    def topology(self) -> Topology:
        """The cluster."""
        return Topology(
            gpu=self.gpu, nodes=self.nodes, gpus_per_node=self.gpus_per_node
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
      argv: the flags; None takes those of the process.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    config, command, options = parse_with(Options(), argv, RECIPES, PROG)
    if command.print_config:
        print(to_json(config), end="")
        return 0
    # Nothing is computed here: a GPU that this machine may have is left alone.
    jax.config.update("jax_platforms", "cpu")
    for line in _without_effect(config, command):
        _say(line)
    if options.search:
        for flag in _overwritten(argv):
            _say(f"no effect on a search, which tries all values: {flag}")
    topology, rows = options.topology, None
    try:
        check_plannable(config, topology)
        if options.search:
            rows, no_compiler = _search(command.recipe, config, options)
            plan = _best(command.recipe, rows, topology, no_compiler)
        else:
            plan = _plan(command.recipe, *settle(config, topology), topology)
    except (ValueError, NotImplementedError) as error:
        if not is_ours(error):
            raise
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    _show(plan, rows, options)
    return 0


def _search(
    recipe: str, config: TrainConfig, options: Options
) -> tuple[list[Row], str]:
    """Rank the layouts that fit; compile the first, or say why none can be.

    Raises:
      ValueError: none fits.
    """
    topology = options.topology
    candidates = search(
        with_vocabulary(config), topology, windows=options.search_window
    )
    if not candidates:
        raise ValueError(
            f"no layout of --batch.size {config.batch.size} over {topology.num_gpus} "
            f"GPUs of --gpu {topology.gpu} fits their memory and divides; give more "
            "--nodes, or a batch that more GPUs divide"
        )
    _say(f"{len(candidates)} meshes fit in closed form; the best are compiled")

    def plan_of(candidate: Candidate) -> Plan:
        _say(candidate.flags)
        return _compiled(recipe, candidate.config, candidate.sizes, topology)

    return compile_best(
        candidates[:MAX_ROWS],
        options.search_compile,
        plan_of=plan_of,
        traced_bytes=lambda candidate: traced_bytes(candidate.config, topology),
        is_ours=is_ours,
    )


def _best(
    recipe: str, rows: Sequence[Row], topology: Topology, no_compiler: str
) -> Plan:
    """Return the plan of the best layout: a compiled one that fits, or by formulas.

    Where all rows were compiled and none fits, the first says so.
    """
    compiled = [row.plan for row in rows if row.plan is not None]
    for plan in compiled:
        if plan.memory.fits:
            return plan
    why = f"not compiled: {no_compiler or 'none of the layouts that were tried could'}"
    if compiled:
        why = f"none of the {len(compiled)} layouts that were compiled fits"
    others = [row.candidate for row in rows if row.plan is None]
    if not others:
        return dataclasses.replace(compiled[0], notes=(*compiled[0].notes, why))
    _say(why)
    return _by_formulas(recipe, others[0].config, others[0].sizes, topology, why)


def _plan(
    recipe: str, config: TrainConfig, sizes: AxisSizes, topology: Topology
) -> Plan:
    """Compile the run and read it, or say how to get a compiler and go by formulas."""
    try:
        return _compiled(recipe, config, sizes, topology)
    except NoPluginError as error:
        why = f"not compiled: {error}"
        _say(why)
        return _by_formulas(recipe, config, sizes, topology, why)


def _compiled(
    recipe: str, config: TrainConfig, sizes: AxisSizes, topology: Topology
) -> Plan:
    plan = plan_compiled(recipe, config, sizes, topology, _say)
    return advise(plan, lambda other: traced_bytes(other, topology))


def _by_formulas(
    recipe: str, config: TrainConfig, sizes: AxisSizes, topology: Topology, why: str
) -> Plan:
    why = f"{why}; what follows is traced and computed by formulas"
    plan = plan_by_formulas(recipe, config, sizes, topology, why)
    return advise(plan, lambda other: traced_bytes(other, topology))


def _show(plan: Plan, rows: Sequence[Row] | None, options: Options) -> None:
    """Print what was asked for; rows are those of a search."""
    if options.html is not None:
        Path(options.html).write_text(document(plan), encoding="utf-8")
        _say(f"wrote {options.html}")
    if options.json:
        found = as_json(plan)
        if rows is not None:
            found["search"] = [row_as_json(row) for row in rows]
        print(json.dumps(found), flush=True)
        return
    if rows is not None:
        print(f"{table(rows)}\nthe best of them:\n")
    print(page(plan), end="", flush=True)


def _without_effect(config: TrainConfig, command: Command) -> list[str]:
    """Name the flags that a plan takes no notice of."""
    given = {
        "--dry-run": command.dry_run,
        "--print-mesh": command.print_mesh,
        "--restart-from-scratch": command.restart_from_scratch,
        "--simulate-devices": config.simulate_devices is not None,
        "--work-dir": config.work_dir is not None,
    }
    return [f"no effect on a plan: {flag}" for flag, is_set in given.items() if is_set]


def _overwritten(argv: Sequence[str]) -> list[str]:
    """Name the flags that were given and that a search sets itself."""
    given = {word.partition("=")[0].replace("_", "-") for word in argv}
    searched = (f"--{field.replace('_', '-')}" for field in SEARCHED)
    return [flag for flag in searched if flag in given]


def _say(text: str) -> None:
    """Print for people who wait; stdout is for the result."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
