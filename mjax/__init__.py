"""Train language models with JAX on GPU meshes.

Start reading at `mjax.train`; the reading tour is in the README.
"""

import time as _time

STARTED_S = _time.perf_counter()
"""When the import of this package began; the origin of start-up times."""

__version__ = "0.1.0"
