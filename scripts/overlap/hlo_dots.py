"""Count the FLOPs of the matmuls in a compiled program.

    python -c 'import jax; ...; print(f.lower(x).compile().as_text())' > program.txt
    python -m scripts.overlap.hlo_dots program.txt

Prints the FLOPs of one run; each loop body counts as often as it runs.
"""

import sys
from pathlib import Path

from mjax.plan.hlo.counts import count_dot_flops

if __name__ == "__main__":
    print(count_dot_flops(Path(sys.argv[1]).read_text()))
