"""The command `mjax`: `mjax train --steps 5` is `python -m mjax.train --steps 5`.

Input: the words of a command line; the first names a program of this package. Output:
the output of that program and its exit code; 2 if there is no such program. Only the
named program is imported.
"""

import importlib.metadata
import runpy
import sys
from collections.abc import Sequence

import mjax
from mjax.cli import completion
from mjax.cli.flags import nearest

PROGRAMS = {
    "train": "train a model, or resume a run",
    "generate": "generate text with a model, chat with it, or serve it",
    "evaluate": "measure loss and bits per byte of a text",
    "tune": "write the low-rank adapters of a run for PEFT",
    "ckpt": "list, verify, move and export checkpoints",
    "data": "inspect the corpus and the batches of a run",
    "plan": "check whether a run fits a cluster, and model its speed",
    "pipeline": "draw the schedule of a pipeline",
    "mesh": "print the position of each device in the mesh",
    "launch": "start the processes of a run, and restart or replace failed ones",
    "observe": "show what the processes of a run did, and when",
    "health": "find broken and slow hosts",
    "doctor": "check whether a run can start here",
}
"""Programs and their descriptions. `mjax NAME` runs the module `mjax.NAME`."""

_HELP = """usage: mjax PROGRAM [flags]

Train language models with JAX on GPU meshes.

examples:
  mjax train --recipe demo
  mjax generate runs/demo-1 --prompt "def main("

programs:
{programs}
  completion  print the shell script that completes programs and flags

`mjax PROGRAM -h` lists the flags of a program, `mjax --version` the versions. Every
program can also be started as `python -m mjax.PROGRAM`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program that the first word names; return its exit code.

    Args:
      argv: words after the name of the command; None uses those of the process.
    Raises:
      SystemExit: the program exits.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    first = words[0] if words else "-h"
    if first in ("-h", "--help", "help"):
        lines = [f"  {name:<10}  {does}" for name, does in PROGRAMS.items()]
        print(_HELP.format(programs="\n".join(lines)))
        # Without a program, nothing was done.
        return 0 if words else 2
    if first in ("-V", "--version", "version"):
        print(f"mjax {mjax.__version__} (jax {importlib.metadata.version('jax')})")
        return 0
    if first == "completion":
        return completion.main(words[1:], PROGRAMS)
    if first not in PROGRAMS:
        print(f"error: {_unknown(first)}", file=sys.stderr)
        return 2
    sys.argv = [f"mjax {first}", *words[1:]]
    runpy.run_module(f"mjax.{first}", run_name="__main__", alter_sys=True)
    return 0


def _unknown(word: str) -> str:
    """Return the error for an unknown program, with a suggestion."""
    if word.startswith("-"):
        return (
            f"{word} is a flag of a program; name the program first: mjax train "
            f"{word}, or see mjax -h"
        )
    close = nearest(word, [*PROGRAMS, "completion"])
    return f"there is no program {word}; the nearest is {close}; mjax -h lists all"


if __name__ == "__main__":
    sys.exit(main())
