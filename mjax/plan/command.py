"""Run `python -m mjax.plan` after its flags are read.

Input: the config of a run and its cluster. Output: one page on stdout, or one object
with --json; progress is on stderr.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from mjax.config.command_line import Command
from mjax.config.train import TrainConfig
from mjax.hardware.described import NoPluginError
from mjax.mesh.axes import AxisSizes
from mjax.plan.advice import advise
from mjax.plan.html import document
from mjax.plan.options import Options, Topology
from mjax.plan.page import page, source_lines
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
from mjax.plan.topology import check_plannable, settle, with_vocabulary


def run(
    config: TrainConfig,
    command: Command,
    options: Options,
    argv: Sequence[str],
    is_ours: Callable[[Exception], bool],
) -> int:
    """Plan the run; return the exit code.

    Args:
      config: config of the run.
      command: options of the command line besides the config.
      options: options of the planner.
      argv: the flags, as typed.
      is_ours: function that returns whether an error was raised by mjax. Such an error
        means bad input.
    """
    # Nothing runs here, so a GPU of this machine stays unused.
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
            rows, no_compiler = _search(command.recipe, config, options, is_ours)
            plan = _best(command.recipe, rows, topology, no_compiler)
        else:
            plan = _plan(command.recipe, *settle(config, topology), topology)
    except (ValueError, NotImplementedError) as error:
        if not is_ours(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    _show(plan, rows, options)
    return 0


def _search(
    recipe: str,
    config: TrainConfig,
    options: Options,
    is_ours: Callable[[Exception], bool],
) -> tuple[list[Row], str]:
    """Rank the layouts that fit and compile the best.

    Returns:
      The rows, and the reason why none could be compiled (empty with a compiler).
    Raises:
      ValueError: no layout fits.
    """
    topology = options.topology
    candidates = search(
        with_vocabulary(config), topology, windows=options.search_window
    )
    if not candidates:
        raise ValueError(
            f"no layout of --batch.size {config.batch.size} over {topology.num_gpus} "
            f"GPUs of --gpu {topology.gpu} divides evenly and fits in memory; give "
            "more --nodes, or a --batch.size that more GPUs divide"
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
    """Return the plan of the best layout.

    This is the first compiled layout that fits. If none fits, it is the first layout
    that was not compiled, planned by formulas; or the first of all, if all were
    compiled.
    """
    compiled = [row.plan for row in rows if row.plan is not None]
    for plan in compiled:
        if plan.memory.fits:
            return plan
    why = f"not compiled: {no_compiler or 'no layout that was tried compiles'}"
    if compiled:
        why = f"none of the {len(compiled)} compiled layouts fits"
    others = [row.candidate for row in rows if row.plan is None]
    if not others:
        return dataclasses.replace(compiled[0], notes=(*compiled[0].notes, why))
    _say(why)
    return _by_formulas(recipe, others[0].config, others[0].sizes, topology, why)


def _plan(
    recipe: str, config: TrainConfig, sizes: AxisSizes, topology: Topology
) -> Plan:
    """Plan a run by compiling it; without a compiler, by formulas, with a note."""
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
    why = f"{why}; memory is from the trace, time from formulas"
    plan = plan_by_formulas(recipe, config, sizes, topology, why)
    return advise(plan, lambda other: traced_bytes(other, topology))


def _show(plan: Plan, rows: Sequence[Row] | None, options: Options) -> None:
    """Print the result in the requested form; `rows` is None without a search."""
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
        print(f"{table(rows)}\nbest layout:\n")
    print(page(plan), end="", flush=True)
    if options.by_source:
        print("\n" + "\n".join(source_lines(plan)), flush=True)


def _without_effect(config: TrainConfig, command: Command) -> list[str]:
    """Return a line for each given flag that a plan ignores."""
    given = {
        "--dry-run": command.dry_run,
        "--print-mesh": command.print_mesh,
        "--restart-from-scratch": command.restart_from_scratch,
        "--simulate-devices": config.simulate_devices is not None,
        "--work-dir": config.work_dir is not None,
    }
    return [f"no effect on a plan: {flag}" for flag, is_set in given.items() if is_set]


def _overwritten(argv: Sequence[str]) -> list[str]:
    """Return the given flags whose values a search chooses itself."""
    given = {word.partition("=")[0].replace("_", "-") for word in argv}
    searched = (f"--{field.replace('_', '-')}" for field in SEARCHED)
    return [flag for flag in searched if flag in given]


def _say(text: str) -> None:
    """Print progress to stderr; stdout is for the result."""
    print(text, file=sys.stderr, flush=True)
