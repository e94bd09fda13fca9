"""Compile the step of a run with the importable mjax, and write its module and bytes.

    PYTHONPATH=FOLDER python scripts/plan/compiled_text.py OUT FLAGS...

FLAGS are those of `python -m mjax.plan`. Writes OUT, gzipped JSON: the scheduled module
(`text`), bytes of one device in all (`total_bytes`) and of its stored parameters
(`params_bytes`). Run by its path, so that the package may be of another commit.
"""

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Compile, write, and return the exit code."""
    import jax

    from mjax.config.command_line import parse_with
    from mjax.plan import compile as planner
    from mjax.plan.options import Options
    from mjax.plan.topology import settle
    from mjax.recipes import RECIPES

    jax.config.update("jax_platforms", "cpu")
    # The schedule is the same, in less time: no host code is run.
    planner.OPTIONS["xla_backend_optimization_level"] = 0
    out, *flags = argv
    config, _, options = parse_with(Options(), flags, RECIPES, "compiled_text")
    config, sizes = settle(config, options.topology)
    program, _ = planner.compilable(config, options.topology)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    found = planner.compile_step(program, sizes, options.topology, say)
    written = {
        "text": found.text,
        "total_bytes": found.needed.total_bytes,
        "params_bytes": found.params_bytes,
    }
    partial = Path(f"{out}.partial")
    with gzip.open(partial, "wt", encoding="utf-8") as file:
        json.dump(written, file)
    partial.rename(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
