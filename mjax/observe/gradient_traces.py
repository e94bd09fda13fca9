"""Which parameters never had a gradient, as the optimizer's moments tell it.

Enters: the moments of a saved step, in pieces. Leaves: the parameters, and the layers
of stacked ones, whose gradient was zero in every step, and slices of parameters of
which that is true.

The optimizer keeps a decaying mean of each squared gradient, nu, which starts at zero.
It stays zero if the gradient is always zero, and only then, with two exceptions. The
square of a gradient below about 1e-18 is zero in float32: the mean of the gradients
themselves, mu, is not, and tells the two apart. And a mean forgets: how fast is
computed from beta2. Checkpoints hold layers in their order and whole tensors, whatever
the mesh of the run was, so nothing here depends on dp, tp, pp or ZeRO.

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
"""Leaves with this prefix have a first dim of layers."""
_TINY = float(np.finfo(np.float32).tiny)
"""Below it a float is subnormal: some devices keep what decays there, others do not."""
SMALL_GRADIENT = 1e-6
"""Of which it is said when it is forgotten. Chosen: an entry of a usual gradient."""

type Box = tuple[tuple[int, int], ...]
"""(start, stop) in every dim."""
type Piece = tuple[Box, Shaped[np.ndarray, "..."]]
type Reason = Literal["no gradient", "tiny gradient"]


@runtime_checkable
class Moments(Protocol):
    """What is read of a saved step."""

    def names(self) -> Iterable[str]:
        """Return the names of the leaves."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a leaf."""
        ...

    def pieces(self, name: str) -> Iterable[Piece]:
        """Yield the pieces of a leaf, each with its place."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unused:
    """A parameter, or one layer of a stacked one."""

    name: str
    layer: int | None
    """From 0; None: the parameter belongs to no layer."""
    shape: tuple[int, ...]
    """Of a layer, if there are layers."""
    reason: Reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Slices of a parameter along one dim, of which some had no gradient."""

    name: str
    layer: int | None
    dim: int
    """Of the parameter, or of a layer of it."""
    size: int
    indexes: tuple[int, ...]
    """Of the slices without a gradient."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What the moments say."""

    num_parameters: int
    """Tensors, each layer of a stacked one counted."""
    unused: tuple[Unused, ...]
    dead_layers: tuple[int, ...]
    """Layers of which no parameter had a gradient."""
    parts: tuple[Part, ...]


def find_unused(moments: Moments) -> Found:
    """Look at all parameters that have moments."""
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
    """Where a moment is not zero."""

    layers: Bool[np.ndarray, "L"]
    """Anywhere in the layer; one entry if there are no layers."""
    slices: tuple[Bool[np.ndarray, "L _"], ...]
    """By dim, without that of the layers: anywhere in the slice."""


def _traces(moments: Moments, name: str, *, is_stacked: bool) -> _Traces:
    """Read a moment, piece by piece: nothing of the size of a leaf is kept."""
    shape = moments.shape(name) if is_stacked else (1, *moments.shape(name))
    layers = np.zeros(shape[0], bool)
    slices = [np.zeros((shape[0], size), bool) for size in shape[1:]]
    for place, piece in moments.pieces(name):
        box = place if is_stacked else ((0, 1), *place)
        values = piece if is_stacked else piece[None]
        # NaN is no zero.
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
    """Return the slices of a used parameter that had no gradient, by dim."""
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
    """Return after how many zero gradients nu has forgotten one that was not.

    Args:
      beta2: decay of nu, at least 0 and below 1.
      gradient: the one that was not zero, in an entry.
    """
    if beta2 == 0:
        return 1
    first = (1 - beta2) * gradient**2
    return max(1, math.ceil(math.log(_TINY / first) / math.log(beta2)))
