"""Count the FLOPs and the kernels of one run of a program on one device.

Input: the text of an optimised HLO module (`compiled.as_text()`), but no mesh. Output
of `count_dot_flops`: the FLOPs of its matmuls, counting each loop body as often as it
runs (XLA's own cost analysis counts it once). Output of `kernels`: each kernel that a
GPU launches, with the bytes of its operands and results, which must cross the memory
bus if the cache is empty. If a kernel reads a slice of an operand, or writes an output
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

    For a conditional the most expensive branch counts. Under SPMD the count is per
    device, like the module. A loop of unknown length is accepted if it contains no
    matmul.

    Args:
      hlo_text: an optimised module, as printed by `compiled.as_text()`.
    Returns:
      FLOPs of the entry computation.
    Raises:
      ValueError: the text is not a module, or a matmul cannot be counted: it is in a
        loop of unknown trip count, in a library call, or is a convolution.
    """
    module = parse(hlo_text)

    @functools.cache
    def flops_from(start: str) -> int:
        return sum(map(_dot_flops, walk(module, follow, start)))

    def follow(x: Instruction) -> tuple[str, ...]:
        return (max(x.branches, key=flops_from),) if x.branches else x.called

    return flops_from(module.entry)


def _dot_flops(site: Site) -> int:
    """Count the FLOPs of an instruction in all its executions, without callees."""
    x = site.instruction
    if "fmha" in x.target:  # cuDNN's attention: the matmuls are inside a kernel.
        raise ValueError(f"cannot count the matmul in {x.name}: {x.target}")
    flops = own_work(x, site.computation).flops
    unknown = [loop.name for loop in site.loops if loop.trip_count is None]
    if flops and unknown:
        raise ValueError(
            f"loop {unknown[0]} contains matmuls, but its trip count is unknown"
        )
    return flops and flops * site.runs()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel, launched once or in every iteration of its loop."""

    name: str
    source: str
    """op_name of the kernel's root instruction."""
    kind: str
    """gemm, call, collective, or elementwise (including reductions and copies)."""
    runs: int
    read_bytes: int
    """Bytes that one launch of the kernel reads."""
    written_bytes: int
    """Bytes that one launch of the kernel writes."""
    flops: int
    """FLOPs of the matmuls in one launch."""
    product_dtype: str | None
    """Dtype of the operands of the kernel's matmul, such as bf16; None without a
    matmul."""

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written in all launches."""
        return self.runs * (self.read_bytes + self.written_bytes)


def kernels(hlo_text: str) -> list[Kernel]:
    """List the kernels that one run of a module launches.

    Args:
      hlo_text: an optimised module, as printed by `compiled.as_text()`.
    Raises:
      ValueError: the text is not a module, or it contains a loop of unknown trip count
        or a conditional, whose launches cannot be counted.
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
    """Return whether a GPU launches a kernel or a copy for an instruction."""
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
