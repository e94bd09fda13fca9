"""`python -m mjax.doctor`: check whether a run can start on this host, or on all
hosts."""

if __name__ == "__main__":
    from mjax.cli import environment

    environment.check(["packaging"])  # before the imports of packages

import sys

from mjax.cli import interrupts
from mjax.doctor.command import main

if __name__ == "__main__":
    sys.exit(interrupts.with_cleanup(lambda: main(sys.argv[1:])))
