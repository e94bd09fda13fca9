"""Find parameters that never had a gradient, from the optimizer's moments.

Input: the moments of a saved step, in pieces. Output: everything whose gradient was
zero in every step: parameters, single layers of stacked parameters, and slices of
parameters.

The optimizer keeps nu, a decaying mean of the squares of each gradient, which starts at
zero. If the gradient is always zero, nu stays zero. There are two other causes of a
zero nu. First, if a gradient is below about 1e-18, what it adds to nu underflows to
zero in float32; mu, the decaying mean of the gradients themselves, is not zero in that
case. Second, nu decays: after a number of steps that depends on beta2, a gradient
leaves no trace.

Checkpoints store whole tensors, with the layers in model order, on any mesh. So nothing
here depends on dp, tp, pp or ZeRO.

Source of nu: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1; LAMB and AdamW share it.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Shaped

NU, MU = "opt_state.adam.nu.", "opt_state.adam.mu."
_STACKED = "blocks."
"""Prefix of leaves whose first dim is the layer."""
_TINY = float(np.finfo(np.float32).tiny)
"""Floats below this are subnormal: some devices flush them to zero, others do not."""
SMALL_GRADIENT = 1e-6
"""Size of a gradient entry for which the decay time is reported. A typical size."""

type Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dim."""
type Piece = tuple[Box, Shaped[np.ndarray, "..."]]
type Reason = Literal["no gradient", "tiny gradient"]


@runtime_checkable
class Moments(Protocol):
    """Reads the moments of a saved step."""

    def names(self) -> Iterable[str]:
        """Return the names of the leaves."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a leaf."""
        ...

    def pieces(self, name: str) -> Iterable[Piece]:
        """Yield the pieces of a leaf, each with its position."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unused:
    """A parameter, or one layer of a stacked one."""

    name: str
    layer: int | None
    """Index of the layer; None if the parameter is not stacked."""
    shape: tuple[int, ...]
    """Shape of the parameter, without the layer dim."""
    reason: Reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Slices of a parameter along one dim, some of which had no gradient."""

    name: str
    layer: int | None
    """Index of the layer; None if the parameter is not stacked."""
    dim: int
    """Index of that dim; the layer dim does not count."""
    size: int
    """Number of slices along that dim."""
    indexes: tuple[int, ...]
    """Indexes of the slices without a gradient."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Result of the check."""

    num_parameters: int
    """Number of tensors; each layer of a stacked one counts separately."""
    unused: tuple[Unused, ...]
    dead_layers: tuple[int, ...]
    """Layers in which no parameter had a gradient."""
    parts: tuple[Part, ...]


def find_unused(moments: Moments) -> Found:
    """Check all parameters that have moments."""
    unused: list[Unused] = []
    parts: list[Part] = []
    names = sorted(n.removeprefix(NU) for n in moments.names() if n.startswith(NU))
    num, alive = 0, set[int]()
    num_layers = 0
    for name in names:
        is_stacked = name.startswith(_STACKED)
        shape = moments.shape(NU + name)[1 if is_stacked else 0 :]
        squares = _traces(moments, NU + name, is_stacked=is_stacked)
        means = None
        if not squares.layers.all():
            means = _traces(moments, MU + name, is_stacked=is_stacked)
        num += len(squares.layers)
        num_layers = max(num_layers, len(squares.layers) if is_stacked else 0)
        for layer, has in enumerate(squares.layers):
            at = layer if is_stacked else None
            if has or means is None:
                parts += _parts(name, at, [of[layer] for of in squares.slices])
            else:
                reason = "tiny gradient" if means.layers[layer] else "no gradient"
                unused.append(Unused(name=name, layer=at, shape=shape, reason=reason))
            if at is not None and (has or (means is not None and means.layers[layer])):
                alive.add(layer)
    return Found(
        num_parameters=num,
        unused=tuple(unused),
        dead_layers=tuple(n for n in range(num_layers) if n not in alive),
        parts=tuple(parts),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Traces:
    """Where the moments of a parameter are nonzero."""

    layers: Bool[np.ndarray, "L"]
    """Whether any entry of the layer is nonzero; one element if there are no layers."""
    slices: tuple[Bool[np.ndarray, "L _"], ...]
    """For each dim except the layer dim: whether a slice has a nonzero entry."""


def _traces(moments: Moments, name: str, *, is_stacked: bool) -> _Traces:
    """Read a moment piece by piece, in less memory than a whole leaf."""
    shape = moments.shape(name) if is_stacked else (1, *moments.shape(name))
    layers = np.zeros(shape[0], bool)
    slices = [np.zeros((shape[0], size), bool) for size in shape[1:]]
    for place, piece in moments.pieces(name):
        box = place if is_stacked else ((0, 1), *place)
        values = piece if is_stacked else piece[None]
        # NaN counts as nonzero.
        has = ~(np.abs(values.astype(np.float32)) < _TINY)
        own = slice(*box[0])
        layers[own] |= has.any(axis=tuple(range(1, has.ndim)))
        for dim, found in enumerate(slices, start=1):
            others = tuple(d for d in range(1, has.ndim) if d != dim)
            found[own, slice(*box[dim])] |= has.any(axis=others)
    return _Traces(layers=layers, slices=tuple(slices))


def _parts(
    name: str, layer: int | None, slices: Sequence[Bool[np.ndarray, "_"]]
) -> list[Part]:
    """Return a `Part` for each dim with slices that had no gradient.

    Args:
      name: a parameter that had a gradient, in this layer.
      layer: index of the layer; None if the parameter is not stacked.
      slices: for each dim, whether a slice had a gradient.
    """
    return [
        Part(
            name=name,
            layer=layer,
            dim=dim,
            size=len(has),
            indexes=tuple(np.flatnonzero(~has).tolist()),
        )
        for dim, has in enumerate(slices)
        if not has.all()
    ]


def forgotten_after(beta2: float, gradient: float = SMALL_GRADIENT) -> int:
    """Return the number of consecutive zero gradients after which nu is zero again.

    Args:
      beta2: decay of nu, at least 0 and below 1.
      gradient: size of an entry of the last nonzero gradient.
    """
    if beta2 == 0:
        return 1
    first = (1 - beta2) * gradient**2
    return max(1, math.ceil(math.log(_TINY / first) / math.log(beta2)))
