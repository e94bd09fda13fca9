"""Count the FLOPs and the kernels of one run of a program on one device.

Enters: the text of an optimised HLO module (`compiled.as_text()`); unlike `analysis`,
no mesh. Leaves: the FLOPs of its matmuls, where each loop body counts as often
as it runs (XLA's own cost analysis counts it once); or each kernel that is launched on
a GPU, with the bytes of its operands and results: what must cross the memory bus when
no operand is in the cache. If a kernel reads a slice of an operand, or writes an output
in place, only the slice counts.
"""

import dataclasses
import functools

from mjax.plan.hlo.collectives import KINDS
from mjax.plan.hlo.parse import Instruction, Module, parse
from mjax.plan.hlo.walk import Site, trip_count, walk
from mjax.plan.hlo.work import FREE, fused_work, moved_bytes, own_work


def count_dot_flops(hlo_text: str) -> int:
    """Count 2 FLOPs per multiply-add of every matmul that one run executes.

    Of a conditional, the most expensive branch counts. Under SPMD the count is per
    device, as the module is. A loop of unknown length is accepted if it holds no
    product.

    Args:
      hlo_text: an optimised module, as printed by `compiled.as_text()`.
    Returns:
      FLOPs of the entry computation.
    Raises:
      ValueError: the text is no module, or a matmul is in a form that cannot
        be counted: a loop of unknown trip count, a library call, a convolution.
    """
    module = parse(hlo_text)

    @functools.cache
    def flops_from(start: str) -> int:
        return sum(map(_dot_flops, walk(module, follow, start)))

    def follow(x: Instruction) -> tuple[str, ...]:
        return (max(x.branches, key=flops_from),) if x.branches else x.called

    return flops_from(module.entry)


def _dot_flops(site: Site) -> int:
    """Count the FLOPs of an instruction alone, in all its runs."""
    x = site.instruction
    if "fmha" in x.target:  # Attention of cuDNN: products inside a kernel.
        raise ValueError(f"cannot count the matrix product in {x.name}: {x.target}")
    flops = own_work(x, site.computation).flops
    unknown = [loop.name for loop in site.loops if loop.trip_count is None]
    if flops and unknown:
        raise ValueError(f"loop {unknown[0]} holds dots, but its trip count is unknown")
    return flops and flops * site.runs()


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
    """Of the matmuls in one launch."""
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

    def follow(x: Instruction) -> tuple[str, ...]:
        if x.branches:
            raise ValueError(f"cannot count the branches of {x.name}")
        if x.opcode != "while":
            return ()
        trip_count(x)  # Refuses a loop of unknown length, even if it launches nothing.
        return (x.body,)

    return [
        _kernel(site, module)
        for site in walk(module, follow)
        if launches(site.instruction)
    ]


def launches(x: Instruction) -> bool:
    """Say whether a GPU launches a kernel, or a copy, for an instruction."""
    inside = x.opcode in ("while", "conditional")
    return not inside and x.opcode not in FREE and not x.opcode.endswith("-done")


def _kernel(site: Site, module: Module) -> Kernel:
    x, computation = site.instruction, site.computation
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
        runs=site.runs(),
        read_bytes=read,
        written_bytes=written,
        flops=work.flops,
        product_dtype=work.product_dtype,
    )
