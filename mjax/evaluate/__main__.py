"""Measure a model on a text: `python -m mjax.evaluate MODEL --data.path P`."""

import sys

from mjax.evaluate.command import main

if __name__ == "__main__":
    sys.exit(main())
