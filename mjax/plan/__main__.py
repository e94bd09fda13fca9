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

from mjax.config import Command, TrainConfig, parse_with, to_json
from mjax.mesh.described import NoPluginError
from mjax.plan.advice import advise
from mjax.plan.html import document
from mjax.plan.page import page
from mjax.plan.planning import plan_by_formulas, plan_compiled, traced_bytes
from mjax.plan.result import Plan, as_json
from mjax.plan.topology import Topology, settle
from mjax.recipes import RECIPES

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

    def __post_init__(self) -> None:
        """Refuse a cluster that cannot be, and a file in no folder."""
        _ = self.topology
        if self.html is not None and not Path(self.html).parent.is_dir():
            folder = Path(self.html).parent
            raise ValueError(
                f"--html {self.html}: there is no folder {folder}; make it"
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
    try:
        config, sizes = settle(config, options.topology)
    except ValueError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    arguments = (command.recipe, config, sizes, options.topology)
    try:
        plan = plan_compiled(*arguments, _say)
    except NoPluginError as error:
        why = f"not compiled: {error}; what follows is traced and computed by formulas"
        _say(why)
        plan = plan_by_formulas(*arguments, why)
    _show(advise(plan, lambda other: traced_bytes(other, options.topology)), options)
    return 0


def _show(plan: Plan, options: Options) -> None:
    if options.html is not None:
        Path(options.html).write_text(document(plan), encoding="utf-8")
        _say(f"wrote {options.html}")
    if options.json:
        print(json.dumps(as_json(plan)), flush=True)
    else:
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


def _say(text: str) -> None:
    """Print for people who wait; stdout is for the result."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
