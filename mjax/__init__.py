"""Train language models with JAX on GPU meshes.

Start reading at `mjax.train`; the reading tour is in the README.
"""

import os as _os
import signal as _signal
import sys as _sys
import time as _time

_OLDEST_PYTHON = (3, 12)
# This file has no newer syntax than Python 3.6, so that an older Python gets this far.
if _sys.version_info < _OLDEST_PYTHON:
    _needed, _is = (
        ".".join(map(str, version))
        for version in (_OLDEST_PYTHON, _sys.version_info[:3])
    )
    raise ImportError(
        f"mjax needs Python {_needed} or newer, and this is {_is} ({_sys.executable}); "
        f"`make env` looks for another one, or give it: make env PYTHON=/path/to/python"
    )

STARTED_S = _time.perf_counter()
"""Time at which the import of this package began, the origin of start-up times."""

# Python calls a program `-m` while it imports the packages of `python -m mjax.NAME`. In
# such a program Ctrl-C ends the process at once, see `interrupts`; not in process 1 of
# a container, where the system ignores a signal without a handler.
_is_program = _os.path.basename("".join(_sys.argv[:1])) in ("-m", "mjax")
_is_default = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
if _is_program and _is_default and _os.getpid() != 1:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

__version__ = "0.1.0"
