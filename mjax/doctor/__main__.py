"""`python -m mjax.doctor`: can a run be started on this host, and on all of them?"""

import sys

from mjax.doctor.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
