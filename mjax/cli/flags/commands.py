"""A program with several commands, named by the first word."""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence


def run_command(words: Sequence[str], commands: Mapping[str, str], help: str) -> int:
    """Run the command that the first word names; return its exit code.

    Args:
      words: words of the command line, without the program's name.
      commands: name of each command -> name of its module, which has a function
        `main(argv) -> exit code`. Only the module of the named command is imported.
      help: printed for --help, and after the message for an unknown command.
    Returns:
      The exit code of the command; 2 if no command has this name; 1 if the reader of
      its output has closed the pipe.
    """
    try:
        code = _run_command(words, commands, help)
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run_command(words: Sequence[str], commands: Mapping[str, str], help: str) -> int:
    if words and words[0] in ("-h", "--help"):
        print(help)
        return 0
    if words and words[0] in commands:
        return importlib.import_module(commands[words[0]]).main(words[1:])
    said = f"there is no command {words[0]}" if words else "a command is missing"
    print(f"error: {said}\n\n{help}", file=sys.stderr)
    return 2
