"""Compute the log-probability of each target, and the model's most probable token.

Input: parameters in canonical form on a mesh, and windows. Output: for each window, in
order, nats of every target and the most probable token. The forward pass is that of
training: one `jax.shard_map` over all mesh axes, with the vocabulary split over tp and,
between the layers, the sequence too. At most one chunk of positions has logits at a
time.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int, Int32

from mjax.data.samples import NO_TARGET
from mjax.evaluate.windows import Packed, Window, pack
from mjax.mesh import collectives
from mjax.mesh.axes import DP, PP, TP
from mjax.mesh.ordering import in_order
from mjax.mesh.rules import BATCH_SPEC
from mjax.model.config import ModelConfig
from mjax.model.transformer import Params, Transformer, abstract_params

_CHUNK_BYTES = 1 << 26
"""Bytes of float32 logits of a chunk per device; several are alive at once. Not
measured."""
_IN_FLIGHT = 2
"""Batches in flight. Two overlap the preparation of a batch with compute; more would
need more memory, and queued programs starve simulated devices (see `run.sampling`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of one window."""

    nll: Float32[np.ndarray, "n"]
    """Nats of each target; 0 without a target."""
    best: Int32[np.ndarray, "n"]
    """The most probable token after each position; the lowest id if several are."""

    @property
    def total(self) -> float:
        """Nats of all targets, summed in float64."""
        return float(self.nll.sum(dtype=np.float64))


class Scorer:
    """A model that is ready to score windows."""

    def __init__(
        self,
        model: ModelConfig,
        params: Params,
        mesh: Mesh,
        *,
        row_len: int,
        num_rows: int,
    ) -> None:
        """Prepare a program for one shape, compiled at the first batch.

        Args:
          model: the architecture.
          params: parameters in canonical form and compute dtype, on the mesh.
          mesh: mesh with all axes, pp of size 1.
          row_len: T, a multiple of tp.
          num_rows: B, a multiple of dp.
        Raises:
          ValueError: the shape or the mesh does not fit.
        """
        num_dp = math.prod(mesh.shape[axis] for axis in DP)
        if mesh.shape[PP] != 1:
            raise ValueError(
                f"--mesh.pp must be 1 to evaluate, got {mesh.shape[PP]}; use "
                "--mesh.tp or --mesh.dp"
            )
        if row_len % mesh.shape[TP]:
            raise ValueError(
                f"rows must be a multiple of --mesh.tp {mesh.shape[TP]}, got {row_len}"
            )
        if num_rows % num_dp:
            raise ValueError(
                f"--batch-size must be a multiple of the data-parallel size {num_dp}, "
                f"got {num_rows}"
            )
        self.row_len, self.num_rows = row_len, num_rows
        self._params = params
        self._sharding = NamedSharding(mesh, BATCH_SPEC)
        self._score = jax.jit(_score_function(model, params, mesh))

    def __call__(self, windows: Iterable[Window]) -> Iterator[Scores]:
        """Yield the scores of each window, in the order of the windows."""
        running: collections.deque[tuple[Packed, Any]] = collections.deque()
        for batch in pack(windows, num_rows=self.num_rows, row_len=self.row_len):
            while len(running) >= _IN_FLIGHT:
                yield from _unpack(*running.popleft())
            running.append((batch, self._score(self._params, self._place(batch))))
        for batch, result in running:
            yield from _unpack(batch, result)

    def _place(self, batch: Packed) -> dict[str, jax.Array]:
        return {
            name: jax.device_put(array, self._sharding)
            for name, array in batch.arrays.items()
        }


def _unpack(batch: Packed, result: tuple[jax.Array, jax.Array]) -> Iterator[Scores]:
    """Extract the scores of the windows of a batch, in order."""
    nll, best = map(np.asarray, result)
    for place in batch.places:
        part = place.row, slice(place.start, place.start + place.length)
        yield Scores(nll=nll[part], best=best[part])


def _score_function(model: ModelConfig, params: Params, mesh: Mesh) -> Any:
    """Make (params, batch) -> (nats [B, T], most probable tokens [B, T])."""
    graph, _ = abstract_params(model)

    def per_device(
        params: Params, batch: dict[str, Int[Array, "b T"]]
    ) -> tuple[Float[Array, "b t"], Int[Array, "b t"]]:
        bound: Transformer = nnx.merge(graph, jax.tree.map(collectives.vary, params))
        context = bound.context(batch["positions"], batch["segments"])
        x = bound.run_layers(bound.start(batch["tokens"], batch["positions"]), context)
        return _own_part(*_target_scores(bound, x, batch["targets"]))

    is_simulated = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    by_position = PartitionSpec(DP, TP)
    return jax.shard_map(
        in_order(per_device) if is_simulated else per_device,
        mesh=mesh,
        in_specs=(jax.tree.map(lambda p: p.sharding.spec, params), BATCH_SPEC),
        out_specs=(by_position, by_position),
    )


def _target_scores(
    model: Transformer, x: Float[Array, "b t D"], targets: Int[Array, "b T"]
) -> tuple[Float[Array, "b T"], Int[Array, "b T"]]:
    """Per device: score the complete sequence, one chunk of positions at a time.

    A chunk consists of the same local positions of every device, so all devices
    contribute the same number of positions.
    """
    (b, t, d), total = x.shape, targets.shape[1]
    tp = total // t
    local_vocab = model.config.padded_vocab // tp
    n = _num_chunks(b * total * local_vocab * 4, t)
    xs = x.reshape(b, n, t // n, d).swapaxes(0, 1)
    ys = targets.reshape(b, tp, n, t // n).transpose(2, 0, 1, 3).reshape(n, b, -1)

    def chunk(_: None, piece: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        x, targets = piece
        return None, _scores(model.logits_of(x), targets)

    _, results = jax.lax.scan(chunk, None, (xs, ys))
    nll, best = (
        r.reshape(n, b, tp, t // n).transpose(1, 2, 0, 3).reshape(b, total)
        for r in results
    )
    return nll, best


def _scores(
    logits: Float[Array, "b s v"], targets: Int[Array, "b s"]
) -> tuple[Float[Array, "b s"], Int[Array, "b s"]]:
    """Per device: nats of the targets, and the best token, over the full vocabulary.

    Args:
      logits: float32, this device's columns; -inf where the vocabulary is padded.
      targets: ids over the full vocabulary; NO_TARGET costs 0 nats.
    """
    local = logits.shape[-1]
    ids = collectives.vocab_offset(local) + jnp.arange(local)
    top = collectives.max_over_vocab(logits.max(-1))
    total = collectives.sum_over_vocab(jnp.exp(logits - top[..., None]).sum(-1))
    hit = ids == targets[..., None]
    at_target = collectives.sum_over_vocab(jnp.where(hit, logits, 0.0).sum(-1))
    nll = jnp.where(targets == NO_TARGET, 0.0, top + jnp.log(total) - at_target)
    # Of the ids with the largest logit choose the lowest, as a maximum of negative ids:
    # `collectives` has a maximum over the vocabulary, but no minimum.
    lowest = jnp.iinfo(jnp.int32).min
    best = jnp.where(logits == top[..., None], -ids, lowest).max(-1)
    return nll, -collectives.max_over_vocab(best)


def _own_part(
    *arrays: Float[Array, "b T"] | Int[Array, "b T"],
) -> tuple[Any, ...]:
    """Per device: keep the local positions of an array that is replicated over tp."""

    def own(x: Array) -> Array:
        size = x.shape[1] // jax.lax.axis_size(TP)
        offset = collectives.sequence_offset(size)
        part = jax.lax.dynamic_slice_in_dim(x, offset, size, axis=1)
        return jax.lax.psum(part, PP)  # pp has size 1: only the type changes

    return tuple(map(own, arrays))


def _num_chunks(num_bytes: int, num_positions: int) -> int:
    """Return the fewest equal chunks of positions within the limit for logits."""
    divisors = (n for n in range(1, num_positions + 1) if num_positions % n == 0)
    return next((n for n in divisors if num_bytes <= n * _CHUNK_BYTES), num_positions)
