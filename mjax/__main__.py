"""The command `mjax`: `mjax train --steps 5` is `python -m mjax.train --steps 5`.

Enters: the words of a command line; the first names a program of this package. Leaves:
what that program prints, and its exit code; 2 if there is no such program. Nothing but
the named program is imported.
"""

import importlib.metadata
import runpy
import sys
from collections.abc import Sequence

import mjax
from mjax import completion
from mjax.flags import nearest

PROGRAMS = {
    "train": "train a model, or resume a run",
    "generate": "continue texts with a model, chat with it, or serve it",
    "evaluate": "measure loss and bits per byte of a text",
    "tune": "write the low-rank adapters of a run for PEFT",
    "ckpt": "list, verify, move and export saved steps",
    "data": "look at the corpus and the batches of a run",
    "plan": "say whether a run fits a cluster, and how fast it will be",
    "pipeline": "draw the schedule of a pipeline",
    "mesh": "print which device sits where",
    "launch": "start the processes of a run, and replace what fails",
    "observe": "see what the processes of a run did, and when",
    "health": "find hosts that are broken or slow",
    "doctor": "say whether a run can be started here",
}
"""What each program does. `mjax NAME` runs the module `mjax.NAME`."""

_HELP = """usage: mjax PROGRAM [flags]

Train language models with JAX on GPU meshes.

examples:
  mjax train --recipe demo
  mjax generate runs/demo-1 --prompt "def main("

programs:
{programs}
  completion  print what makes the shell complete programs and flags

`mjax PROGRAM -h` lists the flags of a program, `mjax --version` the versions. Every
program can also be started as `python -m mjax.PROGRAM`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program that the first word names; return its exit code.

    Args:
      argv: words, without the name of the command; None takes those of the process.
    Raises:
      SystemExit: the program's own end.
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
    """Say what a first word that names no program should have been."""
    if word.startswith("-"):
        return (
            f"mjax has no flag {word} of its own; name a program first: mjax train "
            f"{word}, or see mjax -h"
        )
    close = nearest(word, [*PROGRAMS, "completion"])
    return f"there is no program {word}; the nearest is {close}; mjax -h lists all"


if __name__ == "__main__":
    sys.exit(main())
