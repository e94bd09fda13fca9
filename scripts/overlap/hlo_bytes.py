"""Count the kernels of a program compiled for a GPU, and the bytes that they move.

Enters: the text of an optimised HLO module (`compiled.as_text()`). Leaves: each kernel
that one run launches, with the bytes of its operands and results: what must cross the
memory bus when no operand is in the cache. An operand of which a kernel reads a slice,
or an output that is written in place, counts with the slice alone.
"""

import dataclasses

from mjax.plan.hlo.analysis import KINDS
from mjax.plan.hlo.parse import Computation, Instruction, Module, parse
from mjax.plan.hlo.work import FREE, fused_work, moved_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One launch, or as many as its loop has rounds."""

    name: str
    source: str
    """Where it comes from: the op_name of its root."""
    kind: str
    """gemm, call, collective, or elementwise (which reductions and copies are too)."""
    runs: int
    read_bytes: int
    """Of one launch."""
    written_bytes: int
    """Of one launch."""
    flops: int
    """Of the matrix products in one launch."""
    product_dtype: str | None
    """In which the factors meet: bf16, f32; None if there is no product."""

    @property
    def moved_bytes(self) -> int:
        """Bytes of all launches, in and out."""
        return self.runs * (self.read_bytes + self.written_bytes)


def kernels(hlo_text: str) -> list[Kernel]:
    """List the kernels that one run of a module launches.

    Args:
      hlo_text: an optimised module, as printed by `compiled.as_text()`.
    Raises:
      ValueError: the text is no module, or it holds a loop of unknown trip count or a
        conditional, whose launches cannot be counted.
    """
    module = parse(hlo_text)
    found: list[Kernel] = []

    def visit(name: str, runs: int) -> None:
        computation = module.computations[name]
        for x in computation.instructions:
            if x.opcode == "while":
                if x.trip_count is None:
                    raise ValueError(f"the trip count of loop {x.name} is unknown")
                visit(x.attributes["body"].lstrip("%"), runs * x.trip_count)
            elif x.opcode == "conditional":
                raise ValueError(f"cannot count the branches of {x.name}")
            elif x.opcode not in FREE and not x.opcode.endswith("-done"):
                found.append(_kernel(x, computation, module, runs))

    visit(module.entry, 1)
    return found


def _kernel(
    x: Instruction, computation: Computation, module: Module, runs: int
) -> Kernel:
    read, written = moved_bytes(x, computation, module)
    work = fused_work(x, computation, module)
    if x.opcode.removesuffix("-start") in KINDS:
        kind = "collective"
    elif work.products:
        kind = "gemm"
    else:
        kind = "call" if x.opcode == "custom-call" else "elementwise"
    return Kernel(
        name=x.name,
        source=x.op_name,
        kind=kind,
        runs=runs,
        read_bytes=read,
        written_bytes=written,
        flops=work.flops,
        product_dtype=work.product_dtype,
    )
