"""`python -m mjax.health checks`: list all checks.

python -m mjax.health checks [--markdown]
"""

from collections.abc import Sequence

from mjax.cli.flags.standard import ArgumentParser
from mjax.health.check_command import listed, table


def main(argv: Sequence[str]) -> int:
    """Print the list; return the exit code."""
    parser = ArgumentParser(
        prog="python -m mjax.health checks",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--markdown", action="store_true", help="as a table, for docs")
    print(table() if parser.parse_args(argv).markdown else listed())
    return 0
