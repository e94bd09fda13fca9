"""Read from a scheduled GPU module what runs while a collective is under way.

Enters: the text of a module compiled for GPUs. Leaves, for each computation (a loop's
body is one), its asynchronous collectives with what stands between start and done.

XLA executes the instructions of a computation in the order of its text, compute on one
stream and collectives beside it: what stands between a start and its done may hide the
collective, what follows the done waits for it. The text does not say how long anything
takes.
"""

import dataclasses
import re
from collections.abc import Iterator

from scripts.hlo_text import TRIP_COUNT, split_computations

_KINDS = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
_DONE = re.compile(rf" (?:{_KINDS})-done\(.*?%?(?P<start>[\w.\-]+)\)")
_COLLECTIVE = re.compile(
    rf"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = .* (?P<kind>{_KINDS})(?P<start>-start)?\("
)
_LOOP = re.compile(r" while\(.*body=%?(?P<body>[\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_PRODUCT = re.compile(r" dot\(|custom_call_target=\"__cublas")
_KERNEL = re.compile(r"custom_call_target=\"mosaic_gpu")
_GROUPS = re.compile(r"replica_groups=mesh\[[^\]]*\] \{(?P<axes>[^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(?P<pairs>[\d,{}]*)\}")
_COPY = re.compile(r"= (?P<shape>\w+\[[\d,]*\])\S* copy\(")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective, and what may hide it."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes of its groups; of a permute none, its pairs say more."""
    pairs: tuple[tuple[int, int], ...]
    """Of a permute: (from, to), as numbers of devices in the mesh."""
    is_async: bool
    products: int
    """Matrix products between start and done, those in loops for each turn."""
    kernels: int
    """Pallas kernels between start and done, likewise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Body:
    """A computation that holds collectives."""

    name: str
    collectives: tuple[Collective, ...]
    """In the order of their starts."""
    products: int
    kernels: int
    copies: tuple[str, ...]
    """Shapes of the arrays that are copied as they are."""


def read_bodies(hlo_text: str) -> list[Body]:
    """Read every computation that holds a collective.

    Args:
      hlo_text: of an optimised module, as compiled.as_text() gives it.

    Raises:
      ValueError: the text has no entry, or a start without a done.
    """
    computations, _ = split_computations(hlo_text)
    count = _Count(computations)
    bodies = []
    for name, lines in computations.items():
        found = tuple(_collectives(lines, count))
        if found:
            products, kernels = count.of(lines)
            bodies.append(
                Body(
                    name=name,
                    collectives=found,
                    products=products,
                    kernels=kernels,
                    copies=tuple(m["shape"] for m in map(_COPY.search, lines) if m),
                )
            )
    return bodies


class _Count:
    """Counts matrix products and Pallas kernels, those in inner loops for each turn.

    A conditional counts as nothing: one device in many runs it.
    """

    def __init__(self, computations: dict[str, list[str]]) -> None:
        self.computations = computations

    def of(self, lines: list[str]) -> tuple[int, int]:
        """Count in a run of instructions."""
        found = [self._of_line(line) for line in lines]
        return sum(products for products, _ in found), sum(k for _, k in found)

    def _of_line(self, line: str) -> tuple[int, int]:
        loop = _LOOP.search(line)
        if loop:
            turns = TRIP_COUNT.search(line)
            if turns is None:
                raise ValueError(f"a loop of unknown length: {line.strip()[:200]}")
            products, kernels = self.of(self.computations[loop["body"]])
            return products * int(turns[1]), kernels * int(turns[1])
        called = _CALLED.search(line)
        inside = self.computations.get(called[1], []) if called else []
        is_product = any(_PRODUCT.search(text) for text in [line, *inside])
        return int(is_product), int(_KERNEL.search(line) is not None)


def _collectives(lines: list[str], count: _Count) -> Iterator[Collective]:
    for place, line in enumerate(lines):
        found = _COLLECTIVE.match(line)
        if found is None:
            continue
        between: list[str] = []
        if found["start"]:
            between = lines[place + 1 : _find_done(found["name"], place, lines)]
        groups, pairs = _GROUPS.search(line), _PAIRS.search(line)
        numbers = [int(n) for n in re.findall(r"\d+", pairs["pairs"] if pairs else "")]
        products, kernels = count.of(between)
        yield Collective(
            kind=found["kind"],
            axes=tuple(re.findall(r"'(\w+)'", groups["axes"] if groups else "")),
            pairs=tuple(zip(numbers[::2], numbers[1::2], strict=True)),
            is_async=found["start"] is not None,
            products=products,
            kernels=kernels,
        )


def _find_done(name: str, place: int, lines: list[str]) -> int:
    for later in range(place + 1, len(lines)):
        done = _DONE.search(lines[later])
        if done and done["start"] == name:
            return later
    raise ValueError(f"{name} is started and not awaited in the same computation")
