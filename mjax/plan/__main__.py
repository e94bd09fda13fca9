"""Plan a run without a GPU: `python -m mjax.plan <train's flags> --gpu h200 --nodes 4`.

Input: the flags of a run and its cluster. Output: one page on stdout, or one object
with --json; progress is on stderr. Exit codes: 0 done, whether the run fits or not; 2
bad input, before anything is compiled; 1 anything else.
"""

import sys
from collections.abc import Sequence

from mjax.cli import environment
from mjax.config.command_line import parse_with
from mjax.config.other_names import OTHER_NAMES
from mjax.config.train import to_json
from mjax.plan.options import Options
from mjax.recipes import RECIPES
from mjax.run.ending import is_ours

_EXAMPLES = (
    "{prog} --recipe llama3-8b --gpu h200 --nodes 4",
    "{prog} --recipe gpt-13b --gpu h100 --nodes 8 --search",
)
_MEANINGS = OTHER_NAMES | {
    **dict.fromkeys(("gpus", "num-gpus", "nproc-per-node"), "--gpus-per-node"),
    **dict.fromkeys(("nnodes", "num-nodes", "num-machines"), "--nodes"),
    **dict.fromkeys(("device", "accelerator", "hardware"), "--gpu"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
      argv: the flags; None uses the flags of the process.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    config, command, options = parse_with(
        Options(),
        argv,
        RECIPES,
        "python -m mjax.plan",
        examples=_EXAMPLES,
        meanings=_MEANINGS,
    )
    if command.print_config:
        print(to_json(config), end="")
        return 0
    environment.check()
    from mjax.plan import (
        command as planner,
    )  # imported only after the flags are read, because it imports JAX

    return planner.run(config, command, options, argv, is_ours)


if __name__ == "__main__":
    sys.exit(main())
