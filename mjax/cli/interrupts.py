"""What Ctrl-C does to the programs of this package.

Input: SIGINT. Output: the end of the process, which a shell reports as exit code 130.

Python turns SIGINT into an exception in the main thread. Libraries that catch all
exceptions lose it, and native code delays it. So `mjax/__init__.py` gives a program the
default action of the system, which ends the process wherever it is. Only code that must
clean up after itself asks for the exception (`raised`). `mjax.train` has its own rules,
in `run.ending`.
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator

from mjax.cli import exit_codes


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt inside a with statement, in the main thread.

    Handlers of code that only imports mjax stay as they are.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def with_cleanup(main: Callable[[], int]) -> int:
    """Run a program that cleans up after KeyboardInterrupt; return its exit code.

    Args:
      main: the program; returns its exit code.
    """
    try:
        with raised():
            return main()
    except KeyboardInterrupt:
        return told()


def told() -> int:
    """Say that Ctrl-C has ended the program; return the exit code."""
    print("interrupted", file=sys.stderr)
    return exit_codes.INTERRUPTED
