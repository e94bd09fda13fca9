"""Count the work of one instruction: FLOPs, bytes read and written.

Input: an instruction of a parsed module. Output: counts for one execution on one
device. Bytes are those of operands and results, which must cross the memory bus if the
cache is empty. If a kernel reads a slice of an operand, only the slice counts; if it
writes a result in place, only the new part counts.
"""

import dataclasses
import json
import math
import re

from mjax.plan.hlo.parse import (
    Array,
    Computation,
    Instruction,
    Module,
    arrays,
    num_bytes,
)

FREE = frozenset(
    {
        *("parameter", "constant", "bitcast", "tuple", "get-tuple-element"),
        *("after-all", "partition-id", "replica-id", "opt-barrier", "add-dependency"),
        # The `-done` half of asynchronous ops; the `-start` half launches the work.
        *("async-update", "async-done", "fusion-done", "custom-call-done"),
        *("call-done", "copy-done"),
    }
)
"""Opcodes for which a GPU launches nothing."""

CUBLAS = "__cublas"
"""Prefix of the targets of custom calls that are matmuls."""

ALLOCATE = "AllocateBuffer"
"""Target of a custom call that makes an array without writing it."""

KERNELS = ("mosaic_gpu", "__gpu$xla.gpu.triton", "__cudnn")
"""Prefixes of the targets of custom calls that are Pallas or cuDNN kernels."""

_VIEWS = {"bitcast", "reshape", "get-tuple-element", "copy", "convert", "transpose"}
_SLICES = {"dynamic-slice", "slice", "gather"}
# Targets of calls with a matmul whose sizes the text does not give.
_HIDDEN = re.compile(r"matmul|gemm|\bdot\b|conv", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one execution of an instruction."""

    flops: int = 0
    """Two per multiply-add of a matmul; other arithmetic is not counted."""
    products: int = 0
    """Number of matmuls."""
    kernels: int = 0
    """Number of calls of `KERNELS`, whose FLOPs are not in the text."""
    product_dtype: str | None = None
    """Dtype of the operands of the matmuls; None if there is no matmul."""

    def __add__(self, other: "Work") -> "Work":
        return Work(
            flops=self.flops + other.flops,
            products=self.products + other.products,
            kernels=self.kernels + other.kernels,
            product_dtype=self.product_dtype or other.product_dtype,
        )

    def times(self, runs: int) -> "Work":
        """Return the work of several executions."""
        return dataclasses.replace(
            self,
            flops=runs * self.flops,
            products=runs * self.products,
            kernels=runs * self.kernels,
        )


def is_stamp(x: Instruction) -> bool:
    """Return whether a kernel only writes the time; see `mjax.kernels.stamp`."""
    return "stamp" in x.op_name.split("/")


def own_work(x: Instruction, computation: Computation) -> Work:
    """Count the work of an instruction without the computations that it calls.

    Raises:
      ValueError: the instruction is a matmul in a form that cannot be counted.
    """
    if x.opcode == "dot":
        contracted = x.attributes.get("lhs_contracting_dims", "").strip("{}")
        return _product(x, computation, [int(n) for n in contracted.split(",") if n])
    is_call = x.opcode in ("custom-call", "custom-call-start")
    if is_call and x.target.startswith(CUBLAS):
        config = json.loads(x.attributes.get("backend_config", "{}"))
        numbers = config.get("gemm_backend_config", {}).get("dot_dimension_numbers", {})
        contracted = numbers.get("lhs_contracting_dimensions")
        if contracted is None:
            raise ValueError(f"the contracted dims of {x.name} are not given")
        return _product(x, computation, [int(n) for n in contracted])
    if x.opcode in ("convolution", "ragged-dot", "triangular-solve") or (
        is_call and _HIDDEN.search(x.target)
    ):
        raise ValueError(f"cannot count the matmul in {x.name}: {x.opcode} {x.target}")
    # Other calls (a sort, a callback to the host) have negligible arithmetic.
    is_kernel = is_call and x.target.startswith(KERNELS) and not is_stamp(x)
    return Work(kernels=int(is_kernel))


def _product(x: Instruction, computation: Computation, contracted: list[int]) -> Work:
    lhs = computation.by_name[x.operands[0]].array
    if not all(0 <= dim < len(lhs.dims) for dim in contracted):
        raise ValueError(f"{x.name} contracts dims {contracted} of {lhs.dims}")
    depth = math.prod(lhs.dims[dim] for dim in contracted)
    # Result of a cuBLAS call: (result, workspace), or (result, second result,
    # workspace).
    result = arrays(x.result)[0]
    return Work(
        flops=2 * result.size * depth,
        products=1,
        product_dtype=lhs.dtype,
    )


def fused_work(x: Instruction, computation: Computation, module: Module) -> Work:
    """Count the work of an instruction and of the computations that it calls.

    Loops and conditionals are not followed; `analysis` follows them and counts how
    often they run.

    Raises:
      ValueError: a matmul is in a form that cannot be counted.
    """
    total = own_work(x, computation)
    for name in x.called:
        inside = module.computations[name]
        for y in inside.instructions:
            total += fused_work(y, inside, module)
    return total


def moved_bytes(
    x: Instruction, computation: Computation, module: Module
) -> tuple[int, int]:
    """Count the bytes that an instruction reads and writes.

    Args:
      x: the instruction; not a loop, a conditional or a collective.
      computation: the computation that contains x.
      module: the module that contains the computation.
    Returns:
      Bytes read, bytes written.
    """
    operands = [num_bytes(y.shape) for y in computation.operands(x)]
    if x.opcode.startswith("fusion"):
        inside = module.computations[x.called[0]]
        return _reads(inside, operands), _written(inside.root, inside)
    opcode = x.opcode.removesuffix("-start")
    written = num_bytes(x.result)
    if opcode in _SLICES:
        return written, written
    if opcode == "dynamic-update-slice":
        return operands[1], operands[1]
    if opcode == "custom-call":
        return sum(operands), _call_results(x)
    return sum(operands), written


def host_copy_bytes(x: Instruction, computation: Computation, module: Module) -> int:
    """Count the bytes that an instruction copies between GPU and host memory.

    Args:
      x: the instruction; not a loop, a conditional or a collective.
      computation: the computation that contains x.
      module: the module that contains the computation.
    Returns:
      Bytes copied; 0 if no operand or result is in host memory.
    """
    shapes = (x.result, *(y.shape for y in computation.operands(x)))
    if not any(a.is_on_host for shape in shapes for a in arrays(shape)):
        return 0
    return max(moved_bytes(x, computation, module))


def _call_results(x: Instruction) -> int:
    """Count the bytes that a call writes, without the workspace of cuBLAS (s8)."""
    results = arrays(x.result)
    if x.target.startswith(CUBLAS) and len(results) > 1 and results[-1].dtype == "s8":
        results = results[:-1]
    return sum(array.num_bytes for array in results)


def _reads(inside: Computation, full: list[int]) -> int:
    """Count the bytes that a fusion reads from its operands, whole or in slices."""
    users: dict[str, list[Instruction]] = {}
    for x in inside.instructions:
        for name in x.operands:
            users.setdefault(name, []).append(x)

    def looked_at(name: str) -> int | None:
        """Count the entries of a value that its users read; None means all."""
        total = 0
        for user in users.get(name, []):
            if user.opcode in _SLICES and user.operands[0] == name:
                total += user.array.size
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                continue
            elif user.opcode in _VIEWS and not user.is_root:
                inner = looked_at(user.name)
                if inner is None:
                    return None
                total += inner
            else:
                return None
        return total

    total = 0
    for x in inside.instructions:
        if x.opcode == "parameter":
            whole, entries = full[int(x.literal)], looked_at(x.name)
            if entries is not None and isinstance(x.shape, Array):
                whole = min(whole, Array(x.shape.dtype, (entries,)).num_bytes)
            total += whole
    return total


def _written(x: Instruction, inside: Computation) -> int:
    """Count the bytes that a fusion writes for its root, or for a part of the root."""
    operands = inside.operands(x)
    if x.opcode == "tuple":
        return sum(_written(y, inside) for y in operands)
    if x.opcode == "dynamic-update-slice":
        return num_bytes(operands[1].shape)
    if x.opcode == "get-tuple-element" and operands[0].target.startswith(CUBLAS):
        results = arrays(operands[0].shape)
        is_workspace = int(x.attributes["index"]) == len(results) - 1 > 0
        return 0 if is_workspace else num_bytes(x.shape)
    if x.opcode == "custom-call":
        return _call_results(x)
    if x.opcode in _VIEWS and operands[0].opcode == "dynamic-update-slice":
        return num_bytes(inside.operands(operands[0])[1].shape)
    return num_bytes(x.shape)
