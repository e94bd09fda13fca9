"""Check that this Python has the packages that mjax needs, before they are imported.

Output: nothing, or one message and the exit code of bad input. A shell whose
environment is not activated is the usual cause.
"""

import importlib.util
import sys
from collections.abc import Sequence

from mjax.cli import exit_codes

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax", "tensorstore", "etils"),
    *("google_crc32c", "jaxtyping", "msgspec", "ml_dtypes", "numpy", "packaging"),
    *("rich", "matplotlib"),
)
"""Import names of the dependencies in pyproject.toml, and of jaxlib."""


def check(packages: Sequence[str] = PACKAGES) -> None:
    """End the program if a package is missing; import none of them.

    Args:
      packages: import names of top-level packages.
    Raises:
      SystemExit: a package is missing; the message names this Python and the remedy.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not missing:
        return
    version = ".".join(map(str, sys.version_info[:3]))
    more = f" and {len(missing) - 1} more packages" if missing[1:] else ""
    print(
        f"error: this Python has no {missing[0]}{more}: {sys.executable} ({version}); "
        "activate the environment of mjax with `source .venv/bin/activate`, or create "
        "it first with `make env`",
        file=sys.stderr,
    )
    raise SystemExit(exit_codes.BAD_INPUT)
