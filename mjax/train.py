"""Train a model: `python -m mjax.train --recipe NAME [flags]`.

Input: the command line. Output: a work dir with config.json, tokenizer/,
metrics.jsonl, summary.json, checkpoints/, plots/curves.png, sample.txt, a record of
each start in starts/, and an exit code: 0 done, 2 bad input, 42 preempted and saved, 93
gave up, 130 a second Ctrl-C, 1 anything else. `--work-dir DIR` alone resumes the run in
DIR.

This module reads only the flags, without importing jax, so help and errors appear at
once. Read `main`, then `trainer.run_training`: one run from flags to summary.
"""

if __name__ == "__main__":
    from mjax.processes.progress import show_stacks_on_signal
    from mjax.run import ending

    ending.watch()  # before the slow imports
    show_stacks_on_signal()

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from mjax.cli import environment, exit_codes, flags
from mjax.config.command_line import Command, names_recipe, parse
from mjax.config.train import TrainConfig, from_json, to_json
from mjax.processes import progress
from mjax.processes.config import DistributedConfig, may_have_others
from mjax.recipes import RECIPES
from mjax.run import ending, work_dir
from mjax.run.tracking import names as tracker_names

IMPORTED_LATER = ("mjax.trainer",)
"""Modules that a run imports after it has read its flags. A fork server imports them in
advance."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
      argv: the flags; None uses those of the process.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        marks = progress.from_environment()
        found = _found_config(argv)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    config, command = parse(argv, RECIPES, "python -m mjax.train", base=found)
    try:
        _check_simulated(config, command)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    if command.print_config:
        print(to_json(config), end="")
        return exit_codes.DONE
    environment.check()
    try:
        tracker_names.check(config.track)
        _check_paths(config, command)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    from mjax import trainer  # imports jax: only after the flags are checked

    return trainer.run_training(
        config,
        command,
        argv,
        marks,
        is_resumed=found is not None,
        imported_s=time.perf_counter(),
    )


def _check_simulated(config: TrainConfig, command: Command) -> None:
    """Refuse sizes that do not fit the simulated devices, before the slow imports.

    Only flags give their number; other devices are counted once they have started. As
    for paths, one of several processes decides nothing alone. With --print-config it
    only answers a launcher, which gives it the number of processes.

    Raises:
      ValueError: model, batch or mesh do not fit the devices.
    """
    num_processes = config.distributed.num_processes
    is_unknown = may_have_others(config.distributed, os.environ)
    if command.print_config:
        is_unknown = num_processes is None
    if config.simulate_devices is None or is_unknown:
        return
    from mjax.config.fixes import Devices, sizes_of  # imports numpy

    per_flag = num_processes or 1
    count = config.simulate_devices * per_flag
    sizes_of(config, Devices(count=count, flag="simulate_devices", per_flag=per_flag))


def _check_paths(config: TrainConfig, command: Command) -> None:
    """Refuse wrong paths before the slow imports, in a run of one process.

    A run of several processes checks its paths later (`run.prepare`), because all
    processes must learn of an error in one of them.

    Raises:
      ValueError: a path is absent, or the work dir cannot be written.
    """
    if command.print_mesh or may_have_others(config.distributed, os.environ):
        return
    from mjax.ckpt import places  # imports packages: only after the flags are read
    from mjax.data import corpora

    writes = not (command.dry_run or command.restart_from_scratch)
    if config.work_dir is not None and writes:
        work_dir.check_place(Path(config.work_dir))
    corpora.check_exists(path for paths in config.data.paths for path in paths)
    # A run that has begun has saved what it took from --init-from.
    has_begun = (
        config.work_dir is not None
        and not command.restart_from_scratch
        and work_dir.has_begun(Path(config.work_dir))
    )
    if config.init_from is not None and not has_begun:
        try:
            places.check_exists(config.init_from)
        except ValueError as error:
            raise ValueError(
                f"--init-from {config.init_from} cannot be used: {error}"
            ) from None


def _found_config(argv: Sequence[str]) -> TrainConfig | None:
    """Return the config of the run that `--work-dir DIR` resumes without a recipe."""
    path = flags.given(argv, "--work-dir")
    if not path or flags.given(argv, "--restart-from-scratch") is not None:
        return None
    if names_recipe(argv):
        return None
    found = work_dir.read_config(Path(path))
    if found is None:
        return None
    try:
        config = from_json(json.dumps(found))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"cannot resume from {path}/config.json: {error}; give --recipe and the "
            "flags of that run, or another --work-dir"
        ) from error
    # The addresses of the processes differ between starts, so they are not resumed.
    return dataclasses.replace(config, distributed=DistributedConfig())


if __name__ == "__main__":
    try:
        _exit_code = main()
    except Exception:
        traceback.print_exc()
        _exit_code = exit_codes.FAILED
    ending.leave(_exit_code)
