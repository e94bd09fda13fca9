"""Train language models with JAX on GPU meshes.

Start reading at `mjax.train`; the reading tour is in the README.
"""

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

__version__ = "0.1.0"
