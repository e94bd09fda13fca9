"""Measure a model on a text: `python -m mjax.evaluate MODEL --data.path P`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mjax.cli import environment, exit_codes, flags
from mjax.evaluate.options import Evaluate

GUIDE = flags.Guide(
    examples=(
        "python -m mjax.evaluate runs/a --data.path text.txt",
        "python -m mjax.evaluate runs/a --held-out --json",
    )
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        flags.check_one_run(words)
        command = flags.read(
            Evaluate, words, prog="python -m mjax.evaluate", guide=GUIDE
        )
        environment.check()
        from mjax.ckpt import places  # imports packages: after the flags are read

        if "://" not in command.model:
            places.check_exists(command.model)
        from mjax.evaluate.command import run  # imports jax: after the model is found

        found = run(command)
        if command.out is not None:
            _write(Path(command.out), found)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_codes.FAILED
    if command.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:16} {value}" for name, value in found.items()))
    return exit_codes.DONE


def _write(path: Path, found: dict[str, Any]) -> None:
    """Write the result to a file atomically."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(found, indent=2) + "\n")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
