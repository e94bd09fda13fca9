"""Count the arithmetic of the matrix products in a compiled program.

Enters: the text of an optimised HLO module (`compiled.as_text()`). Leaves: the FLOPs
of its products, where each loop body counts as often as it runs. XLA's own cost
analysis counts a loop body once.

    python -c 'import jax; ...; print(f.lower(x).compile().as_text())' > program.txt
    python -m scripts.overlap.hlo_dots program.txt
"""

import functools
import sys
from pathlib import Path

from mjax.plan.hlo.parse import Computation, Instruction, parse
from mjax.plan.hlo.work import own_work


def count_dot_flops(hlo_text: str) -> int:
    """Count 2 FLOPs per multiply-add of every matrix product that one run executes.

    Of a conditional, the most expensive branch counts. Under SPMD the count is per
    device, as the module is. Unlike `mjax.plan.hlo.analysis` it asks for no mesh, and
    accepts a loop of unknown length that holds no product.

    Args:
      hlo_text: an optimised module, as printed by `compiled.as_text()`.

    Returns:
      FLOPs of the entry computation.

    Raises:
      ValueError: the text is no module, or a matrix product is in a form that cannot
        be counted: a loop of unknown trip count, a library call, a convolution.
    """
    module = parse(hlo_text)

    @functools.cache
    def flops_of(name: str) -> int:
        computation = module.computations[name]
        return sum(cost(x, computation) for x in computation.instructions)

    def cost(x: Instruction, computation: Computation) -> int:
        if x.branches:
            return max(flops_of(name) for name in x.branches)
        if "fmha" in x.target:  # Attention of cuDNN: products inside a kernel.
            raise ValueError(f"cannot count the matrix product in {x.name}: {x.target}")
        inside = sum(flops_of(name) for name in x.called)
        if x.opcode != "while" or inside == 0:
            return own_work(x, computation).flops + inside
        if x.trip_count is None:
            raise ValueError(f"loop {x.name} holds dots, but its trip count is unknown")
        return inside * x.trip_count

    return flops_of(module.entry)


if __name__ == "__main__":
    print(count_dot_flops(Path(sys.argv[1]).read_text()))
