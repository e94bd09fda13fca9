"""Low-rank adapters of linear layers: y = x W + scale (x A) B, with W frozen.

A is drawn at random and B starts as zero, so a new adapter has no effect. tp splits A
and B like W: if W reads the residual stream, B has the split outputs; if W adds to it,
A has the split inputs. The joined matmuls of `layers.linear` include one of the two: A
is one more weight of an input projection; B is one more weight of an output projection,
with (part A) as its input.

Source: Hu et al. 2021, arXiv:2106.09685, section 4.1. A is drawn as in PEFT 0.19, from
U(-a, a) with a = 1/sqrt(inputs).
"""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mjax.layers import linear
from mjax.layers.config import AdapterConfig

ADAPTERS = "adapters"
"""Path component that every adapter parameter has, and no other parameter."""


class Adapted(NamedTuple):
    """A frozen weight of this device and its adapter."""

    weight: Float[Array, "..."]
    a: Float[Array, "... r"]
    b: Float[Array, "r ..."]
    scale: float


Weight = Float[Array, "..."] | Adapted
"""A local weight (`linear.InWeight`, `linear.OutWeight`), with or without adapter."""


class Adapter(nnx.Module):
    """A [inputs..., r] and B [r, outputs...] of one linear layer."""

    def __init__(self, weight: nnx.Param, rank: int, *, rngs: nnx.Rngs):
        """Draw A and set B to zeros. Weight decay applies to both.

        Args:
          weight: the weight to adapt. If its last dim is the model's width, that is its
            only output dim; otherwise its first dim is its only input dim.
          rank: r.
          rngs: the stream to draw from.
        """
        logical: tuple[str, ...] = weight.get_metadata()["logical"]
        num_inputs = weight.ndim - 1 if logical[-1] == "embed" else 1
        inputs, outputs = weight.shape[:num_inputs], weight.shape[num_inputs:]
        bound = math.prod(inputs) ** -0.5
        a = jax.random.uniform(
            rngs.params(), (*inputs, rank), jnp.float32, -bound, bound
        )
        b = jnp.zeros((rank, *outputs), jnp.float32)
        dims = (*logical[:num_inputs], "rank"), ("rank", *logical[num_inputs:])
        self.a = nnx.Param(a, logical=dims[0], decay=True)
        self.b = nnx.Param(b, logical=dims[1], decay=True)


class Adapters(nnx.Module):
    """The adapters of one part of a block; attribute names are weight names."""

    def __init__(
        self, config: AdapterConfig, part: str, module: nnx.Module, *, rngs: nnx.Rngs
    ):
        """Create the adapters of the weights of `module` that the config names.

        Args:
          config: names of the weights, and the rank.
          part: name of the module in its block.
          module: the module that has the weights.
          rngs: the stream to draw from.
        """
        self.scale = config.scale
        for name in _names(config, part):
            adapter = Adapter(getattr(module, name), config.rank, rngs=rngs)
            setattr(self, name, adapter)

    def beside(
        self, name: str, weight: Any, local: Callable[[jax.Array], jax.Array]
    ) -> Weight:
        """Return a weight with its adapter, or the weight alone if it has none."""
        adapter: Adapter | None = getattr(self, name, None)
        if adapter is None:
            return weight
        return Adapted(weight, adapter.a[...], local(adapter.b[...]), self.scale)


def make_adapters(
    config: AdapterConfig | None, part: str, module: nnx.Module, rngs: nnx.Rngs
) -> Adapters | None:
    """Create the adapters of a part of a block; return None if the config has none."""
    if config is None or not _names(config, part):
        return None
    # Adapters use a separate stream, so they do not change the values of other weights.
    key = jax.random.fold_in(rngs.params.key[...], zlib.crc32(part.encode()))
    own = nnx.Rngs(params=key)
    return Adapters(config, part, module, rngs=own)


def _names(config: AdapterConfig, part: str) -> list[str]:
    """Return the names of the weights that have an adapter in a part of a block."""
    prefix = f"{part}."
    return [t.removeprefix(prefix) for t in config.targets if t.startswith(prefix)]


def adapted(
    adapters: Adapters | None,
    name: str,
    weight: Any,
    local: Callable[[jax.Array], jax.Array] = lambda w: w,
) -> Weight:
    """Return this device's part of a weight, with its adapter if it has one.

    Args:
      adapters: adapters of the module, or None.
      name: name of the weight.
      weight: value of the weight.
      local: function that selects this device's outputs if the weight has more.
    """
    weight = local(weight)
    return weight if adapters is None else adapters.beside(name, weight, local)


def column_parallel(
    x: Float[Array, "B t D"],
    weights: Sequence[Weight],
    num_chunks: int,
    *,
    apart: bool = False,
    in_fp8: bool = False,
) -> list[Float[Array, "n B s _"]]:
    """Project like `linear.column_parallel`, each weight with its adapter.

    Args:
      x: the device's part of the sequence.
      weights: local, [D, ...] each; joined here.
      num_chunks: as in `linear.column_parallel`.
      apart: use one matmul per weight, in one chunk, as
        `linear.column_parallel_apart` does.
      in_fp8: as in `linear.column_parallel`; not with adapters, nor with `apart`.
    """
    found = [w for w in weights if isinstance(w, Adapted)]
    assert not (in_fp8 and (found or apart))
    plain = [w.weight if isinstance(w, Adapted) else w for w in weights]
    every = [*plain, *(w.a for w in found)]
    if apart:
        assert num_chunks == 1
        outputs = linear.column_parallel_apart(x, every)
    else:
        widths = [math.prod(w.shape[1:]) for w in every]
        outputs = linear.column_parallel(
            x,
            linear.join_columns(every),
            widths,
            num_chunks,
            num_frozen=sum(widths[: len(plain)]) if found else 0,
            in_fp8=in_fp8,
        )
    reduced = iter(outputs[len(plain) :])
    return [
        y + _times(next(reduced), w) if isinstance(w, Adapted) else y
        for y, w in zip(outputs[: len(plain)], weights, strict=True)
    ]


def row_parallel(
    parts: Sequence[Float[Array, "n B s _"]],
    weights: Sequence[Weight],
    num_chunks: int,
    *,
    apart: bool = False,
    in_fp8: bool = False,
) -> Float[Array, "B t D"]:
    """Project back like `linear.row_parallel`, each weight with its adapter.

    Args:
      parts: inputs of the weights.
      weights: local, [..., D] each; joined here.
      num_chunks: as in `linear.row_parallel`.
      apart: as in `column_parallel`.
      in_fp8: as in `column_parallel`.
    """
    plain = [w.weight if isinstance(w, Adapted) else w for w in weights]
    found = [
        (part, w)
        for part, w in zip(parts, weights, strict=True)
        if isinstance(w, Adapted)
    ]
    assert not (in_fp8 and (found or apart))
    reduced = [
        w.scale * jnp.einsum("nbsf,fr->nbsr", part, w.a.reshape(-1, w.a.shape[-1]))
        for part, w in found
    ]
    inputs, every = [*parts, *reduced], [*plain, *(w.b for _, w in found)]
    if apart:
        assert num_chunks == 1
        return linear.row_parallel_apart(inputs, every)
    num_frozen = sum(part.shape[3] for part in parts) if found else 0
    return linear.row_parallel(
        inputs,
        linear.join_rows(every),
        num_chunks,
        num_frozen=num_frozen,
        in_fp8=in_fp8,
    )


def _times(reduced: Float[Array, "n B s r"], w: Adapted) -> Float[Array, "n B s _"]:
    b = w.b.reshape(w.b.shape[0], -1)
    return w.scale * jnp.einsum("nbsr,rf->nbsf", reduced, b)
