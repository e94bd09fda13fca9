"""Count the kernels of a compiled step that only change the order of an array.

    python -m scripts.plan.layouts --recipe gpt-125m --model.layers 4

Takes the flags of the trainer, compiles the step for one described H200 (needs the plan
extra) and prints launches and bytes of one step for each kind of kernel. A layout
kernel is a transpose, a copy, or a fusion of nothing but those, views and conversions.
A matmul or a fusion with arithmetic may also change the order; that is not a separate
pass and is not counted.
"""

import collections
import dataclasses
import sys
from collections.abc import Sequence

import jax

from mjax.config import command_line
from mjax.plan.compile import compilable, compile_step
from mjax.plan.hlo.counts import Kernel, kernels
from mjax.plan.hlo.parse import Module, parse
from mjax.plan.options import Topology
from mjax.plan.topology import settle
from mjax.recipes import RECIPES

_MOVES = {"copy", "transpose"}
_FREE = {
    *("bitcast", "constant", "convert", "get-tuple-element", "parameter", "reshape"),
    "tuple",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Kernels of one kind in a step."""

    launches: int = 0
    moved_bytes: int = 0
    """Bytes read and written."""


def count(text: str) -> dict[str, Kind]:
    """Return the kernels of a step by kind.

    Args:
      text: an optimized module, as `compiled.as_text()` gives it.
    Returns:
      `layout`, and the kinds of `mjax.plan.hlo.counts.Kernel` for all others.
    Raises:
      ValueError: the module has a loop of unknown trip count, or a conditional.
    """
    found: dict[str, Kind] = collections.defaultdict(Kind)
    layouts = layout_kernels(text)
    for kernel in kernels(text):
        name = "layout" if kernel in layouts else kernel.kind
        old = found[name]
        found[name] = Kind(
            launches=old.launches + kernel.runs,
            moved_bytes=old.moved_bytes + kernel.moved_bytes,
        )
    return dict(found)


def layout_kernels(text: str) -> list[Kernel]:
    """Return the kernels that only change the order of an array; raises as `count`."""
    names = layout_names(parse(text))
    return [kernel for kernel in kernels(text) if kernel.name in names]


def layout_names(module: Module) -> set[str]:
    """Return the names of the instructions that only change the order of an array."""
    names = set()
    for computation in module.computations.values():
        for x in computation.instructions:
            inside = {x.opcode}
            if x.opcode == "fusion":
                inside = {
                    y.opcode
                    for name in x.called
                    for y in module.computations[name].instructions
                }
            if inside & _MOVES and inside <= _MOVES | _FREE:
                names.add(x.name)
    return names


def main(argv: Sequence[str]) -> int:
    """Compile the step that the flags describe and print its kernels."""
    jax.config.update("jax_platforms", "cpu")
    config, _ = command_line.parse(argv, RECIPES, "python -m scripts.plan.layouts")
    topology = Topology(gpu="h200", nodes=1, gpus_per_node=1)
    config, sizes = settle(config, topology)
    config, notes = compilable(config, topology)
    print(*notes, sep="\n")
    text = compile_step(config, sizes, topology, print).text
    found = count(text)
    total = sum(kind.moved_bytes for kind in found.values())
    for name, kind in sorted(found.items()):
        print(
            f"{name:12}{kind.launches:6} launches{kind.moved_bytes / 1e6:10.1f} MB"
            f"{kind.moved_bytes / total:8.1%}"
        )
    for kernel in layout_kernels(text):
        megabytes = kernel.moved_bytes / 1e6
        print(f"  {kernel.runs} x {kernel.name}: {megabytes:.1f} MB, {kernel.source}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
