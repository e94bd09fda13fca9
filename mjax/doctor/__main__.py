"""`python -m mjax.doctor`: check whether a run can start on this host, or on all
hosts."""

import sys

from mjax.doctor.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
